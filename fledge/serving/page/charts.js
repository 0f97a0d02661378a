/* Small charts as SVG. Each has a sentence that says what it shows. */

import { svg } from "./dom.js";

const WIDTH = 280, LEFT = 30, RIGHT = 276;

/* A step that gives at most four lines: 1, 2 or 5 times a power of ten. */
function stepOf(range) {
  const power = 10 ** Math.floor(Math.log10(range / 4));
  return [1, 2, 5, 10].map(times => times * power).find(step => range / step <= 4);
}

const written = value => String(Number(value.toPrecision(6)));

/* `series`: [{className, points: [[x, y]]}]; `marks`: [x], where something changed; `least`: where the y axis begins. */
export function lineChart(chart, { series, marks = [], least = 0, unit = "", label, height = 80 }) {
  const points = series.flatMap(one => one.points), top = 8, base = height - 16;
  chart.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  chart.setAttribute("aria-label", label);
  chart.replaceChildren();
  if (!points.length) {
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: base, y2: base }));
    return;
  }
  const most = Math.max(least + 1, ...points.map(point => point[1])), from = Math.min(0, ...points.map(point => point[0]));
  const until = Math.max(from + 1e-9, ...points.map(point => point[0])), step = stepOf(most - least);
  const highest = least + step * Math.ceil((most - least) / step);
  const x = value => LEFT + (RIGHT - LEFT) * (value - from) / (until - from);
  const y = value => base - (base - top) * (value - least) / (highest - least);
  for (let value = least; value <= highest + step / 2; value += step) {
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(value), y2: y(value) }));
    chart.append(svg("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, written(value)));
  }
  for (const mark of marks) chart.append(svg("line", { class: "swap", x1: x(mark), x2: x(mark), y1: top, y2: base }));
  for (const { className, points: line } of series) {
    if (line.length > 1) {
      const at = line.map(([across, up]) => `${x(across).toFixed(1)},${y(up).toFixed(1)}`);
      if (className === "on") {
        const area = [...at, `${x(line.at(-1)[0]).toFixed(1)},${base}`, `${x(line[0][0]).toFixed(1)},${base}`];
        chart.append(svg("polygon", { class: "area", points: area.join(" ") }));
      }
      chart.append(svg("polyline", { class: className, points: at.join(" ") }));
    }
    if (line.length) chart.append(svg("circle", { class: className, cx: x(line.at(-1)[0]), cy: y(line.at(-1)[1]), r: 2.5 }));
  }
  chart.append(svg("text", { x: RIGHT, y: height - 4, "text-anchor": "end" }, `${until.toFixed(1)} ${unit}`));
}

/* Shares between 0 and 1, one bar each. */
export function barChart(chart, shares, label) {
  const base = 76, tallest = 60, width = WIDTH / Math.max(shares.length, 1), thick = Math.min(width * 0.7, 44);
  chart.setAttribute("viewBox", `0 0 ${WIDTH} 94`);
  chart.setAttribute("aria-label", label);
  chart.replaceChildren(svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: base, y2: base }));
  shares.forEach((share, at) => {
    const middle = width * (at + 0.5), tall = Math.max(1, share * tallest);
    chart.append(
      svg("rect", { x: middle - thick / 2, y: base - tall, width: thick, height: tall, rx: 3 }),
      svg("text", { x: middle, y: base - tall - 4, "text-anchor": "middle" }, Math.round(100 * share) + "%"),
      svg("text", { x: middle, y: base + 13, "text-anchor": "middle" }, String(at + 1)));
  });
}
