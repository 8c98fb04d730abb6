// Before anything is drawn: the theme that was chosen last, else the system's.
(() => {
  const chosen = localStorage.getItem("groupax-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
