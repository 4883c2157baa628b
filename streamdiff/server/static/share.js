// A link with prompt, seed, steps and KV context. Who opens it gets a session of their own, which is the same stream when
// this one began with that prompt.

import { refusal } from "./client.js";

const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;
const NAMES = ["prompt", "seed", "steps", "fps", "kv_context"];

/** Hand the link on: to the phone's own dialogue, else to the clipboard. Returns what to tell the visitor. */
export async function share(what, lacks = "") {
  if (!what.prompt) return "There is no prompt to share yet.";
  const link = new URL(location.pathname, location.href);
  for (const name of NAMES) link.searchParams.set(name, what[name]);
  try {
    if (navigator.share && matchMedia("(pointer: coarse)").matches) {
      await navigator.share({ title: "streamdiff", text: what.prompt, url: link.href });
      return "";
    }
    await navigator.clipboard.writeText(link.href);
    return `A link to this prompt and seed is in the clipboard.${LOOPBACK.test(location.hostname) ? " It opens on this computer only." : ""}${lacks}`;
  } catch (error) {
    return error.name === "AbortError" ? "" : `The link: ${link.href}`; // no clipboard: pages without TLS have none
  }
}

/** Open a session of one's own, as the page's address asks for it and with `more`, and go there. Throws the server's
 *  refusal. */
export async function openOwn(authorization, more = {}) {
  const asked = new URLSearchParams(location.search);
  const number = (name) => (asked.has(name) ? Number(asked.get(name)) : undefined);
  const body = JSON.stringify({
    prompt: asked.get("prompt") ?? undefined,
    seed: number("seed"),
    steps: number("steps"),
    fps: number("fps"),
    kv_context: asked.get("kv_context") ?? undefined,
    ...more,
  });
  const answer = await fetch("api/sessions", { method: "POST", body, headers: { "Content-Type": "application/json", ...authorization } }).catch(() => {
    throw new Error("The server cannot be reached.");
  });
  if (!answer.ok) throw await refusal(answer);
  const told = await answer.json();
  for (const name of NAMES) asked.delete(name);
  asked.set("session", told.id);
  location.replace(`${location.pathname}?${asked}#token=${encodeURIComponent(told.control_token)}`);
}

/** Where the page's address is such a link, or the server gives each visitor a session, `openOwn`. Resolves with whether
 *  one was opened; throws the server's refusal. */
export async function openShared(authorization) {
  const asked = new URLSearchParams(location.search);
  const own = "ownSession" in document.documentElement.dataset;
  if ((!asked.get("prompt") && !own) || asked.has("session")) return false;
  await openOwn(authorization);
  return true;
}
