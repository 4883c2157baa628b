// The drawer with the controls, closed at first; whether it is open is remembered from visit to visit.

import { $, chosen, remember } from "./dom.js";

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
    remember("controls", open ? "open" : "");
  });
  show(Boolean(chosen("controls")));
}
