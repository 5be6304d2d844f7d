// Data loading, unpacking, and the few helpers that every view uses. All text reaches the page as text nodes.
"use strict";

const R = (window.R = {
  index: null,
  views: {},
  assets: document.body.dataset.assets,
});

// Loading. A page opened from disk may load scripts only: every data file calls R.put(key, packed string).

(() => {
  const waiting = new Map();
  const loaded = new Map(); // in the order of use: the oldest go first
  const KEEP = 80;

  R.put = (key, packed) => {
    const entry = waiting.get(key);
    if (entry) entry.packed = packed;
  };

  function loadScript(src) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = src;
      script.onload = () => { script.remove(); resolve(); };
      script.onerror = () => { script.remove(); reject(new Error(`${src} could not be loaded. Was the folder beside the page moved?`)); };
      document.head.append(script);
    });
  }
  R.loadScript = loadScript;

  async function fetchData(key, stamp) {
    const entry = { packed: null };
    waiting.set(key, entry);
    const suffix = stamp ? `?${encodeURIComponent(stamp)}` : "";
    await loadScript(`${R.assets}/data/${key}.js${suffix}`);
    waiting.delete(key);
    if (entry.packed === null) throw new Error(`${key} holds no data`);
    return unpack(entry.packed);
  }

  // The stamp names a state of the file, so that a page that follows a run sees it change.
  R.load = (key, stamp = "") => {
    const name = `${key}?${stamp}`;
    let promise = loaded.get(name);
    if (promise) {
      loaded.delete(name);
    } else {
      promise = fetchData(key, stamp);
      promise.catch(() => loaded.delete(name));
    }
    loaded.set(name, promise);
    for (const old of loaded.keys()) {
      if (loaded.size <= KEEP) break;
      loaded.delete(old);
    }
    return promise;
  };

  function bytesOf(text) {
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return bytes;
  }

  async function unpack(packed) {
    if (typeof DecompressionStream === "undefined") {
      throw new Error("This browser is too old for the report: it needs Chrome 103, Firefox 113 or Safari 16.4.");
    }
    const stream = new Blob([bytesOf(packed)]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return JSON.parse(await new Response(stream).text());
  }

  const ODD = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };
  R.number = (value) => (typeof value === "string" && Object.hasOwn(ODD, value) ? ODD[value] : value);
})();

// Elements. Children are elements or text; attributes never hold text of a model except title and aria-label.

R.h = (tag, properties, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "style") for (const [name, item] of Object.entries(value)) element.style.setProperty(name, item);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(element.dataset, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
};

// Characters that are invisible or turn the text around are shown by their number, so that they change nothing.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

R.appendText = (element, text) => {
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) element.append(text.slice(from, match.index));
    const code = match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    element.append(R.h("span", { class: "hidden-char" }, `U+${code}`));
    from = match.index + match[0].length;
  }
  if (from < text.length) element.append(text.slice(from));
  return element;
};
R.plain = (text) => String(text).replace(HIDDEN, "\ufffd");

// A long text, cut, with a button for more of it.
const CUT = 2000, CUT_LINES = 60, MORE = 50000;
R.cutLength = (text) => {
  if (text.length <= CUT && text.length < CUT_LINES) return text.length;
  let lines = 0;
  for (let i = 0; i < Math.min(text.length, CUT); i++) {
    if (text.charCodeAt(i) === 10 && ++lines === CUT_LINES) return i;
  }
  return Math.min(text.length, CUT);
};
R.longText = (element, text) => {
  let shown = R.cutLength(text);
  R.appendText(element, text.slice(0, shown));
  if (shown < text.length) {
    const button = R.h("button", { class: "more", type: "button" });
    const label = () => { button.textContent = `… ${R.count(text.length - shown)} more characters`; };
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      const part = document.createElement("span");
      R.appendText(part, text.slice(shown, shown + MORE));
      button.before(part);
      shown = Math.min(text.length, shown + MORE);
      if (shown < text.length) label(); else button.remove();
    });
    label();
    element.append(button);
  }
  return element;
};

// Numbers in words.

R.format = (value, digits = 4) => {
  value = R.number(value);
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
};
R.fixed = (value, digits) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return R.format(value);
  return (Object.is(value, -0) || Math.abs(value) < 0.5 * 10 ** -digits ? 0 : value).toFixed(digits).replace("-", "−");
};
R.count = (value) => Number(value).toLocaleString("en-US");
R.plural = (count, one, many) => `${R.count(count)} ${count === 1 ? one : many || `${one}s`}`;
R.duration = (seconds) => {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
};

// Where we are: "#samples/run=0/split=train/step=12". Values are encoded, so they may hold anything.

R.route = () => {
  const [view, ...parts] = location.hash.slice(1).split("/");
  const state = {};
  for (const part of parts) {
    const [key, value] = part.split("=");
    try { state[key] = decodeURIComponent(value || ""); } catch { state[key] = ""; }
  }
  return { view: Object.hasOwn(R.views, view) ? view : "overview", state };
};
R.link = (view, state = {}) => {
  const parts = Object.entries(state).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `#${[view, ...parts.map(([key, value]) => `${key}=${encodeURIComponent(value)}`)].join("/")}`;
};
R.go = (view, state, replace = false) => {
  const hash = R.link(view, state);
  if (location.hash === hash) return;
  if (replace) { history.replaceState(null, "", hash); R.shown = hash; } else { R.leave(); location.hash = hash; }
};

R.isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const COLOURS = {
  light: ["#4263eb", "#e8590c", "#2f9e44", "#ae3ec9", "#0c8599", "#e64980", "#f08c00", "#5c6b7a"],
  dark: ["#748ffc", "#ff922b", "#51cf66", "#da77f2", "#22b8cf", "#f783ac", "#fcc419", "#adb5bd"],
};
R.colour = (run) => COLOURS[R.isDark() ? "dark" : "light"][run % COLOURS.light.length];
R.store = (key, value) => {
  try {
    if (value === undefined) return localStorage.getItem(`roll-${key}`);
    localStorage.setItem(`roll-${key}`, value);
  } catch { /* pages from disk may not be allowed to remember anything */ }
  return null;
};
