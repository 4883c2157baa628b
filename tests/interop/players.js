// A page that plays a stream with somebody else's player: ?player=NAME&whep=ADDRESS#TOKEN.
// What `benchmarks.browser.probe` looks at is here too: the video, the status, `streamdiff.client.pc`.

import { WebRTCPlayer } from "@eyevinn/webrtc-player";
import { WHEPClient } from "whip-whep/whep.js";

const asked = new URLSearchParams(location.search);
const [address, token] = [asked.get("whep"), location.hash.slice(1)];
const video = document.getElementById("video");

function say(text) {
  document.getElementById("status-text").textContent = text;
}

// Eyevinn's player lets a POST that the browser kept back be nobody's business.
addEventListener("unhandledrejection", (event) => say(`failed: ${event.reason}`));

const players = {
  async "whip-whep"() {
    const pc = new RTCPeerConnection({ iceServers: [] });
    pc.addTransceiver("video", { direction: "recvonly" });
    pc.ontrack = ({ track }) => { video.srcObject = new MediaStream([track]); };
    const client = new WHEPClient();
    await client.view(pc, address, token);
    return { pc, stop: () => client.stop() };
  },

  async eyevinn() {
    const player = new WebRTCPlayer({ video, type: "whep", iceServers: [] });
    const failed = new Promise((_, reject) => {
      for (const event of ["initial-connection-failed", "connect-error"]) player.on(event, () => reject(event));
    });
    await player.load(new URL(address), `Bearer ${token}`);
    await Promise.race([failed, new Promise((resolve) => video.addEventListener("playing", resolve))]);
    return { pc: player.peer, stop: () => player.unload() };
  },
};

try {
  const { pc, stop } = await players[asked.get("player")]();
  globalThis.streamdiff = { client: { pc }, stop };
  say("playing");
} catch (error) {
  say(`failed: ${error}`);
}
