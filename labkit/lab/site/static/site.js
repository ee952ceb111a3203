// From a disk, a page cannot fetch others: no summaries of search results there.
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}

// What scrolls sideways can be reached and scrolled with the keyboard.
function makeScrollable() {
  for (const box of document.querySelectorAll(".wide, .picture, .cell_output, .output, pre")) {
    if (box.scrollWidth > box.clientWidth && !box.hasAttribute("tabindex")) box.tabIndex = 0;
  }
}

// The theme's label of this button leaves out the keys that the button shows on a wide screen.
function labelSearch() {
  for (const button of document.querySelectorAll(".search-button-field")) {
    button.setAttribute("aria-label", button.innerText.replace(/\s+/g, " ").trim() || "Search");
  }
}

for (const when of ["load", "resize"]) {
  addEventListener(when, makeScrollable);
  addEventListener(when, labelSearch);
}
