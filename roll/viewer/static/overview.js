// The first view: what this run is, whether it is healthy, and how it went.
"use strict";

(() => {
  const SCORES = ["critic/score/mean", "rollout/score/mean", "critic/rewards/mean", "actor/acc"];
  const KEY_CURVES = [
    SCORES,
    ["val/exact_match", "val/score/mean", "val_correct/all/mean", "val/actor/acc", "val/loss"],
    ["token/response_length/mean", "tokens/response_length/mean", "rollout/response_length/mean", "actor/chosen_reward"],
    ["critic/kl", "actor/kl_loss", "actor/policykl", "actor/reject_reward"],
    ["critic/entropy/mean", "actor/entropy"],
    ["actor/grad_norm", "actor_train/grad_norm"],
    ["actor/loss", "actor/total_loss", "actor/pg_loss"],
    ["time/step_total"],
  ];
  const varies = (values) => values.some((value) => value !== null && value !== values.find((first) => first !== null));
  // The first of these metrics that was logged and moved; a domain may stand before its name.
  const find = (metrics, names) => {
    const known = Object.keys(metrics);
    const keys = names.map((name) => known.find((item) => item === name) || known.find((item) => item.endsWith(`/${name}`) && !item.startsWith("val"))).filter(Boolean);
    if (names[0].startsWith("val") && !keys.length) keys.push(...known.filter((item) => item.startsWith("val")));
    return keys.find((key) => varies(metrics[key])) || keys[0];
  };

  // The metrics of a run, numbers as numbers.
  R.metrics = async (run) => {
    const data = await R.load(`run${run}/metrics`, R.index.live ? `${R.index.runs[run].logged}-${R.index.runs[run].last}-${R.version}` : "");
    for (const [name, values] of Object.entries(data.metrics)) data.metrics[name] = values.map(R.number);
    return data;
  };
  R.line = (data, metric, run, axis = "step") => {
    const values = data.metrics[metric] || [];
    const start = data.times.find((time) => time !== null);
    const x = [], y = [];
    values.forEach((value, i) => {
      if (value === null) return;
      if (axis === "time" && data.times[i] === null) return;
      x.push(axis === "time" ? (data.times[i] - start) / 60 : data.steps[i]);
      y.push(Number.isFinite(value) ? value : null);
    });
    return { name: R.index.runs.length > 1 ? R.index.runs[run].name : metric, x, y, colour: R.colour(run) };
  };
  // The logged samples nearest to a step.
  R.nearestStep = (run, step) => {
    const all = R.index.runs[run].steps, trained = all.filter((item) => item.split === "train");
    const steps = trained.length ? trained : all;
    if (!steps.length) return null;
    return steps.reduce((best, item) => (Math.abs(item.step - step) < Math.abs(best.step - step) ? item : best)).step;
  };
  R.openStep = (run, step) => {
    const nearest = R.nearestStep(run, step);
    if (nearest !== null) R.go("samples", { run, step: nearest });
  };

  function tile(label, value, note, tone) {
    return R.h("div", { class: `tile ${tone || ""}` }, R.h("div", { class: "tile-label" }, label), R.h("div", { class: "tile-value" }, value), R.h("div", { class: "tile-note" }, note));
  }

  function ends(data, key) {
    const values = (data.metrics[key] || []).filter((value) => Number.isFinite(value));
    const size = Math.max(1, Math.min(5, Math.floor(values.length / 8)));
    const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
    return values.length ? [mean(values.slice(0, size)), mean(values.slice(-size))] : null;
  }

  function tiles(run, data) {
    const entry = R.index.runs[run];
    const result = [];
    for (const [label, names] of [["Score", SCORES], ["Validation", KEY_CURVES[1]]]) {
      const key = find(data.metrics, names);
      const pair = key && ends(data, key);
      if (!pair) continue;
      const better = /loss/.test(key) ? pair[1] < pair[0] : pair[1] > pair[0];
      result.push(tile(label, R.h("span", {}, R.h("span", { class: "from" }, R.format(pair[0], 2)), " → ", R.format(pair[1], 2)), key, Math.abs(pair[1] - pair[0]) < 1e-9 ? "" : better ? "good" : "worse"));
    }
    const seconds = entry.times.length > 1 ? entry.times[entry.times.length - 1] - entry.times[0] : null;
    result.push(tile("Steps", R.count(entry.logged), seconds !== null ? `in ${R.duration(seconds)}` : "logged"));
    const samples = entry.steps.reduce((sum, item) => sum + item.stats.samples, 0);
    const dropped = entry.steps.reduce((sum, item) => sum + Object.values(item.stats.dropped).reduce((a, b) => a + b, 0), 0);
    if (samples) result.push(tile("Samples to look at", R.count(samples), `${R.plural(dropped, "discarded one", "discarded ones")}`));
    return R.h("div", { class: "tiles" }, result);
  }

  const WORDS = { bad: "Broken", warn: "Look at this", info: "Good to know" };

  function finding(item, run) {
    const actions = [];
    if (item.step !== null && R.nearestStep(run, item.step) !== null) {
      const nearest = R.nearestStep(run, item.step);
      actions.push(R.h("a", { class: "button", href: R.link("samples", { run, step: nearest }) }, `Samples of step ${nearest}`));
    }
    if (item.metric) actions.push(R.h("a", { class: "button", href: R.link("curves", { q: item.metric, mark: item.step }) }, "Its curve"));
    if (item.samples) actions.reverse();
    return R.h("article", { class: `finding ${item.severity}` },
      R.h("div", { class: "finding-head" }, R.h("span", { class: `badge ${item.severity}` }, WORDS[item.severity] || item.severity), R.h("h3", {}, R.plain(item.title)), item.step !== null && R.h("span", { class: "finding-step" }, `step ${item.step}`)),
      R.h("p", {}, R.plain(item.detail)), actions.length > 0 && R.h("div", { class: "actions" }, actions));
  }

  function healthPanel(run) {
    const entry = R.index.runs[run];
    const order = ["bad", "warn", "info"];
    const findings = entry.health.flatMap((check) => check.findings).sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity));
    const serious = findings.filter((item) => item.severity !== "info").length;
    const checked = entry.health.filter((check) => check.verdict !== "not measured").length;
    const title = serious ? `${R.plural(serious, "thing looks", "things look")} wrong` : checked ? "Nothing looks wrong" : "Nothing to judge by yet";
    const chips = entry.health.map((check) => R.h("li", { class: `check ${check.verdict.replace(" ", "-")}`, title: check.verdict }, check.name));
    return R.h("section", { class: "panel health", "aria-label": "Health" },
      R.h("div", { class: "panel-head" }, R.h("h2", {}, R.h("span", { class: `dot ${serious ? (findings[0].severity) : "ok"}` }), "Health"), R.h("p", { class: "muted" }, `${title}. ${checked === entry.health.length ? `All ${checked}` : `${checked} of ${entry.health.length}`} checks could be made.`)),
      R.h("div", { class: "findings" }, findings.map((item) => finding(item, run))),
      R.h("ul", { class: "checks" }, chips));
  }

  function curves(run, datas) {
    const cards = [];
    const seen = new Set();
    for (const names of KEY_CURVES) {
      const key = find(datas[run].metrics, names);
      if (!key || seen.has(key) || cards.length === 6 || (names !== SCORES && !varies(datas[run].metrics[key]))) continue;
      seen.add(key);
      const lines = datas.map((data, i) => (data.metrics[key] ? R.line(data, key, i) : null)).filter(Boolean);
      cards.push(R.curveCard(key, lines, { pick: (x) => R.openStep(run, x) }));
    }
    if (!cards.length) return null;
    return R.h("section", { class: "panel", "aria-label": "Main curves" },
      R.h("div", { class: "panel-head" }, R.h("h2", {}, "How it went"), R.h("p", { class: "muted" }, "Click a point to read the samples of that step. ", R.h("a", { href: "#curves" }, "All curves"))),
      R.h("div", { class: "chart-grid" }, cards));
  }

  function parts(run) {
    const steps = R.index.runs[run].steps.filter((item) => item.split === "train");
    const names = [...new Set(steps.flatMap((item) => Object.keys(item.stats.parts)))];
    if (!names.length) return null;
    const lines = names.map((name, i) => {
      const points = steps.filter((item) => item.stats.parts[name]);
      return { name, x: points.map((item) => item.step), y: points.map((item) => item.stats.parts[name][3]), colour: R.colour(i) };
    });
    const legend = R.h("ul", { class: "legend" }, lines.map((line) => R.h("li", {}, R.h("span", { class: "swatch", style: { background: line.colour } }), R.plain(line.name))));
    return R.h("section", { class: "panel half", "aria-label": "Rewards by part" },
      R.h("div", { class: "panel-head" }, R.h("h2", {}, "Rewards by part"), R.h("p", { class: "muted" }, "Mean over the logged samples of each step.")), legend, R.chart(lines, { height: 200, pick: (x) => R.openStep(run, x) }));
  }

  function discarded(run) {
    const reasons = new Map();
    for (const item of R.index.runs[run].steps) {
      for (const [reason, count] of Object.entries(item.stats.dropped)) {
        const known = reasons.get(reason) || { count: 0, steps: [] };
        known.count += count;
        known.steps.push(item);
        reasons.set(reason, known);
      }
    }
    if (!reasons.size) return null;
    const rows = [...reasons].sort((a, b) => b[1].count - a[1].count).slice(0, 50).map(([reason, { count, steps }]) =>
      R.h("tr", {}, R.h("td", { class: "reason" }, R.plain(reason)), R.h("td", { class: "num" }, R.count(count)),
        R.h("td", {}, steps.slice(0, 4).map((item) => R.h("a", { class: "step-link", href: R.link("samples", { run, step: item.step, split: item.split, show: "dropped" }) }, String(item.step))), steps.length > 4 ? ` and ${steps.length - 4} more` : "")));
    return R.h("section", { class: "panel half", "aria-label": "Discarded samples" },
      R.h("div", { class: "panel-head" }, R.h("h2", {}, "Discarded samples"), R.h("p", { class: "muted" }, "Generated, then not trained on.")),
      R.h("div", { class: "table-box" }, R.h("table", {}, R.h("thead", {}, R.h("tr", {}, R.h("th", {}, "Reason"), R.h("th", { class: "num" }, "Samples"), R.h("th", {}, "Steps"))), R.h("tbody", {}, rows))));
  }

  function problems(run) {
    const list = R.index.runs[run].problems;
    if (!list.length) return null;
    return R.h("details", { class: "panel problems" }, R.h("summary", {}, `${R.plural(list.length, "thing")} in the run folder could not be read`), R.h("ul", {}, list.map((text) => R.h("li", {}, R.plain(text)))));
  }

  R.views.overview = {
    title: "Overview",
    async render(main, state, current) {
      const run = Math.min(Number(state.run) || 0, R.index.runs.length - 1);
      const datas = await Promise.all(R.index.runs.map((_, i) => R.metrics(i)));
      if (!current()) return;
      const entry = R.index.runs[run];
      const info = entry.info;
      const words = [info.pipeline && String(info.pipeline).toUpperCase(), info.started && `started ${String(info.started).replace("T", " ").slice(0, 16)}`, info.roll && `roll ${info.roll}`].filter(Boolean).map((word) => R.plain(word).slice(0, 80));
      const command = Array.isArray(info.command) ? [String(info.command[0]).split(/[\\/]/).pop(), ...info.command.slice(1)].join(" ") : "";
      main.replaceChildren(
        R.runPicker(run, (i) => R.go("overview", { run: i })) || "",
        R.h("section", { class: "hero" }, R.h("h1", {}, R.plain(entry.name)), R.h("p", { class: "muted" }, words.join(" · ")), command && R.h("code", { class: "command", title: R.plain(command) }, R.plain(command).slice(0, 300))),
        tiles(run, datas[run]), problems(run) || "", healthPanel(run), curves(run, datas) || "",
        R.h("div", { class: "halves" }, parts(run), discarded(run)));
    },
  };
})();
