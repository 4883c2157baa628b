// The card that loads the server's LoRAs: which one, and how strongly it counts; at 0 it is taken out.

import { $, drawFieldError, setText } from "./dom.js";

let scales = {};

/** `send(name, scale)` asks for a scale of a LoRA. */
export function startLoras(send) {
  $("lora-form").addEventListener("submit", (event) => event.preventDefault());
  $("lora").addEventListener("change", drawScale);
  $("lora-scale").addEventListener("input", drawValue);
  $("lora-scale").addEventListener("change", () => {
    drawFieldError("lora", "");
    const scale = $("lora-scale").valueAsNumber;
    if (scale > 0 || $("lora").value in scales) send($("lora").value, scale || null);
  });
}

/** Draws what the session has, of those that the server knows; the card is there where it knows some. */
export function drawLoras({ loras, loras_known: known }) {
  const select = $("lora");
  scales = loras;
  $("lora-form").hidden = !known.length;
  if ([...select.options].map((option) => option.value).join() !== known.join()) {
    select.replaceChildren(...known.map((name) => new Option(name, name)));
  }
  setText($("lora-help"), Object.entries(loras).map(([name, scale]) => `${name} at ${scale.toFixed(2)}`).join(", ") || "None is loaded.");
  if (document.activeElement !== $("lora-scale")) drawScale();
}

/** Shows the scale of the chosen LoRA, also after one that was refused. */
export function drawScale() {
  $("lora-scale").value = scales[$("lora").value] ?? 0;
  drawValue();
}

function drawValue() {
  setText($("lora-value"), $("lora-scale").valueAsNumber.toFixed(2));
}
