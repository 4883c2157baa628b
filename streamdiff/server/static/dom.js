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

/** Give the visitor a file; returns what to say of it. */
export function download(content, ending) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = `streamdiff-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  return `Saved as ${link.download}.`;
}

/** What an earlier visit chose, by name; null where nothing is, or where the browser lets pages keep nothing. */
export function chosen(name) {
  try {
    return localStorage.getItem(`streamdiff-${name}`);
  } catch {
    return null;
  }
}

/** Remember a choice for later visits, where the browser lets pages keep something. */
export function remember(name, value) {
  try {
    localStorage.setItem(`streamdiff-${name}`, value);
  } catch {
    // kept for this visit only
  }
}
