// Every metric: search, smoothing, runs on top of each other.
"use strict";

(() => {
  const settings = { q: "", smooth: 0, axis: "step", log: false, hidden: new Set() };

  R.curveCard = (metric, lines, options) => {
    const last = lines.length === 1 && lines[0].y.length ? lines[0].y.findLast((value) => value !== null) : null;
    const slash = metric.lastIndexOf("/");
    const chart = R.chart(lines, options);
    const card = R.h("figure", { class: "curve", data: { metric } },
      R.h("figcaption", { title: R.plain(metric) }, R.h("span", { class: "curve-name" }, slash > 0 && R.h("span", { class: "prefix" }, R.plain(metric.slice(0, slash + 1))), R.plain(metric.slice(slash + 1))),
        last !== null && last !== undefined && R.h("span", { class: "curve-last" }, R.format(last))), chart);
    card.chart = chart;
    return card;
  };

  // Buttons that choose one of several runs; null for a single one.
  R.runPicker = (current, pick) => {
    if (R.index.runs.length < 2) return null;
    return R.h("div", { class: "run-picker", role: "group", "aria-label": "Run" }, R.index.runs.map((entry, i) =>
      R.h("button", { type: "button", class: "chip", "aria-pressed": String(i === current), onclick: () => pick(i) }, R.h("span", { class: "swatch", style: { background: R.colour(i) } }), R.plain(entry.name))));
  };

  const matches = (metric, query) => query.toLowerCase().split(/\s+/).every((word) => metric.toLowerCase().includes(word));

  R.views.curves = {
    title: "Curves",
    async render(main, state, current) {
      const datas = await Promise.all(R.index.runs.map((_, i) => R.metrics(i)));
      if (!current()) return;
      const metrics = [...new Set(datas.flatMap((data) => Object.keys(data.metrics)))].sort();
      settings.q = state.q ?? settings.q;
      const marks = state.mark ? [Number(state.mark)] : [];
      const lines = (metric) => datas.map((data, i) => (data.metrics[metric] && !settings.hidden.has(i) ? R.line(data, metric, i, settings.axis) : null)).filter(Boolean);
      const options = () => ({ smooth: settings.smooth, log: settings.log, xTitle: settings.axis === "time" ? "minutes" : "", marks: settings.axis === "step" ? marks : [] });

      const cards = new Map();
      const groups = new Map();
      for (const metric of metrics) {
        const prefix = metric.includes("/") ? metric.slice(0, metric.indexOf("/")) : "other";
        if (!groups.has(prefix)) groups.set(prefix, []);
        groups.get(prefix).push(metric);
      }
      const search = R.h("input", { type: "search", class: "search", id: "metric-search", placeholder: `Search ${metrics.length} metrics`, "aria-label": "Search metrics", value: settings.q, autocomplete: "off", spellcheck: "false" });
      const found = R.h("span", { class: "muted found", role: "status" });
      const smooth = R.h("input", { type: "range", id: "smoothing", min: "0", max: "0.98", step: "0.02", value: String(settings.smooth), "aria-label": "Smoothing" });
      const amount = R.h("output", { for: "smoothing" }, settings.smooth.toFixed(2));
      const axis = R.h("select", { "aria-label": "Horizontal axis" }, [["step", "by step"], ["time", "by time"]].map(([value, label]) => R.h("option", { value, selected: settings.axis === value }, label)));
      const log = R.h("input", { type: "checkbox", checked: settings.log });
      const runs = R.index.runs.length > 1 && R.h("div", { class: "run-picker", role: "group", "aria-label": "Runs shown" }, R.index.runs.map((entry, i) => R.h("button", {
        type: "button", class: "chip", "aria-pressed": String(!settings.hidden.has(i)),
        onclick: (event) => { settings.hidden.has(i) ? settings.hidden.delete(i) : settings.hidden.add(i); event.currentTarget.setAttribute("aria-pressed", String(!settings.hidden.has(i))); redraw(); },
      }, R.h("span", { class: "swatch", style: { background: R.colour(i) } }), R.plain(entry.name))));

      const sections = [...groups].map(([prefix, names]) => {
        const grid = R.h("div", { class: "chart-grid" });
        const count = R.h("span", { class: "muted" });
        const section = R.h("details", { class: "curve-group", open: true }, R.h("summary", {}, R.h("h2", {}, R.plain(prefix)), count), grid);
        for (const metric of names) {
          const card = R.curveCard(metric, lines(metric), { ...options(), pick: (x) => settings.axis === "step" && R.openStep(0, x) });
          cards.set(metric, card);
          grid.append(card);
        }
        return { section, names, count };
      });
      const redraw = () => { for (const [metric, card] of cards) card.chart.update(lines(metric), options()); };
      const filter = () => {
        let shown = 0;
        for (const { section, names, count } of sections) {
          let here = 0;
          for (const metric of names) {
            const fits = matches(metric, settings.q);
            cards.get(metric).hidden = !fits;
            here += fits;
          }
          section.hidden = !here;
          count.textContent = here === names.length ? R.count(here) : `${here} of ${names.length}`;
          shown += here;
        }
        found.textContent = settings.q ? `${R.plural(shown, "metric")} found` : "";
      };
      search.addEventListener("input", () => { settings.q = search.value.trim(); filter(); R.go("curves", { q: settings.q }, true); });
      smooth.addEventListener("input", () => { settings.smooth = Number(smooth.value); amount.textContent = settings.smooth.toFixed(2); redraw(); });
      axis.addEventListener("change", () => { settings.axis = axis.value; redraw(); });
      log.addEventListener("change", () => { settings.log = log.checked; redraw(); });
      filter();
      main.replaceChildren(
        R.h("div", { class: "toolbar" }, search, found, R.h("label", { class: "control" }, "Smoothing", smooth, amount), R.h("label", { class: "control" }, axis), R.h("label", { class: "control" }, log, "log scale"), runs),
        !R.index.plotly ? R.h("p", { class: "notice" }, "The charts are simple sketches because plotly is not installed: pip install plotly, then write the report again.") : "",
        metrics.length ? R.h("div", { class: "curves" }, sections.map(({ section }) => section)) : R.h("p", { class: "empty" }, "No metric was logged yet."));
    },
  };
})();
