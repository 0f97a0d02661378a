/* A server with --learn: acceptance length over the requests served, with a line where other weights were swapped in. */

import { lineChart } from "./charts.js";
import { $ } from "./dom.js";
import { learningHistory, readMetrics } from "./stream.js";

const SECONDS = 5;

/* Looks once, and again later if the server learns. */
export async function watchLearning() {
  const value = await readMetrics(), generation = value("fledge:learn_generation");
  if (generation === null) return;
  setTimeout(watchLearning, SECONDS * 1000);
  const { points, swaps } = await learningHistory() ?? { points: [], swaps: [] };
  $("learning").hidden = false;
  $("learnt").textContent = `generation ${generation}, ${value("fledge:learn_steps_total")} training steps, ${value("fledge:learn_samples")} texts kept`;
  const now = points.length ? points.at(-1)[1].toFixed(2) : "not known yet";
  lineChart($("curve"), {
    series: [{ className: "on", points }],
    marks: points.length ? swaps.filter(requests => requests <= points.at(-1)[0]) : [],
    least: 1, unit: "requests",
    label: `Acceptance length over the requests served, now ${now}. New weights were swapped in ${swaps.length} times.`,
  });
}
