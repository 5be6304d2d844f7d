// The tokens of one sample: as a conversation, coloured by a number, with all numbers of the token under the pointer.
"use strict";

(() => {
  // A sample out of its piece: texts, flags, and numbers per token (null where there is none).
  R.sampleOf = (piece, index, vocabulary) => {
    const about = piece.samples[index];
    const words = about.words || [], length = words.length;
    const [ids, texts] = vocabulary[0] || [[], []];
    const known = new Uint8Array(length);
    const columns = {};
    // Whole multiples of a unit, some of them relative to a column before; see samples.py.
    for (const [name, { unit, base, values }] of Object.entries(about.columns || {})) {
      const near = columns[base];
      columns[name] = values.map((value, i) => {
        if (value === null) return null;
        known[i] = 1;
        if (typeof value === "string") return R.number(value);
        return value * unit + (near && Number.isFinite(near[i]) ? near[i] : 0);
      });
    }
    return { ...about, length, mask: about.mask || [], known, columns, text: (i) => texts[words[i]] ?? "", id: (i) => ids[words[i]] };
  };
  R.textOf = (sample) => {
    if (!sample.length) return `${sample.prompt || ""}${sample.response || ""}`;
    const parts = new Array(sample.length);
    for (let i = 0; i < sample.length; i++) parts[i] = sample.text(i);
    return parts.join("");
  };

  const column = (name) => (sample, i) => sample.columns[name]?.[i] ?? null;
  const minus = (a, b) => (sample, i) => {
    const x = column(a)(sample, i), y = column(b)(sample, i);
    return x === null || y === null ? null : x - y;
  };
  const exp = (value) => (value === null ? null : Math.exp(value));
  const has = (...names) => (sample) => names.every((name) => sample.columns[name]);
  const gap = minus("old_log_probs", "infer_log_probs");
  const toReference = minus("old_log_probs", "ref_log_probs");
  // The loss's own ratio if it was logged; otherwise that of the trainer to the sampler.
  const ratio = (sample, i) => column("ratio")(sample, i)
    ?? exp(has("log_probs", "old_log_probs")(sample) ? minus("log_probs", "old_log_probs")(sample, i) : gap(sample, i));
  const logProb = (sample, i) => column("old_log_probs")(sample, i) ?? column("log_probs")(sample, i) ?? column("infer_log_probs")(sample, i);
  const surprise = (sample, i) => { const value = logProb(sample, i); return value === null ? null : -value; };
  const hasRatio = (sample) => has("ratio")(sample) || has("log_probs", "old_log_probs")(sample) || has("old_log_probs", "infer_log_probs")(sample);
  const hasLogProb = (sample) => ["old_log_probs", "log_probs", "infer_log_probs"].some((name) => sample.columns[name]);

  // What tokens can be coloured by. `centre`: the value without colour; `floor`: full colour means at least this.
  const MODES = [
    { id: "advantage", label: "Advantage", when: has("advantages"), at: column("advantages"), floor: 0.5, digits: 2, low: "pushed down", high: "pushed up" },
    { id: "ratio", label: "Ratio", when: hasRatio, at: ratio, centre: 1, floor: 0.05, digits: 3, low: "less likely", high: "more likely" },
    { id: "gap", label: "Log-prob gap", when: has("old_log_probs", "infer_log_probs"), at: gap, floor: 0.05, digits: 3, low: "sampler gave it more", high: "trainer gives it more" },
    { id: "kl", label: "KL", when: has("old_log_probs", "ref_log_probs"), at: toReference, floor: 0.1, digits: 2, low: "reference gives it more", high: "policy gives it more" },
    { id: "entropy", label: "Entropy", when: has("entropy"), at: column("entropy"), oneSided: true, floor: 0.5, digits: 2, low: "sure", high: "undecided" },
    { id: "surprise", label: "Surprise", when: hasLogProb, at: surprise, oneSided: true, floor: 1, digits: 2, low: "expected", high: "unlikely" },
    { id: "reward", label: "Reward", when: (sample) => sample.columns.rewards?.some((value) => value), at: column("rewards"), floor: 0.1, digits: 2, low: "", high: "" },
    { id: "value", label: "Value", when: has("values"), at: column("values"), floor: 0.5, digits: 2, low: "", high: "" },
    { id: "return", label: "Return", when: has("returns", "values"), at: column("returns"), floor: 0.5, digits: 2, low: "", high: "" },
  ];
  R.colourModes = (sample) => MODES.filter((mode) => mode.when(sample));

  const NUMBERS = [
    ["Advantage", column("advantages"), 3], ["Ratio", (sample, i) => (hasRatio(sample) ? ratio(sample, i) : null), 4],
    ["Log-prob, trainer", column("old_log_probs"), 3], ["Log-prob, sampler", column("infer_log_probs"), 3], ["Log-prob gap", gap, 4],
    ["Log-prob, after update", column("log_probs"), 3], ["Log-prob, reference", column("ref_log_probs"), 3], ["KL to reference", toReference, 3],
    ["Probability", (sample, i) => exp(logProb(sample, i)), 3], ["Entropy", column("entropy"), 2],
    ["Return", column("returns"), 3], ["Value", column("values"), 3], ["Reward", column("rewards"), 3],
  ];

  const card = document.getElementById("token-card");
  R.hideCard = () => { card.hidden = true; };
  function showCard(sample, i, span) {
    const rows = NUMBERS.map(([label, at, digits]) => [label, at(sample, i), digits]).filter(([, value]) => value !== null);
    const note = `token ${R.count(i + 1)} of ${R.count(sample.length)} · id ${sample.id(i)} · ${sample.mask[i] ? "trained on" : "not trained on"}`;
    card.replaceChildren(
      R.h("div", { class: "card-token" }, R.plain(JSON.stringify(sample.text(i).slice(0, 80)))), R.h("div", { class: "card-note" }, note),
      rows.length ? R.h("dl", {}, rows.map(([label, value, digits]) => [R.h("dt", {}, label), R.h("dd", { class: Number.isFinite(value) ? "" : "odd" }, R.fixed(value, digits))])) : "");
    card.hidden = false;
    const box = span.getBoundingClientRect(), size = card.getBoundingClientRect();
    const below = box.bottom + 8 + size.height < innerHeight;
    card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
    card.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - size.height - 8)}px`;
  }

  // The size at which colour is full: nearly the largest of the sample, so that one outlier does not pale the rest;
  // `sample.scales` asks for more where samples should compare.
  function scaleOf(sample, mode) {
    const sizes = [];
    for (let i = 0; i < sample.length; i++) {
      const value = mode.at(sample, i);
      if (value !== null && Number.isFinite(value)) sizes.push(Math.abs(value - (mode.centre || 0)));
    }
    sizes.sort((a, b) => a - b);
    return Math.max(mode.floor, sizes[Math.floor(sizes.length * 0.98)] || 0, sample.scales?.[mode.id] || 0);
  }

  function paint(span, sample, i, mode, scale) {
    span.classList.remove("pos", "neg", "seq", "odd");
    const value = mode ? mode.at(sample, i) : null;
    if (value === null) return;
    if (!Number.isFinite(value)) { span.classList.add("odd"); return; }
    const amount = (value - (mode.centre || 0)) / scale;
    span.classList.add(mode.oneSided ? "seq" : amount < 0 ? "neg" : "pos");
    span.style.setProperty("--a", Math.min(1, Math.abs(amount)).toFixed(3));
  }

  const SPECIAL = /^<[^<>\s]{1,40}>$/;
  function tokenSpan(sample, i) {
    const text = sample.text(i);
    const span = R.h("span", { class: `tok${sample.mask[i] ? "" : " masked"}${SPECIAL.test(text) ? " special" : ""}`, tabindex: "-1", data: { i } });
    if (text === "") {
      span.append(R.h("span", { class: "newline" }, "·")); // the first bytes of a character that a later token ends
    } else if (text.length < 400 && text.includes("\n") && text.split("\n").length < 20) {
      text.split("\n").forEach((line, k) => {
        if (k) span.append(R.h("span", { class: "newline", "aria-hidden": "true" }, "↵"), "\n");
        R.appendText(span, line);
      });
    } else {
      R.longText(span, text);
    }
    return span;
  }

  const FIRST = 1500, NEXT = 1000; // tokens drawn at once; the rest when they come near the screen

  // Bubbles of one sample: {element, legend, recolour(id of a mode)}.
  R.tokenView = (sample, modeId) => {
    const spans = new Array(sample.length);
    const isTrajectory = Boolean(sample.turns?.length);
    const turns = isTrajectory ? sample.turns : plainTurns(sample);
    const legend = R.h("div", { class: "colour-legend" });
    let mode = null, scale = 1, budget = FIRST;

    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); entry.target.fill(); }
    }, { rootMargin: "600px" });

    function bubble([isResponse, start, end, reward], number) {
      const body = R.h("div", { class: "bubble-text" });
      const rest = R.h("button", { type: "button", class: "more" });
      let at = start;
      const fill = (count) => {
        const part = document.createDocumentFragment();
        for (const stop = Math.min(end, at + count); at < stop; at++) {
          const span = (spans[at] = tokenSpan(sample, at));
          paint(span, sample, at, mode, scale);
          part.append(span);
        }
        rest.remove();
        body.append(part);
        if (at < end) { rest.textContent = `… ${R.count(end - at)} more tokens`; body.append(rest); near.observe(rest); }
      };
      rest.fill = () => fill(NEXT);
      rest.addEventListener("click", rest.fill);
      body.range = [start, end];
      body.fillTo = (i) => { while (at <= i && at < end) fill(NEXT); };
      const count = Math.max(0, Math.min(budget, end - start));
      budget -= count;
      fill(count);
      const label = isTrajectory ? `${isResponse ? "Response" : "Observation"} ${number}` : isResponse ? "Response" : "Prompt";
      const earned = R.number(reward ?? null);
      return R.h("section", { class: `bubble ${isResponse ? "response" : "observation"}` },
        R.h("header", {}, R.h("span", {}, label), R.h("span", { class: "muted" }, R.plural(end - start, "token")),
          earned !== null && R.h("span", { class: `reward-badge ${earned > 0 ? "up" : earned < 0 ? "down" : ""}` }, `reward ${R.format(earned)}`)), body);
    }

    function recolour(id) {
      mode = MODES.find((item) => item.id === id && item.when(sample)) || null;
      scale = mode ? scaleOf(sample, mode) : 1;
      spans.forEach((span, i) => paint(span, sample, i, mode, scale));
      const end = (value, word) => R.h("span", {}, `${R.fixed(value, mode.digits)}${word ? ` ${word}` : ""}`);
      const centre = mode?.centre || 0;
      legend.replaceChildren(
        ...(mode ? [end(mode.oneSided ? 0 : centre - scale, mode.low), R.h("span", { class: `ramp ${mode.oneSided ? "one" : "two"}`, "aria-hidden": "true" }), end(centre + scale, mode.high)] : []),
        R.h("span", { class: "mask-key" }, R.h("span", { class: "tok masked" }, "dimmed"), " not trained on"));
    }

    recolour(modeId);
    const numbers = [0, 0];
    const bubbles = turns.map((turn) => bubble(turn, ++numbers[turn[0] ? 1 : 0]));
    const element = R.h("div", { class: `conversation${isTrajectory ? " trajectory" : ""}`, role: "group", "aria-label": "Tokens" }, bubbles);
    spans[turns.find((turn) => turn[0])?.[1] ?? 0]?.setAttribute("tabindex", "0");
    listen(element, sample, (i) => {
      for (const body of element.querySelectorAll(".bubble-text")) if (i >= body.range[0]) body.fillTo(i);
      element.querySelector(".tok[tabindex='0']")?.setAttribute("tabindex", "-1");
      spans[i].setAttribute("tabindex", "0");
      spans[i].focus();
      if (matchMedia("(max-width: 860px)").matches) spans[i].scrollIntoView({ block: "center" }); // the card covers the end of the screen
    });
    return { element, legend, recolour };
  };

  // Pointer, keyboard and touch all show the same card.
  function listen(element, sample, focus) {
    const tokenAt = (event) => event.target.closest?.(".tok");
    const index = (span) => Number(span.dataset.i);
    const show = (event) => { const span = tokenAt(event); if (span) showCard(sample, index(span), span); else R.hideCard(); };
    element.addEventListener("pointerover", show);
    element.addEventListener("focusin", show);
    element.addEventListener("pointerleave", R.hideCard);
    element.addEventListener("focusout", R.hideCard);
    element.addEventListener("click", (event) => { const span = tokenAt(event); if (span && !event.target.closest("button")) focus(index(span)); });
    element.addEventListener("keydown", (event) => {
      const span = tokenAt(event);
      if (!span || event.ctrlKey || event.metaKey || event.altKey) return;
      const last = sample.length - 1;
      const i = index(span);
      const target = { ArrowLeft: i - 1, ArrowRight: i + 1, ArrowUp: i - 10, ArrowDown: i + 10, Home: 0, End: last }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      focus(Math.max(0, Math.min(last, target)));
    });
  }

  // Without turns: everything before the first token that the model wrote is the prompt.
  function plainTurns(sample) {
    const start = Math.max(0, sample.known.includes(1) ? sample.known.indexOf(1) : sample.mask.indexOf(1));
    return [[0, 0, start, null], [1, start, sample.length, null]].filter(([, from, to]) => to > from);
  }
})();
