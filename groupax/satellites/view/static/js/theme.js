// Sets the last chosen theme, else the system's, before anything is drawn.
(() => {
  const chosen = localStorage.getItem("groupax-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
