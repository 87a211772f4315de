"use strict";
// Before the first picture, so that the page does not flash in the other scheme.
try {
  const theme = localStorage.getItem("memfit-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* no storage: the system's scheme */ }
