/* Makes elements. Text only ever becomes text nodes: nothing in the page parses a string as HTML. */

const SVG = "http://www.w3.org/2000/svg";

export const $ = id => document.getElementById(id);

function fill(made, attributes, children) {
  made.append(...children); // before the attributes: with dir=auto each child would be searched for its direction, 1.2 s for 30,000
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value); // onclick: …
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(name, value);
  }
  return made;
}

export function node(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/* One of the symbols in index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: "#icon-" + name }));
}

/* A button with a symbol; its label is read out, shown as a tooltip, and written beside the symbol if `shown`. */
export function iconButton(name, label, onclick, { shown = false, ...attributes } = {}) {
  const named = shown ? {} : { "aria-label": label };
  return node("button", { type: "button", class: "quiet", title: label, ...named, ...attributes, onclick }, icon(name), shown ? label : "");
}

/* Says something to screen readers once, and shows nothing. */
export function announce(text) {
  $("status").textContent = text;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard without https, except on localhost
    const box = node("textarea", { class: "hidden-text", "aria-hidden": "true" });
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
}

/* A copy button that says for a moment that it has copied. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    announce("Copied");
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}
