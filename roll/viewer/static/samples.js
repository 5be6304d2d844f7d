// Step -> group -> sample -> token.
"use strict";

(() => {
  const GROUP_HEIGHT = 46, ROW_HEIGHT = 58;
  const settings = { q: "", show: "all", sort: "group", mode: "advantage" };
  const here = {}; // what is on the screen: run, split, entry of the step, its listing and rows, the open sample

  const SHOW = {
    all: ["All samples", () => true],
    trained: ["Trained on", (row) => !row.dropped],
    dropped: ["Discarded", (row) => row.dropped],
    length: ["Cut off", (row) => row.finish === "length"],
    good: ["Advantage above 0", (row) => row.advantage > 0],
    poor: ["Advantage below 0", (row) => row.advantage < 0],
    wrong: ["Ranked wrong", (row) => row.ranked === "wrong"],
  };
  const SORT = {
    group: ["By group", null],
    score: ["Best score first", (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)],
    worst: ["Worst score first", (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity)],
    advantage: ["Largest advantage first", (a, b) => Math.abs(b.advantage ?? 0) - Math.abs(a.advantage ?? 0)],
    tokens: ["Longest first", (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0)],
  };

  const stepsOf = (run, split) => R.index.runs[run].steps.filter((item) => item.split === split);
  const isNarrow = () => matchMedia("(max-width: 860px)").matches;
  const state = (changes = {}) => ({ run: here.run || null, split: here.split === "val" ? "val" : null, step: here.entry?.step, sample: here.sample, ...changes });
  const tone = (value) => (value > 0 ? "up" : value < 0 ? "down" : "zero");

  const rowsOf = (listing) => listing.rows.map((row, i) => ({ ...row, number: i, score: R.number(row.score), advantage: R.number(row.advantage) }));

  // A list of rows of known heights: only those in sight are in the page.
  function virtualList(box, items, height, draw) {
    const tops = [0];
    for (const item of items) tops.push(tops[tops.length - 1] + height(item));
    const inner = R.h("div", { class: "virtual", style: { height: `${tops[items.length]}px` } });
    const shown = new Map();
    const update = () => {
      const from = box.scrollTop - 300, to = box.scrollTop + box.clientHeight + 300;
      let first = 0, last = items.length;
      while (first < last) { const middle = (first + last) >> 1; if (tops[middle + 1] < from) first = middle + 1; else last = middle; }
      const wanted = new Set();
      for (let i = first; i < items.length && tops[i] < to; i++) wanted.add(i);
      for (const [i, element] of shown) if (!wanted.has(i)) { element.remove(); shown.delete(i); }
      for (const i of wanted) {
        if (shown.has(i)) continue;
        const element = draw(items[i]);
        element.style.top = `${tops[i]}px`;
        element.style.height = `${height(items[i])}px`;
        shown.set(i, element);
        inner.append(element);
      }
    };
    box.replaceChildren(inner);
    box.scrollTop = 0;
    box.onscroll = update;
    box.reveal = (i) => {
      if (i >= 0 && (tops[i] < box.scrollTop || tops[i + 1] > box.scrollTop + box.clientHeight)) box.scrollTop = tops[i] - box.clientHeight / 3;
      update();
    };
    box.redraw = () => { for (const element of shown.values()) element.remove(); shown.clear(); update(); };
    box.watch?.disconnect();
    box.watch = new ResizeObserver(update);
    box.watch.observe(box);
    update();
  }

  function sampleRow(row) {
    const selected = row.number === here.sample;
    return R.h("a", { class: `sample-row${selected ? " selected" : ""}`, href: R.link("samples", state({ sample: row.number })), "aria-current": selected ? "true" : null, data: { row: row.number } },
      R.h("span", { class: `score ${tone(row.score)}`, title: "score" }, R.format(row.score, 3)),
      R.h("span", { class: "row-text" }, R.h("span", { class: "preview" }, R.plain(row.preview || "(empty)")),
        R.h("span", { class: "row-notes" }, row.ranked && R.h("span", {}, R.plain(row.tag)), row.advantage !== null && R.h("span", { class: tone(row.advantage) }, `advantage ${R.format(row.advantage, 3)}`),
          row.tokens !== null && R.h("span", {}, R.plural(row.tokens, "token")),
          row.finish === "length" && R.h("span", { class: "flag warn" }, "cut off"), row.dropped && R.h("span", { class: "flag bad" }, "discarded"))));
  }

  // A prompt in one line, without the marks of a chat template around it.
  const promptLine = (text) => R.plain(text).replace(/<\|[^|<>]*\|>/g, " ").replace(/\s+/g, " ").trim().replace(/^(system|user) /, "").replace(/ assistant$/, "");

  const rankedWords = (ranked) => (ranked === "tie" ? "a tie" : `ranked ${R.plain(ranked)}`);
  function groupRow({ group, rows }) {
    const scores = rows.map((row) => row.score).filter((score) => Number.isFinite(score));
    const mean = scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null;
    const flat = scores.length > 1 && scores.every((score) => score === scores[0]);
    const about = here.listing.groups[group];
    const { ranked } = rows[0];
    const flag = ranked ? R.h("span", { class: `flag ${ranked === "wrong" ? "bad" : ""}` }, rankedWords(ranked)) : flat && R.h("span", { class: "flag" }, "no signal");
    return R.h("div", { class: "group-row" }, R.h("span", { class: "group-prompt" }, promptLine(about.prompt) || `group ${R.plain(about.id)}`),
      R.h("span", { class: "group-notes" }, R.plural(rows.length, "sample"), mean !== null && `, mean ${R.format(mean, 3)}`, flag));
  }

  const pieceOf = (row) => R.load(`${here.entry.key}-${row.piece}`, R.following ? here.entry.stamp : "");

  async function matching() {
    const rows = here.rows.filter(SHOW[settings.show][1]);
    if (!settings.q) return rows;
    const query = settings.q.toLowerCase();
    here.texts ||= Promise.all(here.rows.map(async (row) => R.textOf(R.sampleOf(await pieceOf(row), row.index, here.listing.vocabulary)).toLowerCase()));
    const texts = await here.texts;
    return rows.filter((row) => [texts[row.number], row.sample, row.tag, row.domain, row.dropped].some((text) => text && String(text).toLowerCase().includes(query)));
  }

  async function fillList() {
    const list = here.list, wanted = (here.wanted = {});
    const rows = await matching();
    if (here.list !== list || here.wanted !== wanted) return; // another step, or another search, came in between
    const compare = SORT[settings.sort][1];
    let items = rows.slice().sort(compare || (() => 0)).map((row) => ({ row }));
    if (!compare) {
      const groups = new Map();
      for (const row of rows) groups.set(row.group, [...(groups.get(row.group) || []), row]);
      items = [...groups].flatMap(([group, members]) => [{ group, rows: members }, ...members.map((row) => ({ row }))]);
    }
    here.items = items;
    here.order = items.filter((item) => item.row).map((item) => item.row.number);
    here.found.textContent = rows.length === here.rows.length ? "" : `${R.count(rows.length)} of ${R.plural(here.rows.length, "sample")}`;
    if (!items.length) {
      here.list.replaceChildren(R.h("p", { class: "empty" }, here.rows.length ? "No sample fits." : "No samples were logged for this step."));
      here.list.reveal = here.list.redraw = here.list.onscroll = null;
      return;
    }
    virtualList(here.list, items, (item) => (item.row ? ROW_HEIGHT : GROUP_HEIGHT), (item) => (item.row ? sampleRow(item.row) : groupRow(item)));
    reveal();
  }
  const reveal = () => here.list.reveal?.(here.items.findIndex((item) => item.row?.number === here.sample));

  // The open sample.

  function fact(label, value, kind) {
    return value === null || value === undefined || value === "" ? null : R.h("div", { class: "fact" }, R.h("dt", {}, label), R.h("dd", { class: kind || "" }, value));
  }

  const ENDINGS = { stop: "itself", length: "the length limit", abort: "an abort", error: "an error" };
  function facts(row, sample) {
    return R.h("dl", { class: "facts" }, fact("Score", R.format(row.score)), fact("Reward", sample.reward === undefined ? null : R.format(sample.reward)),
      fact("Advantage", row.advantage === null ? null : R.format(row.advantage), tone(row.advantage)), fact("Ended by", row.finish && (ENDINGS[row.finish] || R.plain(row.finish))),
      fact("Pair", row.ranked && rankedWords(row.ranked)), fact("Trained tokens", row.tokens === null ? null : R.count(row.tokens)), fact("Policy version", sample.version === undefined ? null : R.plain(sample.version)),
      fact("Tag", row.tag && R.plain(row.tag)), fact("Domain", row.domain && R.plain(row.domain)),
      sample.truth !== undefined && R.h("div", { class: "fact" }, R.h("dt", {}, "Ground truth"), R.longText(R.h("dd", { class: "truth" }), String(sample.truth))));
  }

  function partsTable(parts) {
    const entries = Object.entries(parts || {}).map(([name, value]) => [name, R.number(value)]);
    if (!entries.length) return "";
    const largest = Math.max(1e-9, ...entries.map(([, value]) => (Number.isFinite(value) ? Math.abs(value) : 0)));
    const bar = (value) => R.h("span", { class: tone(value), style: { width: `${Number.isFinite(value) ? (100 * Math.abs(value)) / largest : 0}%` } });
    return R.h("div", { class: "parts" }, R.h("h3", {}, "Rewards by part"), entries.map(([name, value]) =>
      R.h("div", { class: "part" }, R.h("span", { class: "part-name" }, R.plain(name)), R.h("span", { class: "part-bar" }, bar(value)), R.h("span", { class: "part-value" }, R.format(value)))));
  }

  function siblings(row) {
    const members = here.rows.filter((other) => other.group === row.group);
    if (members.length < 2) return "";
    return R.h("div", { class: "siblings", role: "group", "aria-label": "Samples of this group" }, R.h("span", { class: "muted" }, `Group of ${members.length}`), members.slice(0, 64).map((other) =>
      R.h("a", { class: `sibling ${tone(other.score)}`, "aria-current": other === row ? "true" : null, href: R.link("samples", state({ sample: other.number })) }, R.format(other.score, 2))));
  }

  function body(sample) {
    if (!sample.length) {
      const bubble = (label, kind, text) => R.h("section", { class: `bubble ${kind}` }, R.h("header", {}, R.h("span", {}, label)), R.longText(R.h("div", { class: "bubble-text" }), text || ""));
      return [R.h("div", { class: "conversation" }, bubble("Prompt", "observation", sample.prompt), bubble("Response", "response", sample.response))];
    }
    const modes = R.colourModes(sample);
    const chosen = settings.mode === "" || modes.some((item) => item.id === settings.mode) ? settings.mode : modes[0]?.id || "";
    const view = R.tokenView(sample, chosen);
    const choose = (id) => (event) => {
      settings.mode = id;
      view.recolour(id);
      for (const button of event.currentTarget.parentElement.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
    };
    const buttons = [...modes, { id: "", label: "None" }].map((item) => R.h("button", { type: "button", class: "segment", data: { mode: item.id }, "aria-pressed": String(chosen === item.id), onclick: choose(item.id) }, item.label));
    return [R.h("div", { class: "colour-bar" }, R.h("span", { class: "muted" }, "Colour by"), R.h("div", { class: "segments", role: "group", "aria-label": "Colour tokens by" }, buttons), view.legend), view.element];
  }

  function head(row) {
    const at = here.order.indexOf(row.number);
    const arrow = (by, label, text) => {
      const target = at < 0 ? undefined : here.order[at + by];
      return target === undefined ? R.h("span", { class: "button small off", "aria-hidden": "true" }, text) : R.h("a", { class: "button small", href: R.link("samples", state({ sample: target })), "aria-label": label }, text);
    };
    return R.h("div", { class: "detail-head" }, R.h("a", { class: "button small back", href: R.link("samples", state({ sample: null })) }, "← All samples"),
      R.h("h2", {}, R.h("span", { class: "muted" }, "Sample "), R.plain(row.sample).slice(0, 60)), R.h("span", { class: "spacer" }), arrow(-1, "Sample before", "↑"), arrow(1, "Next sample", "↓"));
  }

  async function fillDetail(current) {
    const row = here.rows[here.sample];
    document.body.dataset.detail = row ? "open" : "";
    if (!row) { here.detail.replaceChildren(R.h("p", { class: "empty" }, "Choose a sample.")); return; }
    const piece = await pieceOf(row);
    if (!current()) return;
    const sample = R.sampleOf(piece, row.index, here.listing.vocabulary);
    sample.scales = { advantage: here.largestAdvantage };
    const dropped = sample.dropped ? R.longText(R.h("p", { class: "notice bad" }, R.h("strong", {}, "Discarded: ")), sample.dropped) : "";
    here.detail.replaceChildren(head(row), siblings(row), dropped, facts(row, sample), partsTable(sample.parts), ...body(sample));
    here.detail.scrollTop = 0;
    here.detail.dataset.sample = row.sample;
  }

  // A sample that taught something, if there is one among those shown.
  function firstWorthReading() {
    const fits = SHOW[settings.show][1];
    const taught = here.rows.findIndex((row) => fits(row) && row.advantage);
    return taught >= 0 ? taught : Math.max(0, here.rows.findIndex(fits));
  }

  // The frame around list and sample.

  function stepBar() {
    const steps = stepsOf(here.run, here.split);
    const at = steps.indexOf(here.entry);
    const jump = (i) => { if (steps[i]) R.go("samples", state({ step: steps[i].step, sample: null })); };
    const label = R.h("span", { class: "step-label" }, `Step ${here.entry.step}`);
    const slider = R.h("input", { type: "range", min: "0", max: String(Math.max(0, steps.length - 1)), value: String(at), "aria-label": "Step", "aria-valuetext": `step ${here.entry.step}` });
    slider.addEventListener("input", () => { label.textContent = `Step ${steps[slider.value].step}`; });
    slider.addEventListener("change", () => jump(Number(slider.value)));
    const button = (to, name, text) => R.h("button", { type: "button", class: "button small", "aria-label": name, disabled: !steps[to], onclick: () => jump(to) }, text);
    const { stats } = here.entry;
    const pairs = here.rows.filter((row) => row.ranked && row.tag === "chosen"), right = pairs.filter((row) => row.ranked === "right");
    const words = [`${R.plural(stats.samples, "sample")}${stats.in_step > stats.samples ? ` of ${R.count(stats.in_step)}` : ""}`, stats.score !== null && `mean score ${R.format(stats.score, 3)}`,
      pairs.length > 0 ? `${right.length} of ${R.plural(pairs.length, "pair")} ranked right` : stats.groups > 0 && `${stats.flat_groups} of ${R.plural(stats.groups, "group")} without signal`, stats.gap !== null && `log-prob gap ${R.format(stats.gap, 2)}`].filter(Boolean);
    const splits = ["train", "val"].filter((split) => stepsOf(here.run, split).length);
    const picker = splits.length > 1 && R.h("div", { class: "segments", role: "group", "aria-label": "Split" }, splits.map((split) =>
      R.h("button", { type: "button", class: "segment", "aria-pressed": String(split === here.split), onclick: () => R.go("samples", { run: here.run || null, split }) }, split === "train" ? "Training" : "Validation")));
    return R.h("div", { class: "toolbar step-bar" }, picker, button(at - 1, "Step before", "←"), label, button(at + 1, "Step after", "→"), slider, R.h("span", { class: "muted step-words" }, words.join(" · ")));
  }

  function frame(main) {
    const choice = (options, key, name) => {
      const select = R.h("select", { "aria-label": name }, Object.entries(options).filter(([value, [, fits]]) => options !== SHOW || value === settings.show || here.rows.some(fits)).map(([value, [text]]) => R.h("option", { value, selected: settings[key] === value }, text)));
      select.addEventListener("change", () => { settings[key] = select.value; fillList(); });
      return select;
    };
    const search = R.h("input", { type: "search", class: "search", placeholder: "Search these samples", "aria-label": "Search the samples of this step", value: settings.q, autocomplete: "off", spellcheck: "false" });
    let timer = 0;
    search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { if (!search.isConnected) return; settings.q = search.value.trim(); fillList(); }, 150); });
    here.found = R.h("span", { class: "muted found", role: "status" });
    here.list = R.h("div", { class: "sample-list", tabindex: "-1", role: "group", "aria-label": "Samples" });
    here.detail = R.h("section", { class: "detail", tabindex: "-1", "aria-label": "Sample" });
    here.bar = stepBar();
    const tools = R.h("div", { class: "list-tools" }, search, choice(SHOW, "show", "Show"), choice(SORT, "sort", "Order"), here.found);
    main.replaceChildren(R.runPicker(here.run, (run) => R.go("samples", { run })) || "", here.bar, R.h("div", { class: "browser" }, R.h("div", { class: "list-pane" }, tools, here.list), here.detail));
  }

  R.views.samples = {
    title: "Samples",
    async render(main, wanted, current) {
      const run = Math.min(Number(wanted.run) || 0, R.index.runs.length - 1);
      const split = wanted.split === "val" || !stepsOf(run, "train").length ? "val" : "train";
      const steps = stepsOf(run, split);
      if (!steps.length) {
        here.entry = null;
        main.replaceChildren(R.runPicker(run, (i) => R.go("samples", { run: i })) || "", R.h("p", { class: "empty" }, "No samples were logged. A run writes them to its folder rollouts/."));
        return;
      }
      const entry = steps.find((item) => String(item.step) === wanted.step) || steps[steps.length - 1];
      const isSame = here.entry === entry && here.run === run && main.contains(here.list);
      if (!isSame) {
        const listing = await R.load(entry.key, R.following ? entry.stamp : "");
        if (!current()) return;
        const rows = rowsOf(listing);
        const largestAdvantage = rows.reduce((most, row) => Math.max(most, Math.abs(row.advantage) || 0), 0);
        Object.assign(here, { run, split, entry, listing, rows, largestAdvantage, texts: null, order: [], items: [] });
      }
      if (Object.hasOwn(SHOW, wanted.show || "")) settings.show = wanted.show;
      here.sample = wanted.sample !== undefined && here.rows[wanted.sample] ? Number(wanted.sample) : null;
      if (here.sample === null && !isNarrow()) here.sample = firstWorthReading();
      if (isSame) { here.list.redraw?.(); reveal(); } else { frame(main); here.filled = fillList(); }
      await here.filled;
      if (!current()) return;
      await fillDetail(current);
    },
    // A followed run has new steps: the slider learns of them, and what is being read stays.
    refresh() {
      if (!here.entry) { dispatchEvent(new Event("hashchange")); return; }
      here.entry = stepsOf(here.run, here.split).find((item) => item.step === here.entry.step) || here.entry;
      const bar = stepBar();
      here.bar.replaceWith(bar);
      here.bar = bar;
    },
    key(key) {
      if (!here.entry) return false;
      const steps = stepsOf(here.run, here.split);
      if (key === "[" || key === "]") {
        const target = steps[steps.indexOf(here.entry) + (key === "]" ? 1 : -1)];
        if (target) R.go("samples", state({ step: target.step, sample: null }));
        return true;
      }
      if (key === "j" || key === "k") {
        const target = here.order[here.order.indexOf(here.sample) + (key === "j" ? 1 : -1)];
        if (target !== undefined) R.go("samples", state({ sample: target }));
        return true;
      }
      if (key === "Escape" && document.body.dataset.detail && isNarrow()) R.go("samples", state({ sample: null }));
      return false;
    },
  };
})();
