/* Markdown as models write it, made into elements: headings, lists, tables, quotes, code. HTML in it stays text.
 *
 * A line is {at, text}: where it begins in the source, and what is left of it inside the quote or list that is being read.
 */

import { codeBlock } from "./code.js";
import { node } from "./dom.js";
import { Inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})(?:[-*+]|(\d{1,9})[.)])( {1,4}|$)/;
const UNDERLINE = /^ {0,3}(={2,}|-{2,})[ \t]*$/;
const TASK = /^\[([ xX])\] /;
const INDENTED = /^(?: {4}|\t)/;
const MAX_DEPTH = 6;
const MAX_COLUMNS = 64;

/* Lines of `source` from `from` on. */
export function lines(source, from = 0) {
  const found = [];
  for (let at = from; at < source.length;) {
    const newline = source.indexOf("\n", at), end = newline < 0 ? source.length : newline;
    found.push({ at, text: source.slice(at, end).replace(/\r$/, "") });
    at = end + 1;
  }
  return found;
}

/* `paint(start, end, shown)` gives the nodes of a range of the source; `open`: where the source ends, if more of it will come. */
export class Markdown {
  constructor(paint, open = Infinity) {
    this.paint = paint;
    this.open = open;
  }

  /* [{node, at}]: the blocks, and where in the source each begins. */
  blocks(all, depth = 0) {
    const found = [];
    for (let first = 0; first < all.length;) {
      if (isBlank(all[first])) { first++; continue; }
      const [made, next] = this.#block(all, first, depth);
      found.push({ node: made, at: all[first].at });
      first = next;
    }
    return found;
  }

  #nodes(all, depth) {
    return this.blocks(all, depth).map(block => block.node);
  }

  #block(all, first, depth) {
    const { text } = all[first];
    if (FENCE.test(text)) return this.#fenced(all, first);
    if (INDENTED.test(text)) return this.#indented(all, first);
    if (HEADING.test(text)) return [this.#heading(all[first]), first + 1];
    if (RULE.test(text)) return [node("hr"), first + 1];
    if (depth < MAX_DEPTH && QUOTE.test(text)) return this.#quote(all, first, depth);
    if (depth < MAX_DEPTH && ITEM.test(text)) return this.#list(all, first, depth);
    const columns = first + 1 < all.length ? alignments(all[first], all[first + 1]) : null;
    return columns ? this.#table(all, first, columns) : this.#paragraph(all, first, depth);
  }

  #fenced(all, first) {
    const [, fence, info] = all[first].text.match(FENCE), indent = all[first].text.search(/\S/);
    const isEnd = line => {
      const mark = line.text.trim();
      return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
    };
    let end = first + 1;
    while (end < all.length && !isEnd(all[end])) end++;
    const body = all.slice(first + 1, end).map(line => dedent(line, indent));
    return [codeBlock(info.trim().split(/\s/)[0], body, this.paint), end + 1];
  }

  #indented(all, first) {
    let end = first;
    while (end < all.length && (INDENTED.test(all[end].text) || isBlank(all[end]))) end++;
    while (isBlank(all[end - 1])) end--;
    return [codeBlock("", all.slice(first, end).map(line => dedent(line, 4)), this.paint), end];
  }

  #heading(line) {
    const mark = line.text.match(HEADING), level = mark[1].length;
    const rest = drop(line, mark[0].length);
    rest.text = rest.text.replace(/[ \t]#+[ \t]*$/, "");
    return heading(level, this.#inline([trimmed(rest)]));
  }

  #quote(all, first, depth) {
    const inside = [];
    let end = first;
    for (; end < all.length; end++) {
      const mark = all[end].text.match(QUOTE);
      if (!mark && (isBlank(all[end]) || this.#interrupts(all[end], depth))) break;
      inside.push(drop(all[end], mark ? mark[0].length : 0));
    }
    return [node("blockquote", {}, ...this.#nodes(inside, depth + 1)), end];
  }

  #list(all, first, depth) {
    const begin = all[first].text.match(ITEM), isOrdered = begin[2] !== undefined;
    const list = node(isOrdered ? "ol" : "ul", isOrdered && begin[2] !== "1" ? { start: Number(begin[2]) } : {});
    let end = first;
    while (end < all.length) {
      const mark = all[end].text.match(ITEM);
      if (!mark || (mark[2] !== undefined) !== isOrdered || RULE.test(all[end].text)) break;
      const width = mark[0].length + (mark[3] === "" ? 1 : 0), inside = [drop(all[end], mark[0].length)];
      for (end++; end < all.length && this.#belongs(all, end, inside, depth); end++) inside.push(dedent(all[end], width));
      list.append(this.#item(inside, depth));
      while (end < all.length && isBlank(all[end])) end++;
    }
    return [list, end];
  }

  /* Whether a line goes on with a list item: indented, or a paragraph that was wrapped. */
  #belongs(all, at, inside, depth) {
    if (isBlank(all[at])) {
      const next = all.slice(at, at + 3).find(line => !isBlank(line));
      return next !== undefined && /^(?: {2}|\t)/.test(next.text);
    }
    if (/^(?: {2}|\t)/.test(all[at].text)) return true;
    return !isBlank(inside[inside.length - 1]) && !this.#interrupts(all[at], depth);
  }

  #item(inside, depth) {
    const task = inside[0].text.match(TASK);
    if (task) inside[0] = drop(inside[0], task[0].length);
    const box = task ? [node("span", { role: "img", "aria-label": task[1] === " " ? "open" : "done" }, task[1] === " " ? "☐ " : "☑ ")] : [];
    const nodes = this.#nodes(inside, depth + 1);
    if (box.length && nodes[0]?.nodeName === "P") nodes[0].prepend(...box.splice(0));
    return node("li", task ? { class: "task" } : {}, ...box, ...nodes);
  }

  #table(all, first, columns) {
    const row = (line, tag) => {
      const parts = cells(line);
      return node("tr", {}, ...columns.map((align, at) => {
        const isHead = tag === "th" && parts[at]?.text; // an empty head cell heads nothing
        const attributes = { class: align, scope: isHead ? "col" : undefined };
        return node(isHead ? "th" : "td", attributes, ...(parts[at] ? this.#inline([parts[at]]) : []));
      }));
    };
    let end = first + 2;
    while (end < all.length && !isBlank(all[end]) && all[end].text.includes("|")) end++;
    const body = all.slice(first + 2, end).map(line => row(line, "td"));
    const table = node("table", {}, node("thead", {}, row(all[first], "th")), node("tbody", {}, ...body));
    return [node("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, table), end];
  }

  #paragraph(all, first, depth) {
    let end = first + 1;
    while (end < all.length && !isBlank(all[end])) {
      const underline = all[end].text.match(UNDERLINE);
      if (underline) {
        return [heading(underline[1][0] === "=" ? 1 : 2, this.#inline(all.slice(first, end).map(trimmed))), end + 1];
      }
      const item = all[end].text.match(ITEM);
      if (item ? depth < MAX_DEPTH && item[3] && (item[2] ?? "1") === "1" : this.#interrupts(all[end], depth)) break;
      end++;
    }
    return [node("p", { dir: "auto" }, ...this.#inline(all.slice(first, end).map(trimmed))), end];
  }

  /* Whether a line ends a paragraph that it follows. */
  #interrupts(line, depth) {
    const { text } = line;
    if (FENCE.test(text) || HEADING.test(text) || RULE.test(text)) return true;
    return depth < MAX_DEPTH && (QUOTE.test(text) || ITEM.test(text));
  }

  #inline(parts) {
    const starts = [];
    let length = 0;
    for (const part of parts) {
      starts.push(length);
      length += part.text.length + 1;
    }
    let line = 0; // ranges come in order, but for links: they go back within a line
    const paint = (start, end, shown) => {
      const nodes = [];
      while (starts[line] > start) line--;
      while (starts[line + 1] <= start) line++;
      for (; line < parts.length && starts[line] < end; line++) {
        const from = Math.max(start, starts[line]), to = Math.min(end, starts[line] + parts[line].text.length);
        if (from < to) nodes.push(...this.paint(parts[line].at + from - starts[line], parts[line].at + to - starts[line], shown));
      }
      line = Math.max(0, line - 1);
      return nodes;
    };
    const last = parts.at(-1), isOpen = last.at + last.text.length >= this.open;
    return new Inline(parts.map(part => part.text).join("\n"), paint, isOpen).nodes();
  }
}

/* Models skip levels: to a screen reader all headings of an answer are one level below the turn's own, so that none is missing. */
const heading = (level, children) => node("h3", { class: "level-" + level, dir: "auto" }, ...children);

const isBlank = line => /^\s*$/.test(line.text);

const drop = (line, count) => ({ at: line.at + count, text: line.text.slice(count) });

/* Without up to `width` columns of indentation. */
function dedent(line, width) {
  let count = 0;
  for (let column = 0; column < width && count < line.text.length; count++) {
    if (line.text[count] === "\t") column += 4;
    else if (line.text[count] === " ") column++;
    else break;
  }
  return drop(line, count);
}

function trimmed(line) {
  const begin = line.text.search(/\S/);
  return begin < 0 ? { at: line.at, text: "" } : { at: line.at + begin, text: line.text.slice(begin).trimEnd() };
}

/* The cells of a row; \| is not a border. */
function cells(line) {
  const found = [], row = trimmed(line);
  let begin = row.text.startsWith("|") ? 1 : 0;
  for (let at = begin; at <= row.text.length; at++) {
    if (row.text[at] === "\\") at++;
    else if (at === row.text.length || row.text[at] === "|") {
      if (at < row.text.length || at > begin) found.push(trimmed({ at: row.at + begin, text: row.text.slice(begin, at) }));
      begin = at + 1;
    }
  }
  return found.slice(0, MAX_COLUMNS);
}

/* Of each column, if the second line makes the first one a table's head; else null. */
function alignments(head, line) {
  if (!head.text.includes("|") || !/^[\s|:-]+$/.test(line.text) || !line.text.includes("-")) return null;
  const marks = cells(line).map(cell => cell.text);
  if (marks.length !== cells(head).length || !marks.every(mark => /^:?-+:?$/.test(mark))) return null;
  return marks.map(mark => (mark.endsWith(":") ? (mark.startsWith(":") ? "centre" : "right") : "left"));
}
