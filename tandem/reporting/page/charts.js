"use strict";
// The curve of one metric, of all runs, drawn by uPlot.

const SMALLEST_SHIFT = 12; // pixels between a mark and the pointer at which the mark is described

class Chart {
  constructor(metric) {
    this.metric = metric;
    this.plot = null;
    this.zoom = null;
    this.shown = [];
    this.hint = element("span", { class: "quiet" });
    this.area = element("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart" });
    this.readout = element("div", { class: "readout" });
    this.absent = element("div", { class: "quiet" });
    this.x = null; // the place that the reader points at, and the axis that it is on
    this.axis = "";
    this.figure = element("figure", { class: "chart card" },
      element("figcaption", {}, ...breakable(metric), this.hint), this.area, this.readout, this.absent);
    this.figure.dataset.metric = metric;
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    // Screen readers speak the values of the curve that is moved through, not of all whenever newer ones come.
    this.area.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.area.addEventListener("blur", () => { this.readout.removeAttribute("aria-live"); this.leave(); });
    this.area.addEventListener("dblclick", () => { this.zoom = null; }); // uPlot shows the whole curve then
  }

  // Every run that is shown and has the metric, with its points along the chosen axis.
  collect(runs, state) {
    const curves = [];
    const lacking = [];
    let longest = 0;
    runs.forEach((run, index) => {
      const curve = run.curves[this.metric];
      if (!curve) return;
      const place = (step) => (state.axis === "step" ? step : clockAt(run.clocks[state.axis], step));
      const xs = curve.x.map(place);
      if (!xs.length || xs.some((x) => x === null)) {
        if (xs.length && !state.hidden.has(index)) lacking.push(run.name);
        return;
      }
      longest = Math.max(longest, xs[xs.length - 1] - xs[0]);
      if (state.hidden.has(index)) return;
      curves.push({
        index, run, xs, steps: curve.x, raw: curve.y, low: curve.lo, high: curve.hi, curve, nan: curve.nan.map(place),
        marks: run.marks.map((mark) => [place(mark.step), mark]),
      });
    });
    for (const each of curves) each.soft = smoothed(each.xs, each.raw, (state.smooth / 100) * longest);
    this.lacking = lacking;
    return curves;
  }

  draw(runs, state) {
    const pointedX = this.axis === state.axis ? this.x : null;
    this.state = state;
    this.shown = this.collect(runs, state);
    const what = { step: "updates", samples: "samples", seconds: "seconds" }[state.axis];
    const lacking = this.lacking.join(", ");
    this.absent.textContent = lacking && `Not drawn, because no line tells ${what}: ${lacking}`;
    this.readout.style.minHeight = `${1.45 * this.shown.length}em`; // so that pointing at another curve moves nothing
    const better = { low: "lower is better", high: "higher is better" }[state.directions[this.metric]];
    this.hint.textContent = better || "";
    const names = this.shown.map((each) => each.run.name).join(", ");
    this.area.setAttribute("aria-label",
      `${this.metric}: curves of ${names || "no run"}. Left and right arrow keys move through the points.`);
    if (this.plot) this.plot.destroy();
    this.area.hidden = false;
    this.plot = null;
    const sizes = this.shown.flatMap((each) => [each.curve.low, each.curve.high])
      .filter(Boolean).map((pair) => Math.abs(pair[0])).filter(Boolean);
    const most = sizes.length ? Math.max(...sizes) : 1;
    // uPlot cannot label numbers that are very large or very small: those are drawn as multiples of a power of ten.
    const power = Math.floor(Math.log10(most));
    this.unit = power > 9 || power < -6 ? 10 ** Math.max(-300, power) : 1;
    const toPlot = (value) => {
      if (value === null || (state.log && value <= 0)) return null;
      return state.log ? Math.log10(value) : value / this.unit;
    };
    const tables = [];
    const series = [{}];
    const bands = [];
    for (const each of this.shown) {
      const colour = colourOf(each.index);
      const dash = dashOf(each.index);
      const table = [each.xs, each.soft.map(toPlot)];
      const few = each.xs.length < 60;
      series.push({ stroke: colour, width: 1.8, dash, points: { show: few, size: 4, fill: colour } });
      if (state.smooth) {
        table.push(each.raw.map(toPlot));
        series.push({ stroke: `${colour}66`, width: 1, points: { show: false } });
      }
      if (each.low) {
        table.push(each.high.map(toPlot), each.low.map(toPlot));
        bands.push({ series: [series.length, series.length + 1], fill: `${colour}33` });
        const edge = { stroke: `${colour}55`, width: 1, points: { show: false } };
        series.push({ ...edge }, { ...edge });
      }
      tables.push(table);
    }
    const drawable = tables.some((table) => table.slice(1).some((row) => row.some((value) => value !== null)));
    if (!drawable) {
      const why = this.shown.length ? (state.log ? "no value above 0" : "no finite value")
        : this.lacking.length ? "no run to draw" : "no run is chosen";
      this.area.replaceChildren(element("p", { class: "quiet empty" }, why));
      this.readout.replaceChildren();
      return;
    }
    this.area.replaceChildren();
    // One value is no curve: the words below are enough.
    const isCurve = tables.some((table) => table[1].filter((value) => value !== null).length > 1);
    this.area.hidden = !isCurve;
    if (!isCurve) {
      this.tell(null);
      return;
    }
    this.main = series.map((each, index) => index > 0 && each.width === 1.8);
    this.plot = new uPlot(this.options(series, bands), uPlot.join(tables), this.area);
    if (this.zoom && this.zoom.axis === state.axis) this.plot.setScale("x", this.zoom);
    else this.zoom = null;
    this.tell(null);
    if (pointedX !== null) queueMicrotask(() => this.goTo(pointedX)); // after uPlot's own, which sets the scales
  }

  options(series, bands) {
    const { state } = this;
    const colours = series.map((each) => each.stroke);
    const axis = { stroke: styleOf("--quiet"), font: "12px system-ui, sans-serif",
      grid: { stroke: styleOf("--grid"), width: 1 }, ticks: { stroke: styleOf("--grid"), width: 1, size: 4 } };
    const along = state.axis === "seconds" ? secondsText : countText;
    const values = (value) => numberText(state.log ? 10 ** value : value * this.unit, 4);
    return {
      width: this.area.clientWidth, height: 190, legend: { show: false }, padding: [8, 12, 0, 0], series, bands,
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: (u, low, high) => padded(low, high) },
      },
      axes: [
        { ...axis, space: state.axis === "seconds" ? 90 : 60, size: 28, values: (u, ticks) => ticks.map(along) },
        { ...axis, space: 28, values: (u, ticks) => ticks.map(values),
          size: (u, texts) => 14 + 7 * Math.max(3, ...(texts || []).map((text) => String(text).length)) },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: true },
        points: { show: (u, index) => this.point(colours[index], !this.main[index]) },
        dataIdx: (u, index, hovered, x) => nearestInRow(u.data[0], u.data[index], hovered, x),
      },
      hooks: {
        draw: [() => this.drawMarks()],
        setCursor: [(u) => this.tell(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)],
        setSelect: [(u) => {
          if (u.select.width > 0) {
            const [min, max] = [0, u.select.width].map((shift) => u.posToVal(u.select.left + shift, "x"));
            this.zoom = { min, max, axis: this.state.axis };
          }
        }],
      },
    };
  }

  // uPlot wants a point of every series; those of edges and of what is smoothed are hidden.
  point(colour, hidden) {
    const node = element("div", { class: "u-cursor-pt", hidden });
    node.style.width = node.style.height = "9px";
    node.style.marginLeft = node.style.marginTop = "-4.5px";
    node.style.background = colour;
    return node;
  }

  drawMarks() {
    const u = this.plot;
    if (!u) return;
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.textAlign = "center";
    ctx.lineWidth = ratio;
    for (const each of this.shown) {
      ctx.strokeStyle = ctx.fillStyle = colourOf(each.index);
      ctx.font = `bold ${11 * ratio}px system-ui, sans-serif`;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      for (const [x, mark] of this.state.marks ? each.marks : []) {
        if (x < u.scales.x.min || x > u.scales.x.max) continue; // of a part of the run that is not drawn here
        const left = Math.round(u.valToPos(x, "x", true));
        ctx.globalAlpha = 0.75;
        ctx.beginPath();
        ctx.moveTo(left, bbox.top + 14 * ratio);
        ctx.lineTo(left, bbox.top + bbox.height);
        ctx.stroke();
        ctx.globalAlpha = 1;
        const inside = Math.min(Math.max(left, bbox.left + 6 * ratio), bbox.left + bbox.width - 6 * ratio);
        ctx.fillText(KINDS[mark.kind][0], inside, bbox.top + 11 * ratio);
      }
      ctx.setLineDash([]);
      ctx.font = `bold ${13 * ratio}px system-ui, sans-serif`;
      for (const x of each.nan) ctx.fillText("\u00D7", u.valToPos(x, "x", true), bbox.top + bbox.height - 3 * ratio);
    }
    ctx.restore();
  }

  // Say what the curves are at x, or at their ends if x is null.
  tell(x) {
    this.x = x;
    this.axis = this.state.axis;
    const lines = [];
    for (const each of this.shown) {
      const at = x === null ? each.raw.length - 1 : nearest(each.xs, each.xs, x);
      if (at < 0) continue;
      let text = numberText(each.raw[at]);
      const [low, high] = each.low ? [each.low[at], each.high[at]] : [];
      if (low !== high) text += ` (${numberText(low)} to ${numberText(high)})`;
      if (this.state.smooth && each.soft[at] !== null) text += `, smoothed ${numberText(each.soft[at])}`;
      const where = { step: "update ", samples: "sample ", seconds: "" }[this.state.axis];
      const place = this.state.axis === "seconds" ? secondsText(each.xs[at]) : numberText(each.xs[at], 7);
      lines.push(element("div", {}, swatch(each.index), element("span", { class: "name" }, each.run.short),
        element("span", {}, `${text} at ${where}${place}`)));
      if (x === null || !this.plot || !this.state.marks) continue;
      for (const [markX, mark] of each.marks) {
        if (Math.abs(this.plot.valToPos(markX, "x") - this.plot.valToPos(x, "x")) < SMALLEST_SHIFT) {
          lines.push(element("div", {}, swatch(each.index), `${KINDS[mark.kind][0]} ${mark.text}`));
        }
      }
    }
    this.readout.replaceChildren(...lines);
  }

  onKey(event) {
    if (!this.plot) return;
    const xs = this.plot.data[0];
    const { min, max } = this.plot.scales.x;
    const first = lowerBound(xs, min);
    let end = lowerBound(xs, max);
    if (end === xs.length || xs[end] > max) end -= 1;
    const now = this.x === null ? end : nearest(xs, xs, this.x);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - 20, PageDown: now + 20,
      Home: first, End: end };
    if (event.key === "Escape") this.leave();
    if (!(event.key in next)) return;
    event.preventDefault();
    this.goTo(xs[Math.min(Math.max(next[event.key], first), end)]);
  }

  // Point at x, if that is in the part that is shown.
  goTo(x) {
    if (!this.plot) return;
    const { min, max } = this.plot.scales.x;
    if (x < min || x > max) return;
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: 20 });
    this.tell(x);
  }

  leave() {
    if (this.plot) this.plot.setCursor({ left: -10, top: -10 });
    this.tell(null);
  }

  resize() {
    if (this.plot && this.area.clientWidth) this.plot.setSize({ width: this.area.clientWidth, height: 190 });
  }
}

// A range with some room around the values.
function padded(low, high) {
  if (low === null || high === null || !Number.isFinite(high - low)) return [0, 1];
  // Six digits are known of each value, so what differs less is the same, and would be drawn as noise.
  const differ = high - low > 1e-6 * Math.max(Math.abs(low), Math.abs(high));
  const room = differ ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 1;
  return [low - room, high + room];
}

// The index nearest to x at which a row of uPlot's common table has a value; `hovered` is the nearest of the table.
function nearestInRow(xs, row, hovered, x) {
  let [left, right] = [hovered, hovered];
  while (left >= 0 && (row[left] === null || row[left] === undefined)) left -= 1;
  while (right < row.length && (row[right] === null || row[right] === undefined)) right += 1;
  if (left < 0) return right < row.length ? right : hovered;
  return right < row.length && xs[right] - x < x - xs[left] ? right : left;
}
