/* The conversation on the page: questions, answers, and the buttons under them. */

import { AnswerText } from "./answer_text.js";
import { $, copyButton, iconButton, node } from "./dom.js";

export class Talk {
  /* `actions`: {edit(index, text), regenerate(), race()}. */
  constructor(target, actions) {
    this.target = target;
    this.actions = actions;
  }

  show(conversation) {
    this.turns.forEach(turn => turn.remove());
    conversation.messages.forEach((message, index) => {
      if (message.role === "user") this.addQuestion(message, index);
      else this.addAnswer(message.isSpeculating, message);
    });
    $("empty").hidden = conversation.messages.length > 0;
    this.scrollDown(true);
  }

  get turns() {
    return this.target.querySelectorAll(".turn");
  }

  #turn(kind, who, ...children) {
    $("empty").hidden = true;
    const made = node("article", { class: "turn " + kind, "aria-label": who }, node("h2", { class: "who" }, who), ...children);
    this.target.append(made);
    return made;
  }

  addQuestion(message, index) {
    const text = node("div", { class: "text", dir: "auto" }, message.content);
    const turn = this.#turn("user", "You", text, node("div", { class: "actions" },
      iconButton("edit", "Edit and send again", () => this.#edit(turn, message, index), { class: "quiet edit" }),
      copyButton("Copy message", () => message.content)));
    return turn;
  }

  /* Without a message: an answer that begins to stream. */
  addAnswer(isSpeculating, message = null) {
    const text = node("div", { class: "text" });
    const turn = this.#turn("assistant", isSpeculating === false ? "Model, plain" : "Model, speculating", text);
    const view = message ? AnswerText.show(text, message) : new AnswerText(text);
    const finish = done => {
      turn.classList.remove("is-streaming");
      const note = node("span", { class: done.isFailed ? "note error" : "note" }, done.note ?? "");
      turn.append(node("div", { class: "actions" },
        copyButton("Copy answer", () => view.drafted.text),
        iconButton("again", "Regenerate", () => this.actions.regenerate(), { class: "quiet only-last regenerate" }),
        iconButton("race", "Race: answer with and without speculation", () => this.actions.race(), { class: "quiet only-last race-here" }),
        note));
      this.#markLast();
    };
    if (message) finish(message);
    else turn.classList.add("is-streaming");
    return { turn, view, finish };
  }

  addRace() {
    return this.#turn("race", "The last question, both ways");
  }

  dropLastAnswer() {
    for (const turn of [...this.turns].reverse()) {
      if (turn.classList.contains("user")) break;
      turn.remove();
    }
    this.#markLast();
  }

  #markLast() {
    const answers = this.target.querySelectorAll(".turn.assistant");
    answers.forEach((turn, at) => turn.classList.toggle("is-last", at === answers.length - 1));
  }

  #edit(turn, message, index) {
    const shown = [...turn.children], box = node("textarea", { class: "edit-box", rows: 3, "aria-label": "Edit the message" });
    const close = () => {
      turn.replaceChildren(...shown);
      turn.querySelector(".edit").focus();
    };
    const send = () => { if (box.value.trim()) this.actions.edit(index, box.value.trim()); };
    box.value = message.content;
    box.addEventListener("keydown", event => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    turn.replaceChildren(shown[0], box, node("div", { class: "actions" },
      node("button", { type: "button", class: "main", onclick: send }, "Send again"),
      node("button", { type: "button", onclick: close }, "Cancel"),
      node("span", { class: "note" }, "A new answer replaces what follows.")));
    box.focus();
  }

  /* Opens the last question for editing. */
  editLast() {
    [...this.target.querySelectorAll(".turn.user .edit")].at(-1)?.click();
  }

  /* Follows the text unless one has scrolled up. */
  scrollDown(isForced) {
    const { target } = this;
    if (isForced || target.scrollHeight - target.scrollTop - target.clientHeight < 140) target.scrollTop = target.scrollHeight;
  }
}
