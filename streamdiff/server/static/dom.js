// The page's elements by name, and the few ways in which all of its parts write into them.

export const $ = (id) => document.getElementById(id);

/** Only a text that differs is written: screen readers read a changed node aloud. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A live number; null or NaN is shown as a dash. `low` marks it. */
export function number(id, value, digits, low = false) {
  const node = $(id);
  setText(node, value == null || Number.isNaN(value) ? "–" : value.toFixed(digits));
  node.classList.toggle("low", low);
}

/** Say beside a field what is wrong with its value; "" takes it back. */
export function drawFieldError(field, text) {
  const input = $(field);
  setText($(`${field}-error`), text);
  if (text) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}
