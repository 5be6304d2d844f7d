// The resolved config, and what differs from the defaults.
"use strict";

(() => {
  const KINDS = { changed: "differs", set: "set by you", follows: "follows another key", default: "default", unknown: "" };
  const show = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value || "\"\"" : JSON.stringify(value));

  R.views.config = {
    title: "Config",
    async render(main, state, current) {
      const run = Math.min(Number(state.run) || 0, R.index.runs.length - 1);
      const { rows } = await R.load(`run${run}/config`, R.version || "");
      if (!current()) return;
      const info = R.index.runs[run].info;
      const comparable = rows.some((row) => row.kind !== "unknown");
      let query = "", only = comparable;
      const search = R.h("input", { type: "search", class: "search", placeholder: `Search ${rows.length} keys and values`, "aria-label": "Search the config", autocomplete: "off", spellcheck: "false" });
      const toggle = R.h("input", { type: "checkbox", checked: only });
      const count = R.h("span", { class: "muted", role: "status" });
      const body = R.h("tbody", {});
      const fill = () => {
        const words = query.toLowerCase().split(/\s+/);
        const shown = rows.filter((row) => (!only || row.kind === "changed" || row.kind === "set") && words.every((word) => `${row.key} ${show(row.value)}`.toLowerCase().includes(word)));
        count.textContent = R.plural(shown.length, "key");
        body.replaceChildren(...shown.slice(0, 2000).map((row) => {
          const dot = row.key.lastIndexOf(".");
          return R.h("tr", { class: `config-${row.kind}` },
            R.h("td", { class: "key" }, dot > 0 && R.h("span", { class: "prefix" }, R.plain(row.key.slice(0, dot + 1))), R.plain(row.key.slice(dot + 1))),
            R.longText(R.h("td", { class: "value" }), show(row.value)),
            R.longText(R.h("td", { class: "default" }), row.kind === "changed" || row.kind === "follows" ? show(row.default) : ""),
            R.h("td", { class: "kind" }, KINDS[row.kind]));
        }));
      };
      search.addEventListener("input", () => { query = search.value.trim(); fill(); });
      toggle.addEventListener("change", () => { only = toggle.checked; fill(); });
      const overrides = Array.isArray(info.overrides) && info.overrides.length ? R.h("p", {}, "Given on the command line: ", info.overrides.map((text) => R.h("code", { class: "override" }, R.plain(text).slice(0, 300)))) : null;
      fill();
      main.replaceChildren(
        R.runPicker(run, (i) => R.go("config", { run: i })) || "",
        R.h("div", { class: "toolbar" }, search, R.h("label", { class: "control" }, toggle, "only what differs from the defaults"), count),
        overrides || "",
        rows.length ? R.h("div", { class: "panel table-box" }, R.h("table", { class: "config" }, R.h("thead", {}, R.h("tr", {}, ["Key", "Value", "Default", ""].map((text) => R.h("th", {}, text)))), body)) : R.h("p", { class: "empty" }, "The run folder holds no config.yaml."));
    },
  };
})();
