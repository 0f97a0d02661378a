/* The two sides of the page. On a wide window they stand beside the conversation; on a narrow one they are drawers over it. */

import { $ } from "./dom.js";
import { store, stored } from "./settings.js";

const narrow = matchMedia("(max-width: 64rem)");

class Side {
  constructor(id, button) {
    Object.assign(this, { id, element: $(id), button: $(button), isOpen: false });
    this.button.addEventListener("click", () => this.toggle());
  }

  get isShown() {
    return narrow.matches ? this.isOpen : stored("fledge." + this.id) !== "closed";
  }

  toggle() {
    for (const side of sides) if (side !== this) side.isOpen = false;
    if (!narrow.matches) store("fledge." + this.id, this.isShown ? "closed" : "open");
    else if (this.isOpen) return this.close();
    else this.isOpen = true;
    draw();
    if (narrow.matches) this.element.querySelector("button, input, textarea")?.focus();
  }

  close() {
    this.isOpen = false;
    draw();
    this.button.focus();
  }
}

const sides = [];

function draw() {
  const open = narrow.matches ? sides.find(side => side.isOpen) : null;
  for (const side of sides) {
    side.element.classList.toggle("is-shown", side.isShown);
    side.element.inert = !side.isShown;
    side.button.setAttribute("aria-expanded", String(side.isShown));
  }
  $("shade").hidden = !open;
  $("main").inert = Boolean(open);
}

/* Closes an open drawer; says whether there was one. */
export function closeDrawer() {
  const open = narrow.matches ? sides.find(side => side.isOpen) : null;
  open?.close();
  return Boolean(open);
}

export function toggleSide(id) {
  sides.find(side => side.id === id).toggle();
}

export function setUpDrawers() {
  sides.push(new Side("conversations", "show-conversations"), new Side("panel", "show-panel"));
  $("shade").addEventListener("click", closeDrawer);
  narrow.addEventListener("change", () => {
    sides.forEach(side => { side.isOpen = false; });
    draw();
  });
  draw();
}

/* Tabs of the panel: arrow keys go from one to the next. */
export function setUpTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const choose = tab => {
    for (const one of tabs) {
      one.setAttribute("aria-selected", String(one === tab));
      one.tabIndex = one === tab ? 0 : -1;
      $(one.getAttribute("aria-controls")).hidden = one !== tab;
    }
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(at + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
}
