// Short prompts that change one thing of the picture: what else the model knows, one of each kind at a time.

import { $ } from "./dom.js";

let groups = [];
let shown = "";

/** A button that offers a prompt. */
export function chip(prompt, send) {
  const made = document.createElement("button");
  made.type = "button";
  made.dir = "auto";
  made.className = "chip";
  made.dataset.steers = "";
  made.textContent = prompt;
  made.addEventListener("click", () => send(prompt));
  return made;
}

/** Offer one of each group that `text`, the prompt in force, does not say; others whenever it changes. `known`: the
 *  groups, given once; a model that takes every prompt as a whole has none. */
export function drawSuggestions(text, send, known = groups) {
  if (text === shown && known === groups) return;
  [shown, groups] = [text, known];
  const offered = groups.map((group) => group.filter((each) => !text.includes(each))).filter((group) => group.length);
  const row = $("suggestions");
  row.hidden = !offered.length;
  row.replaceChildren(...offered.map((group) => chip(group[Math.floor(Math.random() * group.length)], send)));
}
