// Records what the page shows, from one press to the next, into a file of the browser's own: mp4 where it can, else WebM.

import { $ } from "./dom.js";

const LONGEST_S = 60;
const KINDS = ["video/mp4;codecs=avc1.42E01E", "video/mp4", "video/webm;codecs=vp9", "video/webm"];

/** Wires the button up; `told` is called with what the visitor reads. Hidden where the browser cannot record. */
export function startRecording(video, told) {
  const button = $("record");
  const type = globalThis.MediaRecorder && KINDS.find((kind) => MediaRecorder.isTypeSupported(kind));
  button.hidden = !type || !video.captureStream;
  let recorder = null;
  let timer = null;

  function begin() {
    const parts = [];
    recorder = new MediaRecorder(video.captureStream(), { mimeType: type, videoBitsPerSecond: 6_000_000 });
    recorder.ondataavailable = ({ data }) => data.size && parts.push(data);
    recorder.onstop = () => save(parts);
    recorder.start();
    const startedAt = performance.now();
    draw();
    timer = setInterval(() => {
      const seconds = Math.floor((performance.now() - startedAt) / 1000);
      told(`Recording, ${seconds} s. Press again to save.`);
      if (seconds >= LONGEST_S) end();
    }, 1000);
  }

  function end() {
    clearInterval(timer);
    recorder.stop();
    recorder = null;
    draw();
  }

  function save(parts) {
    const link = document.createElement("a");
    const name = `streamdiff-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.${type.slice(6).split(";")[0]}`;
    link.href = URL.createObjectURL(new Blob(parts, { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    told(`Saved as ${name}.`);
  }

  function draw() {
    button.setAttribute("aria-pressed", String(recorder !== null));
    button.title = recorder ? "Save the recording (V)" : `Record up to ${LONGEST_S} seconds (V)`;
  }

  button.addEventListener("click", () => {
    if (recorder) end();
    else if (video.videoWidth) begin();
    else told("There is no picture to record yet.");
  });
  draw();
}
