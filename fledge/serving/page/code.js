/* A block of code: its language, a copy button, and colours for comments, strings, numbers and keywords. */

import { copyButton, node } from "./dom.js";

const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "ruby", "rb", "yaml", "yml", "toml", "r", "perl", "makefile", "dockerfile", "julia"]);
const DASHES = new Set(["sql", "lua", "haskell"]);
const SLASHES = new Set(["javascript", "js", "jsx", "typescript", "ts", "tsx", "c", "cpp", "c++", "h", "java", "go", "rust", "rs", "cs", "csharp", "c#", "swift", "kotlin", "php", "scala", "cuda", "json", "css", "dart"]);
const KEYWORDS = new Set(`
  abstract and as assert async await break case catch class const continue def default defer del delete do done elif else enum esac
  except export extends extern false False fi final finally fn for from func function global go if impl implements import in include
  interface is lambda let loop match mod module mut namespace new nil None nonlocal not null or package pass private protected pub
  public raise return self static struct super switch template then this throw trait true True try type typedef undefined union
  unsafe use using var void where while with yield int float double char bool string long short unsigned auto
  SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER ON GROUP BY ORDER LIMIT AND OR NOT NULL AS
`.split(/\s+/).filter(Boolean));

const STRINGS = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?` + "|`(?:\\\\.|[^`\\\\])*`?";
const COMMENTS = [
  [HASH, String.raw`#[^\n]*`],
  [DASHES, String.raw`--[^\n]*`],
  [SLASHES, String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`],
];

function pattern(language) {
  const comment = COMMENTS.find(([languages]) => languages.has(language))?.[1];
  return comment && new RegExp(`(${STRINGS})|(${comment})|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
}

/* [start, end, class] of what has a colour. */
function* colours(language, text) {
  const tokens = pattern(language);
  if (!tokens) return;
  for (const found of text.matchAll(tokens)) {
    const [, string, comment, number, word] = found, end = found.index + found[0].length;
    if (word !== undefined && !KEYWORDS.has(word)) continue;
    yield [found.index, end, string !== undefined ? "string" : comment !== undefined ? "comment" : number !== undefined ? "number" : "keyword"];
  }
}

/* Nodes of a line without a tint on its indentation. */
function unmarked(nodes, isLineStart) {
  for (let at = 0; isLineStart && at < nodes.length; at++) {
    const text = nodes[at].textContent, indent = text.search(/\S/) < 0 ? text.length : text.search(/\S/);
    if (nodes[at].nodeName === "MARK" && indent > 0) {
      nodes[at].textContent = text.slice(indent);
      nodes.splice(at++, 0, text.slice(0, indent));
    }
    if (indent < text.length) break;
  }
  return nodes;
}

/* `lines`: {at, text} in the source; `paint(start, end)`: nodes of a range of the source. */
export function codeBlock(language, lines, paint) {
  const text = lines.map(line => line.text).join("\n"), code = node("code");
  const starts = [];
  for (let at = 0, line = 0; line < lines.length; at += lines[line++].text.length + 1) starts.push(at);
  let line = 0;
  /* Paints from `start` to `end`, which never go back: line by line, the newline with the line it ends. */
  const painted = (start, end) => {
    const nodes = [];
    for (let at = start; at < end;) {
      while (line + 1 < lines.length && starts[line + 1] <= at) line++;
      const until = Math.min(end, line + 1 < lines.length ? starts[line + 1] : text.length);
      const begin = lines[line].at + at - starts[line], width = Math.min(until, starts[line] + lines[line].text.length) - at;
      if (width > 0) nodes.push(...unmarked(paint(begin, begin + width), at === starts[line]));
      if (width < until - at) nodes.push("\n");
      at = until;
    }
    return nodes;
  };
  let at = 0;
  for (const [start, end, kind] of colours(language.toLowerCase(), text)) {
    code.append(...painted(at, start), node("span", { class: kind }, ...painted(start, end)));
    at = end;
  }
  code.append(...painted(at, text.length));
  const name = language.slice(0, 24);
  return node("div", { class: "code" },
    node("div", { class: "code-head" }, node("span", {}, name || "text"), copyButton("Copy code", () => text)),
    node("pre", { tabindex: 0, role: "group", "aria-label": name ? `Code, ${name}` : "Code" }, code));
}
