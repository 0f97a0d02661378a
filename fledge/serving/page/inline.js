/* Markdown inside a paragraph: emphasis, code, links, line breaks. Takes time linear in the text, whatever the text is. */

import { node } from "./dom.js";

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const ENTITY = /&(amp|lt|gt|quot|apos|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", "#39": "'", nbsp: "\u00a0" };
const BARE_URL = /https?:\/\/[^\s<>"'`\\]{1,2000}/y;
const ANGLE_URL = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const SAFE_SCHEMES = new Set(["http:", "https:", "mailto:"]);
const EMPHASIS = { "*": ["em"], "_": ["em"], "**": ["strong"], "__": ["strong"], "***": ["strong", "em"], "___": ["strong", "em"], "~~": ["del"] };
const MAX_DEPTH = 6;
const MAX_DESTINATION = 2000;

/* The address if a link may lead there, else null. Relative addresses are refused: a model knows none of ours. */
export function safeAddress(text) {
  try {
    const address = new URL(text);
    return SAFE_SCHEMES.has(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

export function link(address, children) {
  const attributes = { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" };
  return node("a", attributes, ...children);
}

export class Inline {
  /* `paint(start, end, shown)` gives the nodes of a range. `isOpen`: more text will come, and ** or ` without its end is closed for now. */
  constructor(text, paint, isOpen) {
    this.text = text;
    this.paint = paint;
    this.isOpen = isOpen;
    this.missing = new Set(); // "marker:end" of searches that found nothing: a later one in the same range would not either
    this.closing = matchBrackets(text);
  }

  nodes(from = 0, to = this.text.length, depth = 0) {
    const { text } = this, out = [];
    let plain = from, at = from;
    const flush = () => { if (at > plain) out.push(...this.paint(plain, at)); };
    const take = found => {
      flush();
      out.push(...found.nodes);
      at = plain = found.end;
    };
    while (at < to) {
      const character = text[at];
      if (character === "\\" && at + 1 < to && PUNCTUATION.test(text[at + 1])) {
        flush();
        plain = at + 1;
        at += 2;
        continue;
      }
      const found = this.#construct(character, at, to, depth);
      if (found) take(found);
      else at += /[*_~`]/.test(character) ? this.#run(at, to) : 1;
    }
    flush();
    return out;
  }

  #construct(character, at, to, depth) {
    switch (character) {
      case "\n": return { nodes: [node("br")], end: at + 1 };
      case "`": return this.#code(at, to);
      case "*": case "_": case "~": return depth < MAX_DEPTH ? this.#emphasis(at, to, depth) : null;
      case "[": return depth < MAX_DEPTH ? this.#link(at, at, to, depth) : null;
      case "!": return this.text[at + 1] === "[" && depth < MAX_DEPTH ? this.#link(at, at + 1, to, depth) : null;
      case "<": return this.#address(ANGLE_URL, at, to);
      case "h": return at === 0 || !/\w/.test(this.text[at - 1]) ? this.#address(BARE_URL, at, to) : null;
      case "&": return this.#entity(at, to);
      default: return null;
    }
  }

  /* How often the character at `at` is repeated. */
  #run(at, to) {
    let end = at;
    while (end < to && this.text[end] === this.text[at]) end++;
    return end - at;
  }

  /* Where `marker` stands alone and `accepts` it, from `from` on; -1: nowhere. */
  #find(marker, from, to, accepts) {
    const key = marker + ":" + to;
    if (this.missing.has(key)) return -1;
    for (let at = this.text.indexOf(marker, from); at >= 0 && at + marker.length <= to;) {
      const length = this.#run(at, to);
      if (length === marker.length && accepts(at)) return at;
      at = this.text.indexOf(marker, at + length);
    }
    this.missing.add(key);
    return -1;
  }

  #code(at, to) {
    const { text } = this, length = this.#run(at, to), begin = at + length;
    let end = this.#find("`".repeat(length), begin, to, () => true), after = end + length;
    if (end < 0) {
      if (!this.isOpen || to !== text.length || begin >= to) return null;
      end = after = to;
    }
    const padded = text[begin] === " " && text[end - 1] === " " && end - begin > 2;
    return { nodes: [node("code", {}, ...this.paint(begin + padded, end - padded))], end: after };
  }

  #emphasis(at, to, depth) {
    const { text } = this, length = this.#run(at, to), marker = text.slice(at, at + length), tags = EMPHASIS[marker];
    const begin = at + length, isWordly = text[at] === "_";
    if (!tags || begin >= to || /\s/.test(text[begin])) return null;
    if (isWordly && at > 0 && /\w/.test(text[at - 1])) return null;
    const closes = end => end > begin && !/[\s\\]/.test(text[end - 1]) && !(isWordly && /\w/.test(text[end + length] ?? " "));
    let end = this.#find(marker, begin, to, closes), after = end + length;
    if (end < 0) {
      if (!this.isOpen || to !== text.length || length < 2) return null;
      end = after = to;
    }
    let children = this.nodes(begin, end, depth + 1);
    for (const tag of [...tags].reverse()) children = [node(tag, {}, ...children)];
    return { nodes: children, end: after };
  }

  /* [words](address "title"), and ![words](address): a picture is not fetched but linked. */
  #link(at, open, to, depth) {
    const { text } = this, close = this.closing.get(open);
    if (close === undefined || close >= to || text[close + 1] !== "(") return null;
    const limit = Math.min(to, close + MAX_DESTINATION);
    let end = close + 2, nested = 0;
    while (end < limit && text[end] !== "\n" && (text[end] !== ")" || nested > 0)) {
      nested += (text[end] === "(") - (text[end] === ")");
      end++;
    }
    const words = () => this.nodes(open + 1, close, depth + 1);
    if (end >= limit || text[end] !== ")") {
      return this.isOpen && to === text.length && end === to ? { nodes: words(), end: to } : null;
    }
    const destination = text.slice(close + 2, end).trim().replace(/\s+["'(].*$/s, "").replace(/^<|>$/g, "");
    const address = safeAddress(destination);
    if (address === null) return null; // shown as it was written, so that one sees what it was
    const children = close > open + 1 ? words() : this.paint(close + 2, end);
    return { nodes: [link(address, children.map(unlinked))], end: end + 1 };
  }

  #address(pattern, at, to) {
    pattern.lastIndex = at;
    const found = pattern.exec(this.text);
    if (!found || at + found[0].length > to) return null;
    const isBare = found[1] === undefined;
    const written = isBare ? found[0].replace(/[.,;:!?*_~)\]}]+$/, "") : found[1];
    const address = safeAddress(written), start = at + (isBare ? 0 : 1);
    if (address === null) return null;
    return { nodes: [link(address, this.paint(start, start + written.length))], end: isBare ? at + written.length : at + found[0].length };
  }

  #entity(at, to) {
    ENTITY.lastIndex = at;
    const found = ENTITY.exec(this.text), end = at + (found?.[0].length ?? 0);
    return found && end <= to ? { nodes: this.paint(at, end, ENTITIES[found[1]]), end } : null;
  }
}

/* For each [ the ] that closes it. */
function matchBrackets(text) {
  const closing = new Map(), open = [];
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) closing.set(open.pop(), at);
  }
  return closing;
}

/* A link holds no other link. */
function unlinked(one) {
  return one.nodeName === "A" ? node("span", {}, ...one.childNodes) : one;
}
