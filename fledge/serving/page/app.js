/* The page: one conversation at a time, one answer at a time. */

import { answer, isStop, summary } from "./answer.js";
import { withoutThought } from "./answer_text.js";
import { Conversations } from "./conversations.js";
import { $, announce } from "./dom.js";
import { closeDrawer, setUpDrawers, setUpTabs, toggleSide } from "./drawers.js";
import { figures } from "./figures.js";
import { watchLearning } from "./learning.js";
import { race } from "./race.js";
import { restoreSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { servedModel } from "./stream.js";
import { Talk } from "./talk.js";

let conversation = null; // the one that is shown
let running = null; // the AbortController of the answer that streams
let finished = Promise.resolve(); // when it has ended
let sidebar = null;

const conversations = new Conversations(() => sidebar?.draw());
const talk = new Talk($("talk"), { edit, regenerate, race: startRace });
sidebar = new Sidebar(conversations, { open, current: () => conversation });

function open(chosen, takesFocus = true) {
  stop();
  running = null;
  conversation = chosen ?? conversations.create();
  talk.show(conversation);
  sidebar.draw();
  showBusy();
  closeDrawer();
  if (takesFocus) $("prompt").focus();
}

function showBusy() {
  $("stop").hidden = !running;
  $("send").hidden = Boolean(running);
  $("talk").setAttribute("aria-busy", String(Boolean(running)));
  document.body.classList.toggle("is-busy", Boolean(running));
  $("compare").disabled = Boolean(running) || $("speculate").disabled || !conversation.messages.length;
}

function stop() {
  running?.abort();
}

/* Runs `work(signal)`, which one can stop. */
async function whileBusy(work) {
  const controller = running = new AbortController();
  showBusy();
  finished = work(controller.signal);
  await finished;
  if (running === controller) { // else another conversation was opened meanwhile
    running = null;
    showBusy();
    talk.scrollDown();
  }
}

/* What the model is told of the conversation. */
function history(messages) {
  return messages.map(({ role, content, isThinking }) =>
    ({ role, content: role === "assistant" ? withoutThought(content, isThinking) : content }));
}

/* Answers the last question of the conversation. */
function ask() {
  return whileBusy(async signal => {
    const asked = conversation, isSpeculating = $("speculate").checked;
    const message = { role: "assistant", content: "", isSpeculating };
    const { view, finish } = talk.addAnswer(isSpeculating);
    const follow = new ResizeObserver(() => talk.scrollDown());
    follow.observe(view.body);
    talk.scrollDown(true);
    try {
      const { usage } = await answer(history(asked.messages), isSpeculating, view, signal);
      message.note = usage ? summary(usage) : "";
    } catch (error) {
      message.note = isStop(error) ? "stopped" : error.message;
      message.isFailed = !isStop(error);
    }
    follow.disconnect();
    Object.assign(message, { content: view.drafted.text, runs: view.drafted.runs, isThinking: view.isThinking });
    asked.messages.push(message);
    if (conversations.get(asked.id)) conversations.save(asked); // unless it was deleted meanwhile
    finish(message);
    announce(message.isFailed ? "Error: " + message.note : `Answer complete: ${message.note}`);
  });
}

function addQuestion(text) {
  const message = { role: "user", content: text };
  conversation.messages.push(message);
  conversations.save(conversation);
  talk.addQuestion(message, conversation.messages.length - 1);
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  grow();
  sidebar.forget();
  addQuestion(text);
  await ask();
}

function regenerate() {
  if (running || conversation.messages.at(-1)?.role !== "assistant") return;
  conversation.messages.pop();
  talk.dropLastAnswer();
  ask();
}

/* Replaces a question; what followed it is dropped. */
async function edit(index, text) {
  stop();
  await finished;
  conversation.messages.length = index;
  talk.show(conversation);
  addQuestion(text);
  $("prompt").focus();
  ask();
}

function startRace() {
  if (running || $("compare").disabled) return;
  const until = conversation.messages.findLastIndex(message => message.role === "user");
  const asked = history(conversation.messages.slice(0, until + 1));
  closeDrawer();
  whileBusy(async signal => {
    const turn = talk.addRace(), follow = new ResizeObserver(() => talk.scrollDown());
    follow.observe(turn);
    try {
      talk.scrollDown(true);
      const isSame = await race(asked, turn, signal);
      announce(isSame ? "Race complete: identical answers" : "Race complete: the answers differ");
    } catch (error) {
      const note = document.createElement("p");
      note.className = isStop(error) ? "note" : "note error";
      note.textContent = isStop(error) ? "stopped" : error.message;
      turn.append(note);
    }
    follow.disconnect();
    talk.scrollDown();
  });
}

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = Math.min(box.scrollHeight + 2, 240) + "px";
}

async function connect() {
  try {
    const model = await servedModel();
    $("served").textContent = model.id;
    $("served-more").textContent = `drafter: ${model.drafter || "none"} · context ${model.max_model_len} tokens`;
    if (!model.drafter) {
      $("speculate").checked = false;
      $("speculate").disabled = true;
      $("gain").textContent = "No drafter is loaded.";
    }
    showBusy();
  } catch (error) {
    $("served").textContent = error.message;
    setTimeout(connect, 2000);
  }
}

/* With Alt, so that no letter one types is taken for one; by place on the keyboard, because Alt changes letters on a Mac. */
const SHORTCUTS = {
  KeyN: () => open(null),
  KeyR: startRace,
  KeyS: () => $("speculate").click(),
  KeyT: () => $("theme").click(),
  KeyC: () => toggleSide("conversations"),
  KeyP: () => toggleSide("panel"),
};

document.addEventListener("keydown", event => {
  const isWriting = /^(TEXTAREA|INPUT)$/.test(document.activeElement?.tagName);
  if ($("help").open) return; // Esc closes it
  if (event.key === "Escape") { if (!closeDrawer()) stop(); }
  else if (event.altKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code]) { event.preventDefault(); SHORTCUTS[event.code](); }
  else if (event.key === "/" && !isWriting) { event.preventDefault(); $("prompt").focus(); }
  else if (event.key === "?" && !isWriting) { event.preventDefault(); $("help").showModal(); }
});

$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  else if (event.key === "ArrowUp" && !$("prompt").value && !running) { event.preventDefault(); talk.editLast(); }
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => open(null));
$("compare").addEventListener("click", startRace);
$("show-help").addEventListener("click", () => $("help").showModal());
$("close-help").addEventListener("click", () => $("help").close());
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    $("prompt").value = example.textContent;
    send();
  });
}

restoreSettings();
setUpTabs();
setUpDrawers();
figures.draw();
open(conversations.list[0] ?? null, !matchMedia("(max-width: 64rem)").matches); // on a phone the keyboard would cover the page
connect();
watchLearning();
