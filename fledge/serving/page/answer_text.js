/* An answer's text in the page, drawn as it streams: once a frame, and only its last block again. */

import { DraftedText } from "./drafted_text.js";
import { node } from "./dom.js";
import { lines, Markdown } from "./markdown.js";

const OPEN = "<think>", CLOSE = "</think>";

/* Where the thought that some models begin with ends and the answer begins: [thought start, thought end, answer start]. */
function parts(text, isThinking) {
  const isOpened = text.trimStart().startsWith(OPEN), close = text.indexOf(CLOSE);
  if (!isOpened && !isThinking) return [0, 0, 0];
  const start = isOpened ? text.indexOf(OPEN) + OPEN.length : 0;
  return close < 0 ? [start, text.length, text.length] : [start, close, close + CLOSE.length];
}

/* What is sent back to the model as its earlier answer. */
export function withoutThought(text, isThinking) {
  return text.slice(parts(text, isThinking)[2]).trimStart();
}

/* Blocks of a range of the text inside an element. */
class Blocks {
  constructor(target, drafted) {
    this.target = target;
    this.drafted = drafted;
    this.last = null; // where the last block begins in the text
    this.unsettled = []; // its element: more text may change it
  }

  draw(from, to, isStreaming) {
    if (this.last !== null && this.last < from) { // what began like an answer was a thought
      this.target.replaceChildren();
      [this.last, this.unsettled] = [null, []];
    }
    const source = this.drafted.text.slice(0, to), open = isStreaming ? source.trimEnd().length : undefined;
    const markdown = new Markdown((start, end, shown) => this.drafted.paint(start, end, shown), open);
    const blocks = markdown.blocks(lines(source, this.last ?? from));
    for (const one of this.unsettled) one.remove();
    this.target.append(...blocks.map(block => block.node));
    const last = blocks[blocks.length - 1];
    if (last) [this.last, this.unsettled] = [last.at, [last.node]];
  }
}

export class AnswerText {
  isThinking = false; // the server said that the answer begins with a thought
  #frame = null;

  constructor(target, drafted = new DraftedText()) {
    this.target = target;
    this.drafted = drafted;
    this.body = node("div", { class: "markdown" });
    this.blocks = new Blocks(this.body, drafted);
    this.thought = null;
    target.append(this.body);
  }

  /* A stored message. */
  static show(target, message) {
    const view = new AnswerText(target, DraftedText.from(message.content, message.runs));
    view.isThinking = Boolean(message.isThinking);
    view.draw(false);
    return view;
  }

  push(piece, isDrafted) {
    this.drafted.push(piece, isDrafted);
    this.#frame ??= requestAnimationFrame(() => this.draw(true));
  }

  /* The text is complete: what was left open is shown as it is written. */
  finish() {
    this.draw(false);
  }

  clear() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    this.target.replaceChildren(this.body);
    this.body.replaceChildren();
    this.thought = null;
    this.drafted = new DraftedText();
    this.blocks = new Blocks(this.body, this.drafted);
  }

  draw(isStreaming) {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const [start, end, answer] = parts(this.drafted.text, this.isThinking);
    if (end > start) this.#drawThought(start, end, isStreaming && answer === this.drafted.text.length);
    this.blocks.draw(answer, this.drafted.text.length, isStreaming);
  }

  #drawThought(start, end, isStreaming) {
    if (!this.thought) {
      const inside = node("div", { class: "markdown" });
      const box = node("details", { class: "thought", open: isStreaming }, node("summary", {}, "Thinking"), inside);
      this.target.prepend(box);
      this.thought = { box, blocks: new Blocks(inside, this.drafted), isDone: false };
    }
    if (this.thought.isDone) return;
    this.thought.blocks.draw(start, end, isStreaming);
    if (!isStreaming) {
      this.thought.isDone = true;
      this.thought.box.open = false;
    }
  }
}
