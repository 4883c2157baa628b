// Going back: a scrubber over what the server keeps of the stream, a branch of it, and its log as a file.

import { refusal } from "./client.js";
import { $, download, drawFieldError, setText } from "./dom.js";

/** `rewind` is called with the chunk to go back to, `told` with what the visitor reads. Returns what the page calls with
 *  the first and the latest chunk that are kept (null: none), and with a chunk that somebody has gone back to. */
export function startRewinding({ session, authorization, view, rewind, told }) {
  const range = $("rewind");

  const address = () => `api/sessions/${encodeURIComponent(session())}`;
  const secondsBack = () => Math.round(((range.max - range.value) * (view.chunkFrames ?? 12)) / (view.fps || 1));

  function drawValue() {
    const seconds = secondsBack();
    setText($("rewind-value"), seconds ? `−${seconds} s` : "now");
    range.setAttribute("aria-valuetext", seconds ? `${seconds} seconds ago` : "now");
  }

  function draw(kept) {
    for (const id of ["rewind-row", "rewind-go", "branch"]) $(id).hidden = !kept;
    setText($("rewind-help"), kept ? "What is shown is made again from there." : "Nothing is kept of this stream yet.");
    if (!kept) return;
    const follows = range.value === range.max; // who holds it elsewhere keeps the place
    [range.min, range.max] = kept;
    if (follows) range.value = range.max;
    drawValue();
  }

  /** Ask the server; what it refuses is said below. */
  async function ask(path, how, take) {
    drawFieldError("rewind", "");
    try {
      const answer = await fetch(path, { ...how, headers: { ...how.headers, ...authorization } });
      if (!answer.ok) throw await refusal(answer);
      await take(answer);
    } catch (error) {
      drawFieldError("rewind", error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
  }

  /** Go to a session that was opened just now, in a tab of its own where the browser lets pages open one. */
  async function visit(answer) {
    const { id, control_token } = await answer.json();
    const place = `${location.pathname}?session=${encodeURIComponent(id)}#token=${encodeURIComponent(control_token)}`;
    if (!open(place, "_blank")) location.assign(place);
    told("The other stream has opened.");
  }

  $("rewind-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!$("rewind-row").hidden) rewind(Number(range.value));
  });
  range.addEventListener("input", drawValue);
  $("branch").addEventListener("click", () => {
    const body = JSON.stringify({ chunk: Number(range.value) });
    ask(`${address()}/branch`, { method: "POST", body, headers: { "Content-Type": "application/json" } }, visit);
  });
  $("log-save").addEventListener("click", () => ask(`${address()}/log`, {}, async (answer) => told(download(await answer.blob(), "jsonl"))));
  $("log-open").addEventListener("click", () => $("log-file").click());
  $("log-file").addEventListener("change", () => {
    const body = new FormData();
    body.set("log", $("log-file").files[0]);
    $("log-file").value = "";
    ask("api/sessions", { method: "POST", body }, visit);
  });

  return { draw };
}
