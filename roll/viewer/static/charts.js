// Curves through plotly, drawn when they come into sight. Without plotly: simple lines, and a word about it.
"use strict";

(() => {
  let library = null;
  R.plotly = () => {
    if (!R.index.plotly) return Promise.resolve(null);
    library ||= R.loadScript(`${R.assets}/plotly.min.js`).then(() => window.Plotly, () => null);
    return library;
  };

  // Exponential smoothing that starts without a bias towards zero; gaps stay gaps.
  R.smooth = (values, weight) => {
    if (!weight) return values;
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null || !Number.isFinite(value)) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };

  // At most about `limit` points, keeping the smallest and the largest of every stretch.
  R.thin = (xs, ys, limit = 1500) => {
    if (xs.length <= limit) return [xs, ys];
    const size = Math.ceil(xs.length / (limit / 2));
    const x = [], y = [];
    for (let start = 0; start < xs.length; start += size) {
      let low = start, high = start;
      for (let i = start; i < Math.min(start + size, xs.length); i++) {
        if (ys[i] < ys[low]) low = i;
        if (ys[i] > ys[high]) high = i;
      }
      for (const i of low === high ? [low] : [Math.min(low, high), Math.max(low, high)]) { x.push(xs[i]); y.push(ys[i]); }
    }
    return [x, y];
  };

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function layout(options) {
    const ink = css("--muted"), line = css("--line");
    const axis = { gridcolor: line, zeroline: false, linecolor: line, tickfont: { size: 11, color: ink }, fixedrange: false, automargin: true };
    return {
      margin: { l: 44, r: 8, t: 4, b: 20 }, height: options.height || 170, showlegend: false, hovermode: "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--font"), size: 12, color: css("--ink") },
      hoverlabel: { bgcolor: css("--raised"), bordercolor: line, font: { color: css("--ink"), size: 12 } },
      xaxis: { ...axis, showgrid: false, title: { text: options.xTitle || "", font: { size: 11 } }, hoverformat: options.xTitle ? ".1f" : "d" },
      yaxis: { ...axis, type: options.log ? "log" : "linear", nticks: 5 }, dragmode: "zoom",
      shapes: (options.marks || []).map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: css("--bad"), width: 1, dash: "dot" } })),
    };
  }

  function traces(lines, options) {
    const result = [];
    for (const line of lines) {
      const few = line.x.length < 40;
      const name = R.plain(line.name).replaceAll("<", "‹").replaceAll(">", "›"); // plotly reads tags in labels
      const [x, y] = R.thin(line.x, line.y);
      if (options.smooth) {
        result.push({ x, y, type: "scatter", mode: "lines", line: { color: line.colour, width: 1 }, opacity: 0.25, hoverinfo: "skip" });
        const [sx, sy] = R.thin(line.x, R.smooth(line.y, options.smooth));
        result.push({ x: sx, y: sy, name, type: "scatter", mode: "lines", line: { color: line.colour, width: 2 }, hovertemplate: "%{y:.4g}", connectgaps: true });
      } else {
        result.push({ x, y, name, type: "scatter", mode: few ? "lines+markers" : "lines", line: { color: line.colour, width: 2 }, marker: { size: 4 }, hovertemplate: "%{y:.4g}", connectgaps: true });
      }
    }
    return result;
  }

  function sketch(box, lines, options) {
    const points = lines.flatMap((line) => line.x.map((x, i) => [x, line.y[i]])).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
    if (!points.length) { box.replaceChildren(R.h("p", { class: "muted" }, "No finite value.")); return; }
    const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
    const range = (values) => { const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b)); return [low, high > low ? high - low : 1]; };
    const [x0, dx] = range(xs), [y0, dy] = range(ys);
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 300 120");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    for (const line of lines) {
      const [lx, ly] = R.thin(line.x, R.smooth(line.y, options.smooth));
      const path = document.createElementNS(space, "polyline");
      path.setAttribute("points", lx.map((x, i) => [x, ly[i]]).filter(([, y]) => Number.isFinite(y)).map(([x, y]) => `${(((x - x0) / dx) * 300).toFixed(1)},${(116 - ((y - y0) / dy) * 112).toFixed(1)}`).join(" "));
      path.setAttribute("fill", "none");
      path.setAttribute("stroke", line.colour);
      path.setAttribute("stroke-width", "1.5");
      path.setAttribute("vector-effect", "non-scaling-stroke");
      svg.append(path);
    }
    box.replaceChildren(svg, R.h("div", { class: "sketch-range" }, R.h("span", {}, `${R.format(y0)} to ${R.format(y0 + dy)}`), R.h("span", {}, `${R.format(x0)} – ${R.format(x0 + dx)}`)));
  }

  const boxes = new Set(), drawn = new Set();
  const sight = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { sight.unobserve(entry.target); entry.target.drawChart?.(); }
  }, { rootMargin: "200px" });

  // A box that draws `lines` ([{name, x, y, colour}]) once it comes near the screen. `options.pick(x)` answers a click.
  R.chart = (lines, options = {}) => {
    const box = R.h("div", { class: "chart", style: { "min-height": `${options.height || 170}px` } });
    box.update = (newLines, changed = {}) => { lines = newLines; Object.assign(options, changed); if (drawn.has(box)) box.drawChart(); };
    box.drawChart = async () => {
      const plotly = await R.plotly();
      if (!box.isConnected) return;
      drawn.add(box);
      if (!plotly) { sketch(box, lines, options); return; }
      await plotly.react(box, traces(lines, options), layout(options), { displayModeBar: false, responsive: true, doubleClick: "reset", scrollZoom: false });
      if (options.pick && !box.hasPick) { box.hasPick = true; box.on("plotly_click", (event) => options.pick(event.points[0].x)); }
    };
    boxes.add(box);
    sight.observe(box);
    return box;
  };
  // Forget the charts that are no longer on the page.
  R.dropCharts = () => {
    for (const box of boxes) {
      if (box.isConnected) continue;
      if (window.Plotly && box.data) window.Plotly.purge(box);
      sight.unobserve(box);
      boxes.delete(box);
      drawn.delete(box);
    }
  };
})();
