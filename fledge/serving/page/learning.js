/* A server with --learn: acceptance length between two looks, over time, with a line where other weights were swapped in. */

import { lineChart } from "./charts.js";
import { $ } from "./dom.js";
import { readMetrics } from "./stream.js";

const SECONDS = 5, MAX_LOOKS = 240;
let looks = [], begun = null;

/* Looks once, and again later if the server learns. */
export async function watchLearning() {
  const value = await readMetrics(), generation = value("fledge:learn_generation");
  if (generation === null) return;
  setTimeout(watchLearning, SECONDS * 1000);
  begun ??= performance.now();
  const steps = value("vllm:spec_decode_num_drafts_total"), accepted = value("vllm:spec_decode_num_accepted_tokens_total");
  const last = looks.at(-1);
  if (!last || steps > last.steps || generation !== last.generation) {
    const length = last && steps > last.steps ? 1 + (accepted - last.accepted) / (steps - last.steps) : null;
    looks.push({ minutes: (performance.now() - begun) / 60000, steps, accepted, generation, length, isSwap: Boolean(last) && generation !== last.generation });
    looks = looks.slice(-MAX_LOOKS);
  }
  $("learning").hidden = false;
  $("learnt").textContent = `generation ${generation}, ${value("fledge:learn_steps_total")} training steps, ${value("fledge:learn_samples")} texts kept`;
  const drawn = looks.filter(look => look.length !== null), swaps = looks.filter(look => look.isSwap);
  const now = drawn.length ? drawn.at(-1).length.toFixed(2) : "not known yet";
  lineChart($("curve"), {
    series: [{ className: "on", points: drawn.map(look => [look.minutes, look.length]) }],
    marks: drawn.length ? swaps.map(look => look.minutes).filter(minutes => minutes <= drawn.at(-1).minutes) : [],
    least: 1, unit: "minutes",
    label: `Acceptance length over time, now ${now}. New weights were swapped in ${swaps.length} times.`,
  });
}
