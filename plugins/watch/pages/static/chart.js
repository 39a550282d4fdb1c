// Charts with uPlot, in the colours of the page, with their numbers as a table for those who do not
// see them.

import { h, number, table } from "/static/page.js";

const HEIGHT = 220;
const TABLE_ROWS = 12;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/**
 * A chart in a figure. `series`: [{label, colour, dash, width, points, fill, scale}], `bands`:
 * [[upper, lower] series]. `update(columns)` takes [steps, ...values of each series]. A series
 * without a value is not named below the chart.
 */
export class Chart {
  constructor(title, note, series, { bands = [], format = (v) => number(v), range = null } = {}) {
    Object.assign(this, { title, series, bands, format, range });
    this.place = h("div.plot");
    this.numbers = h("div");
    this.note = h("p.soft", {}, note);
    this.element = h("figure.card", { role: "group", "aria-label": title },
      h("figcaption", {}, h("h2", {}, title)), this.place, this.note,
      h("details", {}, h("summary", {}, "Numbers"), this.numbers));
    this.columns = null;
    new ResizeObserver(() => this._resize()).observe(this.place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._redraw());
  }

  update(columns) {
    this.columns = columns;
    this.element.hidden = !columns[0].length;
    const named = this.series.map((one, s) => !one.hidden && columns[s + 1].some((value) => value !== null));
    const same = this.named && named.every((one, s) => one === this.named[s]);
    this.named = named;
    if (this.plot && same && this.place.clientWidth) this.plot.setData(columns);
    else this._redraw();
    const last = columns[0].map((_, i) => i).slice(-TABLE_ROWS);
    const shown = this.series.map((one, s) => [one, s + 1]).filter(([, s]) => named[s - 1]);
    this.numbers.replaceChildren(table(
      `${this.title}: the last ${last.length} of ${columns[0].length} points`,
      ["step", ...shown.map(([one]) => one.label)],
      last.map((i) => [String(columns[0][i]), ...shown.map(([, s]) => this.format(columns[s][i]))]),
    ));
  }

  _resize() {
    const width = this.place.clientWidth;
    if (!width || !this.columns) return;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else this._redraw();
  }

  _redraw() {
    const width = this.place.clientWidth;
    if (!width || !this.columns) return;
    this.plot?.destroy();
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
    this.plot = new uPlot({
      width, height: HEIGHT,
      scales: { x: { time: false }, y: this.range ? { range: this.range } : {} },
      axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => this.format(tick)) }],
      cursor: { points: { size: 6 } },
      legend: { live: true },
      bands: this.bands.map(([upper, lower]) => ({ series: [upper, lower], fill: colour("band") })),
      series: [{ label: "step" }, ...this.series.map((one, s) => ({
        label: one.label, stroke: colour(one.colour), width: one.width ?? 1.6, dash: one.dash,
        fill: one.fill ? colour(one.colour) : undefined, points: { show: one.points ?? false, size: 5 },
        spanGaps: true, class: this.named[s] ? undefined : "no-legend", value: (_, value) => this.format(value),
      }))],
    }, this.columns, this.place);
  }
}

/** Trailing means over `window` values, which may be null. */
export function trailing(values, window) {
  return values.map((value, i) => {
    if (value === null) return null;
    const some = values.slice(Math.max(0, i + 1 - window), i + 1).filter((one) => one !== null);
    return some.reduce((a, b) => a + b, 0) / some.length;
  });
}
