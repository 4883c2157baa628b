// Going back: a scrubber over what the server keeps of the stream, a branch of it, and its log as a file. And what is to
// come: the next changes of its timeline.

import { refusal } from "./client.js";
import { $, download, drawFieldError, setText } from "./dom.js";

/** `rewind` is called with the chunk to go back to, `told` with what the visitor reads. Returns what the page calls with
 *  the first and the latest chunk that are kept (null: none), and with the next changes of the timeline. */
export function startRewinding({ client, view, rewind, told }) {
  const range = $("rewind");
  let coming = []; // changes of the timeline, each with its chunk

  const secondsOf = (chunks) => Math.round((chunks * (view.chunkFrames ?? 12)) / (view.fps || 1));
  const address = () => `api/sessions/${encodeURIComponent(view.session)}`;

  function drawValue() {
    const seconds = secondsOf(range.max - range.value);
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

  /** The next changes of the timeline, and in how many seconds they come; without them those of before. */
  function drawComing(told) {
    const now = view.stats?.chunk ?? 0;
    const before = coming.length;
    coming = (told ?? coming).filter(({ chunk }) => chunk > now);
    if (!told && before && !coming.length) client.send({ type: "get" }); // what comes then
    const next = coming.map(({ chunk, prompt, controls, taps }) => {
      const held = Object.entries({ ...controls, ...taps }).map(([name, value]) => `${name} ${value}`);
      return `${[...(prompt ? [prompt] : []), ...held].join(", ")} in ${Math.max(1, secondsOf(chunk - now))} s`;
    });
    $("coming").hidden = !next.length;
    setText($("coming-text"), next.join(" · "));
  }

  /** Ask the server; what it refuses is said below. */
  async function ask(path, how, take) {
    drawFieldError("rewind", "");
    try {
      const headers = { ...how.headers, ...client.authorization };
      let answer = await fetch(path, { ...how, headers });
      // The token of a session opens no other; where the server has none, nobody needs one for that.
      if (answer.status === 401 && delete headers.Authorization) answer = await fetch(path, { ...how, headers });
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

  return { draw, drawComing };
}
