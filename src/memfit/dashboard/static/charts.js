// Three kinds of charts over uPlot: stacked memory, steps, a share. Colours come from the page's scheme.
import { axisBytes, bytes, clock, make, moment, percent, whole } from "./format.js";

/* global uPlot */
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const STEPPED = uPlot.paths.stepped({ align: 1 });
const BYTES = []; // axis ticks at powers of two, and halves and quarters of them
for (let power = 0; power < 50; power++) BYTES.push(2 ** power);

export const isDark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function xAxis(axis, more = {}) {
  const values = axis === "event"
    ? (chart, splits) => splits.map((value) => whole(value))
    : (chart, splits) => splits.map((value) => clock(value).slice(0, splits[splits.length - 1] - splits[0] > 600 ? 5 : 8));
  return { stroke: css("--muted"), font: "12px system-ui, sans-serif", grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, values, space: 80, size: 28, gap: 4, ...more };
}
function yAxis(values, more = {}) {
  return { stroke: css("--muted"), font: "12px system-ui, sans-serif", grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, values, size: 74, gap: 6, ...more };
}

export class MemoryChart {
  // handlers: select(begin, end), wheel(factor, at), pick(at), hovered(point or null)
  constructor(host, handlers) { this.host = host; this.handlers = handlers; this.tip = make("div", { class: "tip", hidden: true }); this.chart = null; this.hidden = new Set(); this.toTotal = false; }

  show(data, paints) {
    this.data = data; this.paints = paints;
    const bands = data.bands.filter((band) => !this.hidden.has(band.key)), lines = data.lines.filter((line) => !this.hidden.has(line.key));
    const signature = JSON.stringify([data.axis, bands.map((b) => b.key), lines.map((l) => l.key), isDark(), this.host.clientWidth, this.host.clientHeight]);
    this.bands = bands; this.lines = lines;
    const columns = this.columns();
    if (signature === this.signature && this.chart) { this.chart.setData(columns, false); this.rescale(); return; }
    this.signature = signature;
    this.build(columns);
    this.rescale();
  }

  columns() {
    let below = new Array(this.data.x.length).fill(0);
    const stacked = this.bands.map((band) => (below = below.map((bytes, i) => bytes + (band.values[i] ?? 0))));
    return [this.data.x, ...stacked, below, ...this.lines.map((line) => line.values)];
  }

  colour(key) { const paint = this.paints[key]; return paint ? (isDark() ? paint.dark : paint.light) : css("--muted"); }
  lineColour(key) { return key === "peak" ? css("--bad") : css("--muted"); }

  build(columns) {
    this.chart?.destroy();
    const stacked = this.bands.map((band) => ({ label: band.label, stroke: this.colour(band.key), fill: this.colour(band.key) + (isDark() ? "d0" : "dd"), width: 0, paths: STEPPED, points: { show: false } }));
    // A peak may be narrower than a pixel: the outline is drawn as a line, which never is.
    const outline = { label: "Together", stroke: css("--ink") + "b0", width: 1, paths: STEPPED, points: { show: false } };
    const drawn = this.lines.map((line) => ({ label: line.label, stroke: this.lineColour(line.key), width: 1.4, paths: STEPPED, points: { show: false } }));
    const fills = this.bands.slice(1).map((band, place) => ({ series: [place + 2, place + 1] }));
    this.chart = new uPlot({
      width: this.host.clientWidth, height: this.host.clientHeight,
      padding: [10, 12, 0, 0], legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false }, y: {} },
      axes: [xAxis(this.data.axis), yAxis((chart, splits) => splits.map(axisBytes), { incrs: BYTES, space: 36 })],
      series: [{}, ...stacked, outline, ...drawn], bands: fills,
      hooks: {
        setSelect: [(chart) => this.selected(chart)], setCursor: [(chart) => this.hover(chart)], draw: [(chart) => this.drawMarks(chart)],
      },
    }, columns, this.host);
    this.host.append(this.tip);
    this.chart.over.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.handlers.wheel(event.deltaY > 0 ? 1.25 : 0.8, this.chart.posToVal(event.offsetX, "x"));
    }, { passive: false });
    this.chart.over.addEventListener("click", (event) => { if (!this.dragged) this.handlers.pick(this.chart.posToVal(event.offsetX, "x")); this.dragged = false; });
    this.chart.over.addEventListener("dblclick", () => this.handlers.select(null, null));
    this.chart.over.addEventListener("mouseleave", () => { this.tip.hidden = true; });
  }

  rescale() {
    const { begin, end } = this.range, tops = this.chart.data.slice(1).flatMap((values) => values.filter((value) => value !== null));
    const most = tops.reduce((a, b) => Math.max(a, b), 0), limit = this.data.limit_bytes;
    const high = this.toTotal && limit ? Math.max(limit, most) * 1.03 : most * 1.08 || 1;
    this.chart.batch(() => { this.chart.setScale("x", { min: begin, max: end > begin ? end : begin + 1 }); this.chart.setScale("y", { min: 0, max: high }); });
  }

  selected(chart) {
    if (chart.select.width < 3) return;
    this.dragged = true;
    const begin = chart.posToVal(chart.select.left, "x"), end = chart.posToVal(chart.select.left + chart.select.width, "x");
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.handlers.select(begin, end);
  }

  hover(chart) {
    const place = chart.cursor.idx;
    if (place === null || place === undefined || chart.cursor.left < 0) { this.tip.hidden = true; return; }
    const rows = [...this.lines].map((line) => [line.label, line.values[place], this.lineColour(line.key)]).concat(
      [...this.bands].reverse().map((band) => [band.label, band.values[place], this.colour(band.key)]));
    const total = this.bands.reduce((sum, band) => sum + (band.values[place] ?? 0), 0);
    this.tip.replaceChildren(make("b", {}, moment(this.data.x[place], this.data.axis)), ...rows.filter(([, value]) => value).map(([label, value, colour]) => {
      const swatch = make("span", { class: "swatch" }); swatch.style.background = colour;
      return make("div", {}, swatch, make("span", {}, label), make("span", {}, bytes(value)));
    }));
    if (this.bands.length > 1) this.tip.append(make("div", { class: "sum" }, make("span", {}, "Together"), make("span", {}, bytes(total))));
    const left = chart.over.offsetLeft + chart.cursor.left, width = this.host.clientWidth;
    this.tip.hidden = false;
    this.tip.style.left = left > width / 2 ? "auto" : `${left + 14}px`;
    this.tip.style.right = left > width / 2 ? `${width - left + 14}px` : "auto";
  }

  drawMarks(chart) {
    const { ctx } = chart, { left, top, width, height } = chart.bbox, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    const steps = this.data.marks.filter((mark) => mark.kind === "step");
    for (const mark of this.data.marks) {
      if (mark.kind === "step" && steps.length > 60) continue;
      const x = Math.round(chart.valToPos(mark.x, "x", true)) + 0.5;
      if (x < left || x > left + width) continue;
      ctx.strokeStyle = { oom: css("--bad"), retry: css("--warn"), peak: css("--ink") }[mark.kind] || css("--muted");
      ctx.lineWidth = mark.kind === "oom" ? 2 * ratio : ratio;
      ctx.globalAlpha = mark.kind === "step" ? 0.4 : 0.9;
      ctx.setLineDash(mark.kind === "oom" ? [] : [3 * ratio, 4 * ratio]);
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
      if (mark.kind !== "step" || steps.length <= 24) this.label(ctx, mark.text, x, top + (mark.kind === "step" ? 13 : 29) * ratio, left + width, ctx.strokeStyle);
    }
    const limit = this.data.limit_bytes, y = limit ? chart.valToPos(limit, "y", true) : -1;
    if (limit && y >= top) {
      ctx.globalAlpha = 1; ctx.strokeStyle = css("--ink"); ctx.lineWidth = 1.4 * ratio; ctx.setLineDash([7 * ratio, 4 * ratio]);
      ctx.beginPath(); ctx.moveTo(left, y); ctx.lineTo(left + width, y); ctx.stroke();
      this.label(ctx, `all of the device: ${bytes(limit)}`, left + 6 * ratio, y + 15 * ratio, left + width, css("--ink"));
    }
    ctx.restore();
  }

  label(ctx, text, x, y, right, colour) {
    const wide = ctx.measureText(text).width, at = x + 5 + wide > right ? x - wide - 5 : x + 5;
    ctx.globalAlpha = 1; ctx.setLineDash([]); ctx.lineWidth = 3 * devicePixelRatio; ctx.lineJoin = "round";
    ctx.strokeStyle = css("--card"); ctx.strokeText(text, at, y); ctx.fillStyle = colour; ctx.fillText(text, at, y);
  }
}

export class Overview {
  // A small picture of everything, with the stretch that is shown above it; drag to choose another.
  constructor(host, chosen) { this.host = host; this.chosen = chosen; this.chart = null; }
  show(data, range) {
    const total = data.x.map((_, i) => data.bands.reduce((sum, band) => sum + (band.values[i] ?? 0), 0));
    const signature = JSON.stringify([isDark(), this.host.clientWidth]);
    if (signature !== this.signature || !this.chart) {
      this.signature = signature;
      this.chart?.destroy();
      this.chart = new uPlot({
        width: this.host.clientWidth, height: this.host.clientHeight, padding: [2, 12, 2, 74], legend: { show: false },
        cursor: { show: true, x: false, y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
        scales: { x: { time: false }, y: { range: (chart, low, high) => [0, (high || 1) * 1.05] } }, axes: [{ show: false }, { show: false }],
        series: [{}, { stroke: css("--muted"), fill: css("--soft"), width: 1, paths: STEPPED, points: { show: false } }],
        hooks: { setSelect: [(chart) => { if (!this.ours && chart.select.width > 3) this.chosen(chart.posToVal(chart.select.left, "x"), chart.posToVal(chart.select.left + chart.select.width, "x")); }] },
      }, [data.x, total], this.host);
    } else this.chart.setData([data.x, total]);
    this.chart.setScale("x", { min: data.first, max: data.last > data.first ? data.last : data.first + 1 });
    this.mark(range);
  }
  mark({ begin, end }) {
    if (!this.chart) return;
    const left = this.chart.valToPos(begin, "x"), right = this.chart.valToPos(end, "x");
    this.ours = true;
    this.chart.setSelect({ left, top: 0, width: Math.max(2, right - left), height: this.chart.over.clientHeight }, false);
    this.ours = false;
  }
}

function small(host, old, build, data, signature) {
  const now = JSON.stringify([signature, isDark(), host.clientWidth, host.clientHeight]);
  if (old && old.signature === now) { old.chart.setData(data); return old; }
  old?.chart.destroy();
  return { signature: now, chart: new uPlot({ width: host.clientWidth, height: host.clientHeight, padding: [8, 6, 0, 0], legend: { show: false }, ...build() }, data, host) };
}

export function stepsChart(host, old, data) {
  const few = data.x.length <= 80;
  return small(host, old, () => ({
    cursor: { y: false, drag: { x: false, y: false } }, scales: { x: { time: false, range: (chart, low, high) => [low - 0.6, high + 0.6] }, y: { range: (chart, low, high) => [0, (high || 1) * 1.08] } },
    axes: [{ ...xAxis("event", { space: 44 }), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] }, yAxis((chart, splits) => splits.map(axisBytes), { incrs: BYTES, space: 32 })],
    series: [{}, few
      ? { stroke: css("--accent"), fill: css("--accent") + "66", width: 1, paths: uPlot.paths.bars({ size: [0.72, 26] }), points: { show: false } }
      : { stroke: css("--accent"), fill: css("--accent") + "33", width: 1, paths: STEPPED, points: { show: false } },
    { stroke: css("--bad"), width: 1.6, points: { show: false } }],
  }), [data.x, data.peak, data.end], few);
}

export function shareChart(host, old, axis, x, values) {
  return small(host, old, () => ({
    cursor: { y: false, drag: { x: false, y: false } }, scales: { x: { time: false }, y: { range: [0, 1] } },
    axes: [xAxis(axis), yAxis((chart, splits) => splits.map((value) => percent(value)), { size: 52 })],
    series: [{}, { stroke: css("--warn"), fill: css("--warn") + "33", width: 1.4, paths: STEPPED, points: { show: false } }],
  }), [x, values], axis);
}
