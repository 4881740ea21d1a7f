// Owns light and dark. A plain script in the head: the theme is set before anything is painted.
//
// Without a choice the system's preference holds; a choice is kept in localStorage (which may be forbidden).
(() => {
  const KEY = "offbeat.theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function kept() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  }

  function keep(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // It holds until the page is left.
    }
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = theme === "dark" ? "Light theme" : "Dark theme";
    document.dispatchEvent(new CustomEvent("offbeat:theme"));
  }

  const preferred = () => (["light", "dark"].includes(kept()) ? kept() : dark.matches ? "dark" : "light");
  apply(preferred());
  dark.addEventListener("change", () => apply(preferred()));
  window.addEventListener("storage", (event) => event.key === KEY && apply(preferred()));
  document.addEventListener("DOMContentLoaded", () => {
    apply(preferred());
    document.getElementById("theme").addEventListener("click", () => {
      const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      keep(other);
      apply(other);
    });
  });
})();
