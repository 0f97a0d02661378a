/* The panel's figures: what the answer that streams does, and how the last ones with and without speculation compare. */

import { barChart, lineChart } from "./charts.js";
import { $ } from "./dom.js";

const SPEED_WINDOW = 1; // seconds
const STEPS_WINDOW = 12; // verification steps
const MAX_POINTS = 400; // a line of more is thinned to every second point

/* One answer's figures over time. */
class Run {
  constructor(owner, isSpeculating) {
    this.owner = owner;
    this.side = isSpeculating ? "on" : "off";
    this.begun = performance.now();
    this.first = null; // {at, tokens} of the first chunk
    this.looks = []; // what the speed and the acceptance length are read from
    this.speed = [];
    this.acceptance = [];
    this.latest = null;
  }

  get seconds() {
    return this.first ? (performance.now() - this.first.at) / 1000 : 0;
  }

  progress({ tokens, steps, accepted }) {
    this.first ??= { at: performance.now(), tokens };
    const now = { seconds: this.seconds, tokens, steps, accepted };
    this.looks.push(now);
    while (this.looks.length > 2 && this.looks[1].seconds < now.seconds - SPEED_WINDOW && this.looks[1].steps <= steps - STEPS_WINDOW) this.looks.shift();
    const then = this.looks.find(look => look.seconds >= now.seconds - SPEED_WINDOW), elapsed = now.seconds - then.seconds;
    if (elapsed > 0.1) this.#add(this.speed, [now.seconds, (tokens - then.tokens) / elapsed]);
    const before = this.looks.findLast(look => look.steps <= steps - STEPS_WINDOW) ?? this.looks[0];
    if (steps - before.steps >= 4) this.#add(this.acceptance, [now.seconds, 1 + (accepted - before.accepted) / (steps - before.steps)]);
    this.latest = {
      rate: now.seconds > 0.05 ? (tokens - this.first.tokens) / now.seconds : null,
      length: steps ? 1 + accepted / steps : null,
      tokens,
      first: this.first.at - this.begun,
    };
    this.owner.changed();
  }

  #add(line, point) {
    line.push(point);
    if (line.length > MAX_POINTS) line.splice(0, line.length, ...line.filter((_, at) => at % 2 === 1));
  }

  /* The server's own figures replace what was estimated while streaming; null: the answer was stopped. */
  end(usage) {
    if (usage) {
      const told = usage.speculation;
      const first = this.first ? this.first.at - this.begun : null;
      this.latest = { rate: told.tokens_per_second, length: told.steps ? told.acceptance_length : null, tokens: usage.completion_tokens, first };
      this.owner.settle(this.side, told);
    }
    this.owner.changed();
  }
}

class Figures {
  #runs = { on: null, off: null }; // the last of each kind
  #speeds = { on: null, off: null };
  #current = null;
  #frame = null;

  begin(isSpeculating) {
    this.#current = new Run(this, isSpeculating);
    this.#runs[this.#current.side] = this.#current;
    return this.#current;
  }

  /* Draws at most once a frame. */
  changed() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.draw();
    });
  }

  draw() {
    const { rate, length, tokens, first } = this.#current?.latest ?? {};
    $("rate").textContent = rate ? rate.toFixed(1) : "–";
    $("length").textContent = length ? length.toFixed(2) : "–";
    $("tokens").textContent = tokens ?? "–";
    $("first").textContent = first ? (first < 9999 ? Math.round(first) + " ms" : (first / 1000).toFixed(1) + " s") : "–";
    const lines = what => ["off", "on"].map(side => ({ className: side, points: this.#runs[side]?.[what] ?? [] }));
    const now = line => line?.at(-1)?.[1].toFixed(1) ?? "none yet";
    const { on, off } = this.#runs;
    lineChart($("speed-chart"), {
      series: lines("speed"), unit: "seconds",
      label: `Speed in tokens/s over an answer. With speculation: ${now(on?.speed)}. Without: ${now(off?.speed)}.`,
    });
    lineChart($("acceptance-chart"), {
      series: lines("acceptance").slice(1), least: 1, unit: "seconds",
      label: `Acceptance length over an answer, of the last ${STEPS_WINDOW} steps: ${now(on?.acceptance)}.`,
    });
  }

  settle(side, told) {
    if (told.tokens_per_second) this.#speeds[side] = told.tokens_per_second;
    const { on, off } = this.#speeds, most = Math.max(on ?? 0, off ?? 0);
    for (const one of ["on", "off"]) {
      const speed = this.#speeds[one];
      $("speed-" + one).textContent = speed ? speed.toFixed(1) + " tok/s" : "–";
      $("bar-" + one).style.width = speed ? 100 * speed / most + "%" : "0";
    }
    if (on && off) $("gain").textContent = `With speculation ${(on / off).toFixed(2)}× the speed.`;
    const shares = told.acceptance_by_position;
    if (told.steps) {
      barChart($("plot"), shares, "Share of drafts accepted at position " +
        shares.map((share, at) => `${at + 1}: ${Math.round(100 * share)}%`).join(", "));
      $("plot-none").hidden = true;
    }
  }
}

export const figures = new Figures();
