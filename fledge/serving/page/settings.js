/* The settings, kept in this browser. An empty field is not sent: the model's or the server's default holds. */

import { $ } from "./dom.js";

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "seed"];
const FIELDS = ["system", ...NUMBERS];
const key = id => "fledge." + id;

/* Storage may be switched off: settings then last as long as the page. */
export function stored(name, fallback = null) {
  try { return localStorage.getItem(name) ?? fallback; } catch { return fallback; }
}

export function store(name, value) {
  try { localStorage.setItem(name, value); } catch { /* see above */ }
}

export const systemPrompt = () => $("system").value.trim();

export function sampling() {
  return Object.fromEntries(NUMBERS.filter(id => $(id).value.trim() !== "").map(id => [id, Number($(id).value)]));
}

export const isGreedy = () => Number($("temperature").value) === 0;

function showTint() {
  document.body.classList.toggle("no-tint", !$("tint").checked);
}

export function restoreSettings() {
  for (const id of FIELDS) {
    const kept = stored(key(id));
    if (kept !== null) $(id).value = kept;
    $(id).addEventListener("change", () => store(key(id), $(id).value));
  }
  $("tint").checked = stored("fledge.tint") !== "off";
  $("tint").addEventListener("change", () => {
    store("fledge.tint", $("tint").checked ? "on" : "off");
    showTint();
  });
  $("defaults").addEventListener("click", () => {
    for (const id of FIELDS) {
      $(id).value = $(id).defaultValue;
      store(key(id), $(id).value);
    }
    $("tint").checked = true;
    store("fledge.tint", "on");
    showTint();
  });
  showTint();
}
