/* The list of conversations: open, rename (F2), delete (Delete) and its undoing. */

import { $, announce, iconButton, node } from "./dom.js";

export class Sidebar {
  #removed = null; // the last deleted conversation

  /* `open(conversation)` shows one, or a new one for null; `current()` gives the one that is shown. */
  constructor(conversations, { open, current }) {
    Object.assign(this, { conversations, open, current });
    $("undo").addEventListener("click", () => this.#undo());
    $("list").addEventListener("keydown", event => this.#key(event));
  }

  draw() {
    const { list, isKept } = this.conversations, focused = document.activeElement?.closest("#list li")?.dataset.id;
    $("list").replaceChildren(...list.map(one => this.#item(one)));
    $("list-none").hidden = list.length > 0;
    $("kept").textContent = isKept ? "Kept in this browser only, the newest 50." : "Not kept: the browser's storage is full or switched off.";
    if (focused) [...$("list").children].find(item => item.dataset.id === focused)?.querySelector(".open").focus();
  }

  #item(conversation) {
    const isCurrent = conversation.id === this.current()?.id;
    const item = node("li", { "data-id": conversation.id, class: isCurrent ? "is-current" : "" });
    item.append(
      node("button", { type: "button", class: "open", title: conversation.title, "aria-current": isCurrent ? "true" : undefined, onclick: () => this.open(conversation) }, conversation.title),
      iconButton("edit", `Rename “${conversation.title}”`, () => this.#rename(item, conversation), { class: "quiet rename" }),
      iconButton("delete", `Delete “${conversation.title}”`, () => this.#remove(conversation), { class: "quiet remove" }));
    return item;
  }

  #rename(item, conversation) {
    const box = node("input", { type: "text", maxlength: 80, "aria-label": "New title" });
    let isDone = false;
    const end = isSaved => {
      if (isDone) return;
      isDone = true;
      if (isSaved && box.value.trim()) this.conversations.rename(conversation, box.value);
      else this.draw();
      [...$("list").children].find(one => one.dataset.id === conversation.id)?.querySelector(".open").focus();
    };
    box.value = conversation.title;
    box.addEventListener("keydown", event => {
      event.stopPropagation();
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    box.addEventListener("blur", () => end(true));
    item.replaceChildren(box);
    box.select();
  }

  #remove(conversation) {
    const { list } = this.conversations, at = list.findIndex(one => one.id === conversation.id);
    const next = list[at + 1] ?? list[at - 1] ?? null, isCurrent = conversation.id === this.current()?.id;
    this.#removed = conversation;
    this.conversations.remove(conversation.id);
    $("removed").hidden = false;
    announce("Conversation deleted");
    if (isCurrent) this.open(null, false);
    const item = [...$("list").children].find(one => one.dataset.id === next?.id);
    (item?.querySelector(".open") ?? $("new")).focus();
  }

  #undo() {
    if (this.#removed) this.conversations.restore(this.#removed);
    $("list").querySelector(`[data-id="${CSS.escape(this.#removed?.id ?? "")}"] .open`)?.focus();
    this.forget();
  }

  /* The last deletion can no longer be undone. */
  forget() {
    this.#removed = null;
    $("removed").hidden = true;
  }

  #key(event) {
    const item = event.target.closest("li");
    if (!item || !event.target.matches(".open")) return;
    const conversation = this.conversations.get(item.dataset.id);
    const actions = {
      ArrowDown: () => item.nextElementSibling?.querySelector(".open").focus(),
      ArrowUp: () => item.previousElementSibling?.querySelector(".open").focus(),
      F2: () => this.#rename(item, conversation),
      Delete: () => this.#remove(conversation),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}
