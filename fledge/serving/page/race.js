/* The last question answered without and with speculation, one after the other: at once they would slow each other down.
 *
 * Then both are played again side by side, with the pauses they had: a race at the measured speeds.
 */

import { answer, summary } from "./answer.js";
import { AnswerText } from "./answer_text.js";
import { icon, node } from "./dom.js";
import { isGreedy } from "./settings.js";

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

/* Plays what was recorded; when it is stopped, the rest comes at once. */
async function replay({ view, clock }, pieces, signal) {
  const begun = performance.now();
  clock.textContent = "replay";
  view.clear();
  for (const { at, text, isDrafted } of pieces) {
    const wait = at * 1000 - (performance.now() - begun);
    if (wait > 4 && !signal.aborted) await pause(wait, signal).catch(() => {});
    view.push(text, isDrafted);
  }
  view.finish();
  clock.textContent = "";
}

/* Says whether both texts are the same. */
function verdict(isSame) {
  if (isSame) return node("p", { class: "verdict same" }, icon("check"), "Identical: both answers are the same text, character for character.");
  const why = isGreedy() ? "The answers differ." : "The answers differ because they were sampled; set temperature 0 or a seed to compare them.";
  return node("p", { class: "verdict" }, why);
}

export async function race(messages, turn, signal) {
  const plain = lane("off", "Without speculation"), fast = lane("on", "With speculation");
  turn.append(node("div", { class: "lanes" }, plain.box, fast.box));
  const measured = async (side, isSpeculating) => {
    side.clock.textContent = "measuring";
    const done = await answer(messages, isSpeculating, side.view, signal);
    side.clock.textContent = "";
    return { ...done, text: side.view.drafted.text };
  };
  const first = await measured(plain, false), second = await measured(fast, true);
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
    await Promise.all([replay(plain, first.pieces, signal), replay(fast, second.pieces, signal)]);
  }
  for (const [{ box }, { usage }] of [[plain, first], [fast, second]]) box.append(node("p", { class: "note" }, usage ? summary(usage) : ""));
  const [slow, quick] = [first, second].map(one => one.usage?.speculation.tokens_per_second);
  if (slow && quick) fast.clock.textContent = `${(quick / slow).toFixed(2)}× the speed`;
  const isSame = first.text === second.text;
  turn.append(verdict(isSame));
  return isSame;
}
