// Runs before the page is painted, so that a chosen theme doesn't flash. Not a module for that.
{
  let theme = null;
  try {
    theme = JSON.parse(localStorage.getItem("penstock.theme"));
  } catch {
    theme = null; // storage is blocked: the system's theme
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
