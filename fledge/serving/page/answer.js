/* One answer: asked for, streamed into the page, and measured. */

import { figures } from "./figures.js";
import { sampling, systemPrompt } from "./settings.js";
import { chunks } from "./stream.js";

/* What a stopped request is ended with. */
export const isStop = error => error.name === "AbortError";

/* Streams the answer to `messages` into `view`. Gives {usage, pieces}: the server's figures and what came when. */
export async function answer(messages, isSpeculating, view, signal) {
  const system = systemPrompt(), sent = system ? [{ role: "system", content: system }, ...messages] : messages;
  const body = { messages: sent, speculate: isSpeculating, ...sampling() };
  const run = figures.begin(isSpeculating), pieces = [];
  let usage = null, isCut = false;
  try {
    for await (const chunk of chunks(body, signal)) {
      if (chunk.usage?.speculation) usage = chunk.usage;
      const choice = chunk.choices[0], live = choice?.speculation;
      if (choice?.finish_reason === "length") isCut = true;
      if (choice?.delta?.reasoning || choice?.delta?.reasoning_content) view.isThinking = true;
      if (!live) continue;
      run.progress(live);
      for (const [text, isDrafted] of live.spans) {
        pieces.push({ at: run.seconds, text, isDrafted });
        view.push(text, isDrafted);
      }
    }
  } finally {
    view.finish();
    run.end(usage);
  }
  return { usage: usage && { ...usage, isCut }, pieces };
}

/* The line under an answer. */
export function summary(usage) {
  const { tokens_per_second: rate, acceptance_length: length, steps } = usage.speculation;
  const parts = [`${usage.completion_tokens} tokens`];
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (steps) parts.push(`acceptance length ${length.toFixed(2)}`);
  if (usage.isCut) parts.push("cut off at the token limit");
  return parts.join(" · ");
}
