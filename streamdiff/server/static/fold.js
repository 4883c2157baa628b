// The controls fold away, so that the picture has the page; remembered from visit to visit.

import { $ } from "./dom.js";

const KEY = "streamdiff-folded";

export function startFolding() {
  const button = $("fold");
  const fold = (folded) => {
    document.body.classList.toggle("folded", folded);
    button.setAttribute("aria-expanded", String(!folded));
    button.title = folded ? "Show the controls (C)" : "Fold the controls away (C)";
  };
  button.addEventListener("click", () => {
    const folded = !document.body.classList.contains("folded");
    fold(folded);
    try {
      localStorage.setItem(KEY, folded ? "1" : "");
    } catch {
      // a browser that lets pages keep nothing
    }
  });
  try {
    fold(Boolean(localStorage.getItem(KEY)));
  } catch {
    fold(false);
  }
}
