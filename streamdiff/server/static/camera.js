// Video in: the camera, or a screen, sent over WHIP; the server fits it, and the stream starts from it.

import { refusal, sendCandidate } from "./client.js";
import { $, setText } from "./dom.js";

const LEAST = { width: 320, height: 240 };
const SAID = {
  NotAllowedError: "The browser was not allowed to show it. Allow it beside the page's address, and try again.",
  NotFoundError: "There is no camera.",
  NotReadableError: "Another program has the camera.",
};

/** What a camera is asked for: no more than the picture of `width` and `height` can show, as each pixel is encoded and
 *  decoded on the way. */
function wanted({ width, height }) {
  const ideal = (name, pixels) => ({ ideal: Math.max(LEAST[name], pixels) });
  return { width: ideal("width", width), height: ideal("height", height), frameRate: { ideal: 30 } };
}

/** Wires the card up. `address()` is the session's WHIP address, `headers` what a request shows the server, `strength`
 *  is called with a value to set while video goes in, `iceServers` asks for the server's STUN and TURN servers, `size()`
 *  is that of the session's picture. */
export function startCamera({ address, headers, strength, iceServers, size }) {
  const sending = { pc: null, media: null, resource: null, kind: "" };
  let begins = false;

  async function begin(kind) {
    if (begins) return; // clicked again while the browser asks
    begins = true;
    try {
      await end();
      drawInputError("");
      if (!navigator.mediaDevices) {
        drawInputError("Browsers give a camera to pages over https alone, or on this machine itself (localhost).");
        return;
      }
      await send(kind);
    } catch (error) {
      if (!sending.kind) return; // ended meanwhile, which has said why
      await end();
      drawInputError(SAID[error.name] ?? error.message);
    } finally {
      begins = false;
    }
  }

  /** Connects; returns without a word where `end` was called meanwhile, which has closed what there was by then. */
  async function send(kind) {
    sending.kind = kind;
    const video = wanted(size());
    const ended = () => !sending.kind;
    const media = kind === "screen"
      ? await navigator.mediaDevices.getDisplayMedia({ video })
      : await navigator.mediaDevices.getUserMedia({ video });
    if (ended()) return stop(media);
    sending.media = media;
    const [track] = media.getVideoTracks();
    track.contentHint = "motion";
    track.onended = end; // the visitor has stopped it in the browser's own bar
    const servers = await iceServers();
    if (ended()) return;
    const pc = new RTCPeerConnection({ iceServers: servers });
    sending.pc = pc;
    pc.addTransceiver(track, { direction: "sendonly", streams: [media] });
    pc.onconnectionstatechange = () => {
      if (sending.pc === pc && ["failed", "closed"].includes(pc.connectionState)) end("The connection that the video went over has ended.");
    };
    const found = []; // candidates, before the server has named the connection that they are for
    const tell = ({ candidate }) => {
      if (candidate?.candidate) found.push(candidate);
      if (sending.pc === pc && sending.resource) for (const each of found.splice(0)) sendCandidate(sending.resource, each, headers);
    };
    if (servers.length) pc.onicecandidate = tell;
    await pc.setLocalDescription();
    if (ended()) return;
    const url = new URL(address(), document.baseURI);
    url.searchParams.set("strength", $("strength").value);
    const response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/sdp", ...headers }, body: pc.localDescription.sdp });
    if (!response.ok) throw await refusal(response);
    const resource = new URL(response.headers.get("Location"), url);
    if (ended()) return giveUp(resource);
    sending.resource = resource;
    tell({});
    const answer = await response.text();
    if (ended()) return;
    await pc.setRemoteDescription({ type: "answer", sdp: answer });
    if (ended()) return;
    const preview = $("camera-preview");
    preview.srcObject = media;
    preview.classList.toggle("mirrored", kind === "camera"); // as in a mirror; what is sent is not
    preview.hidden = false;
    preview.play().catch(() => {});
    draw();
  }

  async function end(why) {
    const { pc, media, resource } = sending;
    Object.assign(sending, { pc: null, media: null, resource: null, kind: "" });
    if (media) stop(media);
    $("camera-preview").hidden = true;
    $("camera-preview").srcObject = null;
    draw();
    if (typeof why === "string") drawInputError(why);
    if (resource) await giveUp(resource);
    pc?.close(); // after it is given up by name: a server that saw it end would answer 404
  }

  const giveUp = (resource) => fetch(resource, { method: "DELETE", headers, keepalive: true }).catch(() => {});

  function draw() {
    $("camera-stop").hidden = !sending.media;
    for (const kind of ["camera", "screen"]) $(`camera-${kind}`).setAttribute("aria-pressed", String(sending.kind === kind));
  }

  $("camera-camera").addEventListener("click", () => begin("camera"));
  $("camera-screen").addEventListener("click", () => begin("screen"));
  $("camera-screen").hidden = !navigator.mediaDevices?.getDisplayMedia;
  $("camera-stop").addEventListener("click", () => end());
  $("strength").addEventListener("change", () => $("camera-form").dataset.fed === "true" && strength($("strength").valueAsNumber));
  $("strength").addEventListener("input", drawStrength);
  $("camera-form").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("pagehide", () => end());
  return { ended: () => sending.resource && end("The server takes no more of the video.") };
}

function stop(media) {
  for (const track of media.getTracks()) track.stop();
}

function drawStrength() {
  setText($("strength-value"), $("strength").valueAsNumber.toFixed(2));
}

/** Says whether video goes in, from whom, and at which strength. */
export function drawInput(input) {
  $("camera-form").dataset.fed = String(input !== null);
  if (input && document.activeElement !== $("strength")) $("strength").value = input.strength;
  drawStrength();
  setText($("camera-state"), input
    ? "The stream follows the video; the prompt says what becomes of it."
    : "Send your camera or a screen, and the stream follows it as the prompt says.");
}

/** Says what is wrong with the video that goes in, or its strength; "" takes it back. */
export function drawInputError(text) {
  setText($("camera-error"), text);
}
