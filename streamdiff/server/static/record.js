// Saves the last seconds of the stream, which the server keeps while somebody watches, as a file of the visitor's own.

import { refusal } from "./client.js";
import { $, download } from "./dom.js";

const [WIDTH, HEIGHT] = [190, 130]; // of the menu, at most

/** Wires the button and its menu up. `address()` is that of the session's clip; `told` is called with what the visitor
 *  reads. */
export function startRecording({ address, authorization, told }) {
  const [button, menu] = [$("record"), $("record-menu")];
  menu.addEventListener("beforetoggle", () => {
    const { left, top, bottom } = button.getBoundingClientRect();
    const x = Math.min(left, innerWidth - WIDTH);
    menu.style.inset = top > HEIGHT ? `auto auto ${innerHeight - top + 6}px ${x}px` : `${bottom + 6}px auto auto ${x}px`;
  });
  for (const choice of menu.children) choice.addEventListener("click", () => save(choice.value));

  async function save(seconds) {
    told(`Saving the last ${seconds} seconds …`);
    try {
      const answer = await fetch(`${address()}?seconds=${seconds}`, { headers: authorization });
      if (!answer.ok) throw await refusal(answer);
      const video = await answer.blob();
      told(download(video, video.type.slice(6)));
    } catch (error) {
      told(error instanceof TypeError ? "The server cannot be reached." : error.message);
    }
  }
}
