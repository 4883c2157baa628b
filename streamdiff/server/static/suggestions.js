// Prompts that the page offers: whole ones, and short ones that change one thing of the picture, one of each kind.

import { $ } from "./dom.js";

let groups = [];
let shown = "";
let due = null;

/** A button that offers a prompt. */
export function chip(prompt, send) {
  const made = document.createElement("button");
  made.type = "button";
  made.dir = "auto";
  made.className = "chip";
  made.dataset.steers = "";
  made.title = made.dataset.title = prompt;
  made.textContent = prompt;
  made.addEventListener("click", () => send(prompt));
  return made;
}

/** Offer one of each group that `text`, the prompt in force, does not say; others when it changes, and not before the
 *  pointer has left them. `known`: the groups, given once; a model that takes every prompt as a whole has none. */
export function drawSuggestions(text, send, known = groups) {
  if (text === shown && known === groups) return;
  [shown, groups] = [text, known];
  due = () => {
    const offered = groups.map((group) => group.filter((each) => !text.includes(each))).filter((group) => group.length);
    $("suggestions").hidden = !offered.length;
    $("suggestions").replaceChildren(...offered.map((group) => chip(oneOf(group), send)));
    due = null;
  };
  if (!$("ideas").matches(":hover")) due();
}

const oneOf = (list) => list[Math.floor(Math.random() * list.length)];

/** Wires the row up: "surprise me" sends one of the prompts on offer, other than the one in force; the keys 1 to 9
 *  press the examples. */
export function startSuggestions(current) {
  const row = $("ideas");
  row.addEventListener("pointerleave", () => due?.());
  $("surprise").addEventListener("click", () => {
    const others = [...row.querySelectorAll(".chips .chip")].filter((each) => each.textContent !== current());
    if (others.length) oneOf(others).click();
  });
  return { press: (number) => $("chips").children[number - 1]?.click() };
}
