/* Light or dark: as the system says, until the button was pressed. In the head and not a module: no flash of the other one. */

"use strict";
(() => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("fledge.theme"); } catch { /* storage is switched off */ }
  const isDark = () => (chosen === "dark" || chosen === "light" ? chosen === "dark" : system.matches);
  function show() {
    root.dataset.theme = isDark() ? "dark" : "light";
    const button = document.getElementById("theme");
    if (button) button.setAttribute("aria-pressed", String(isDark()));
  }
  show();
  system.addEventListener("change", show);
  addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      chosen = isDark() ? "light" : "dark";
      try { localStorage.setItem("fledge.theme", chosen); } catch { /* lasts as long as the page */ }
      show();
    });
  });
})();
