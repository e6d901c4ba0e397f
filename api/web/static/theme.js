// Light, dark, or as the system has it. Runs before the page is drawn, so that nothing flashes; hence no module.
"use strict";
(() => {
  const STORED = "pagewire.theme";
  const root = document.documentElement;
  const remembered = localStorage.getItem(STORED);
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;

  window.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const systemIsDark = matchMedia("(prefers-color-scheme: dark)").matches;
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark;
      if (isDark === systemIsDark) root.dataset.theme = isDark ? "light" : "dark";
      else delete root.dataset.theme; // back to the system's choice
      if (root.dataset.theme) localStorage.setItem(STORED, root.dataset.theme);
      else localStorage.removeItem(STORED);
    });
  });
})();
