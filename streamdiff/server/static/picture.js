// The start picture: dropped, pasted, chosen, or the frame on show; sent as it is, and fitted by the server.

import { $, setText } from "./dom.js";

const MAX_BYTES = 10 * 1024 * 1024;

/** Wires the card up. `send(file, fit)` starts a stream with a picture, null: with none, and resolves when the server has
 *  taken it; `frame()` resolves with the frame on show as a file, or null; `say(text)` says what is wrong. */
export function startPictures({ steers, send, frame, say }) {
  const card = $("picture-form");

  async function use(file) {
    say("");
    if (!file) return;
    if (file.size > MAX_BYTES) {
      say(`That file has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${MAX_BYTES / 2 ** 20} are read.`);
      return;
    }
    await put(file);
  }

  async function put(file) {
    card.setAttribute("aria-busy", "true");
    try {
      await send(file, $("picture-fit").value);
    } catch (error) {
      say(error.message);
    } finally {
      card.removeAttribute("aria-busy");
      $("picture").value = "";
    }
  }

  const pictureOf = (transfer) => [...(transfer?.files ?? [])].find((file) => file.type.startsWith("image/"));

  $("picture").addEventListener("change", (event) => use(event.target.files[0]));
  $("picture-choose").addEventListener("click", () => $("picture").click());
  $("picture-frame").addEventListener("click", async () => {
    const file = await frame();
    if (file) await use(file);
    else say("There is no frame on screen yet.");
  });
  $("picture-none").addEventListener("click", () => {
    say("");
    put(null);
  });
  card.addEventListener("submit", (event) => event.preventDefault());

  // Anywhere on the page: a picture that misses the card would otherwise replace the page.
  let inside = 0;
  const mark = (change) => {
    inside = Math.max(0, inside + change);
    document.body.classList.toggle("dropping", inside > 0);
  };
  const carries = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => carries(event) && steers() && mark(1));
  addEventListener("dragleave", (event) => carries(event) && mark(-1));
  addEventListener("dragover", (event) => carries(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    mark(-inside);
    if (!steers()) return;
    const file = pictureOf(event.dataTransfer);
    if (file) use(file);
    else say("Not a picture: drop a JPEG, PNG, WebP or AVIF file.");
  });
  addEventListener("paste", (event) => {
    const file = steers() && pictureOf(event.clipboardData);
    // Text goes where it was pasted; spreadsheets and text processors put a picture of it beside it.
    const typed = event.clipboardData?.types.includes("text/plain") && event.target.closest?.("textarea, input");
    if (!file || typed) return;
    event.preventDefault();
    use(file);
  });
}

/** Says whether the stream begins with a picture, and lets it be taken away where the model can do without. */
export function drawPicture(begins, needed) {
  $("picture-none").hidden = !begins || needed;
  setText($("picture-state"), begins ? "The stream begins with your picture." : "Drop or paste a picture anywhere; the stream continues from it.");
}

/** A file as a `data:` address, in which JSON carries it. */
export function dataOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file cannot be read."));
    reader.readAsDataURL(file);
  });
}

/** The frame that a video shows, as a PNG file; null before the first. */
export async function frameOf(video) {
  if (!video.videoWidth) return null;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
