/* The last question answered without and with speculation, one after the other: at once they would slow each other down.
 *
 * While the second answer streams, the first is played again beside it with the pauses it had: a race at the measured speeds.
 */

import { answer, summary } from "./answer.js";
import { AnswerText } from "./answer_text.js";
import { node } from "./dom.js";
import { isGreedy } from "./settings.js";
import { verdict } from "./talk.js";

function lane(side, name) {
  const text = node("div", { class: "text" }), clock = node("span", { class: "clock" });
  const box = node("section", { class: "lane " + side, "aria-label": name }, node("div", { class: "who" }, node("span", {}, name), clock), text);
  return { box, clock, view: new AnswerText(text) };
}

const pause = (milliseconds, signal) => new Promise((done, stopped) => {
  const timer = setTimeout(done, milliseconds);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    stopped(signal.reason);
  });
});

/* Plays what was recorded. */
async function replay({ view, clock }, pieces, signal) {
  const begun = performance.now();
  clock.textContent = "replay";
  view.clear();
  try {
    for (const { at, text, isDrafted } of pieces) {
      const wait = at * 1000 - (performance.now() - begun);
      if (wait > 4) await pause(wait, signal);
      view.push(text, isDrafted);
    }
  } finally {
    view.finish();
  }
}

export async function race(messages, turn, signal, scrolled) {
  const plain = lane("off", "Without speculation"), fast = lane("on", "With speculation");
  const lanes = node("div", { class: "lanes" }, plain.box, fast.box), isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  turn.append(lanes);
  scrolled(true);
  plain.clock.textContent = "measuring";
  fast.clock.textContent = "waits";
  const first = await answer(messages, false, plain.view, signal);
  const text = plain.view.drafted.text;
  fast.clock.textContent = "live";
  const [second] = await Promise.all([
    answer(messages, true, fast.view, signal),
    isStill ? null : replay(plain, first.pieces, signal),
  ]);
  plain.clock.textContent = fast.clock.textContent = "";
  for (const [{ box }, { usage }] of [[plain, first], [fast, second]]) box.append(node("p", { class: "note" }, usage ? summary(usage) : ""));
  const isSame = text === fast.view.drafted.text, rates = [first, second].map(one => one.usage?.speculation.tokens_per_second);
  if (rates[0] && rates[1]) {
    const gain = rates[1] / rates[0];
    (gain > 1 ? fast : plain).clock.textContent = `${(gain > 1 ? gain : 1 / gain).toFixed(2)}× as fast`;
  }
  turn.append(verdict(isSame, isGreedy()));
  scrolled(false);
  return isSame;
}
