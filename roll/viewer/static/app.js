// The frame: tabs, theme, keyboard, following a run.
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  const main = $("main");
  let turn = 0;

  // From the click or the key on, what is on the screen is the place before. Whatever is still being drawn for it gives
  // up, and `data-ready` of the body, which names the view that stands complete and painted, is gone until the new one is.
  R.leave = () => { delete document.body.dataset.ready; return ++turn; };
  const painted = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));

  async function show() {
    if (location.hash === "#main") { main.focus(); history.replaceState(null, "", R.shown || "#overview"); return; }
    const { view, state } = R.route();
    R.shown = location.hash;
    const mine = R.leave();
    R.hideCard();
    if (R.current !== view) window.scrollTo(0, 0);
    R.current = view;
    document.body.dataset.view = view;
    for (const link of $("tabs").children) {
      if (link.dataset.view === view) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    try {
      await R.views[view].render(main, state, () => mine === turn);
    } catch (error) {
      if (mine === turn) main.replaceChildren(R.h("p", { class: "notice" }, `This view could not be shown: ${R.plain(error.message)}`));
      console.error(error);
    }
    if (mine !== turn) return;
    R.dropCharts();
    await painted();
    if (mine === turn) document.body.dataset.ready = view;
  }

  function header() {
    const runs = R.index.runs;
    const name = runs.map((run) => R.plain(run.name)).join(" · ");
    $("run-name").textContent = name;
    document.title = `${name} – roll report`;
    const status = runs.length === 1 ? R.plain(runs[0].info.status || "").slice(0, 20) : R.plural(runs.length, "run");
    $("run-status").textContent = R.following && status === "running" ? "running, following" : status;
    $("run-status").className = `pill ${["running", "finished", "failed", "stopped"].includes(status) ? status : ""}`;
    $("run-status").hidden = !status;
  }

  function setTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    $("theme-button").textContent = R.isDark() ? "☀" : "☾";
    if (R.current === "overview" || R.current === "curves") show(); // lines have colours of their own in the dark
  }
  function switchTheme() {
    const theme = R.isDark() ? "light" : "dark";
    R.store("theme", theme);
    setTheme(theme);
  }

  const KEYS = [
    ["1 2 3 4", "Overview, curves, samples, config"], ["/", "Search in this view"], ["[ and ]", "Step before, step after"],
    ["j and k", "Next sample, sample before"], ["← and →", "Token before, token after (when a token has the focus)"],
    ["Enter", "Open what has the focus"], ["Esc", "Close, or back to the list"], ["t", "Light or dark"], ["?", "This help"],
  ];
  function help() {
    const dialog = $("help");
    if (dialog.open) { dialog.close(); return; }
    dialog.replaceChildren(R.h("h2", {}, "Keyboard"), R.h("dl", {}, KEYS.map(([key, text]) => [R.h("dt", {}, R.h("kbd", {}, key)), R.h("dd", {}, text)])),
      R.h("p", { class: "muted" }, "Everything on this page lies in the run folder. It loads nothing from the network."),
      R.h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close"));
    dialog.showModal();
  }

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName || "") && document.activeElement.type !== "range" && document.activeElement.type !== "checkbox";
    if (event.key === "Escape") {
      if (typing) document.activeElement.blur();
      else if (!$("help").open) R.views[R.current].key?.("Escape");
      R.hideCard();
      return;
    }
    if (typing || $("help").open) return;
    const views = Object.keys(R.views);
    if (/^[1-9]$/.test(event.key) && views[event.key - 1]) R.go(views[event.key - 1]);
    else if (event.key === "/") { const box = main.querySelector("input[type=search]"); if (box) { event.preventDefault(); box.focus(); box.select(); } }
    else if (event.key === "t") switchTheme();
    else if (event.key === "?") help();
    else if (R.views[R.current]?.key?.(event.key)) event.preventDefault();
  });

  // A server that follows a run makes a new index; what is on the screen is drawn again when it has changed.
  async function follow() {
    try {
      const fresh = await R.load("index", `t${Date.now()}`);
      const isTyping = main.contains(document.activeElement) && /^(INPUT|SELECT)$/.test(document.activeElement.tagName);
      if (!isTyping && JSON.stringify(R.index.runs) !== JSON.stringify(fresh.runs)) {
        R.index = fresh;
        R.version = (R.version || 0) + 1;
        header();
        if (R.views[R.current].refresh) R.views[R.current].refresh(); else await show();
      }
    } catch { $("run-status").textContent = "server gone"; }
    setTimeout(follow, 3000);
  }

  async function start() {
    const theme = R.store("theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    R.views = Object.fromEntries(["overview", "curves", "samples", "config"].map((name) => [name, R.views[name]]));
    $("tabs").append(...Object.entries(R.views).map(([view, { title }]) => R.h("a", { href: `#${view}`, data: { view } }, title)));
    $("theme-button").addEventListener("click", switchTheme);
    $("help-button").addEventListener("click", help);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
    try {
      R.index = await R.load("index", location.protocol === "file:" ? "" : `t${Date.now()}`);
    } catch (error) {
      main.replaceChildren(R.h("p", { class: "notice" }, error.message));
      return;
    }
    R.following = R.index.live && location.protocol !== "file:";
    setTheme();
    header();
    addEventListener("hashchange", show);
    addEventListener("click", (event) => {
      const link = event.target.closest?.("a[href^='#']");
      const opensHere = link && !event.defaultPrevented && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
      if (opensHere && link.hash !== "#main" && link.hash !== location.hash) R.leave(); // its hashchange comes later
    });
    await show();
    if (R.following) setTimeout(follow, 3000);
  }
  start();
})();
