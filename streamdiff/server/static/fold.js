// The drawer with the controls, closed at first; whether it is open is remembered from visit to visit.

import { $ } from "./dom.js";

const KEY = "streamdiff-controls";

export function startFolding() {
  const button = $("fold");
  const show = (open) => {
    document.body.classList.toggle("open", open);
    $("settings").hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    button.title = open ? "Hide the controls (C)" : "Show the controls (C)";
  };
  button.addEventListener("click", () => {
    const open = $("settings").hidden;
    show(open);
    if (open && matchMedia("(max-width: 899px)").matches) $("settings").scrollIntoView({ behavior: "smooth" });
    try {
      localStorage.setItem(KEY, open ? "open" : "");
    } catch {
      // a browser that lets pages keep nothing
    }
  });
  try {
    show(Boolean(localStorage.getItem(KEY)));
  } catch {
    show(false);
  }
}
