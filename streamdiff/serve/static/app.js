// The page: draws the state of the stream and passes on what the visitor asks for.

import { StreamClient } from "./client.js";

const $ = (id) => document.getElementById(id);
const video = $("video");
// `?session=` and `?codec=` of the page's address are the server's business.
// In the fragment, which is never sent to a server or kept in its log.
const token = new URLSearchParams(location.hash.slice(1)).get("token");
const client = new StreamClient(`whep${location.search}`, token);
const view = { phase: "connecting", paused: false, seed: 0, prompt: "", frameSeen: false, notice: "", engine: "running" };
const asked = new Map(); // id of a request -> { kind, at }
const last = { frames: 0, at: 0, bytes: 0 };

globalThis.streamdiff = { client, view };

// ---- drawing --------------------------------------------------------------------------------------------------------

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function drawStatus() {
  const live = view.phase === "live" && view.frameSeen;
  const phase = live ? (view.paused ? "paused" : "live") : view.phase === "error" ? "error" : "connecting";
  const words = { live: "Live", paused: "Paused", error: "Stopped", connecting: view.phase === "waiting" ? "Reconnecting" : "Connecting" };
  $("status").dataset.phase = phase;
  const again = phase !== "error" && view.engine === "restarting";
  setText($("status-text"), again ? "Restarting" : words[phase]);
  $("veil").hidden = live;
  $("paused-badge").hidden = !(live && view.paused);
  $("pause").setAttribute("aria-pressed", String(view.paused));
  setText($("pause-text"), view.paused ? "Resume" : "Pause");
  for (const id of ["pause", "reset", "seed-apply"]) $(id).disabled = !client.connected || view.engine !== "running";
}

function drawVeil(text, { busy = true, button = false } = {}) {
  setText($("veil-text"), text);
  $("spinner").hidden = !busy;
  $("veil-button").hidden = !button;
}

function drawState(state) {
  view.paused = state.paused;
  view.prompt = state.prompt;
  view.fps = state.fps;
  setText($("playing"), state.text || state.prompt);
  video.setAttribute("aria-label", `Live video: ${state.text || state.prompt}`);
  $("screen").style.aspectRatio = `${state.width} / ${state.height}`;
  if (document.activeElement !== $("seed") && state.seed !== view.seed) $("seed").value = state.seed;
  view.seed = state.seed;
  view.engine = state.engine;
  drawNotice(state.engine === "restarting" ? `The engine is being started again: ${state.engine_reason}` : state.notice);
  for (const chip of $("chips").children) chip.setAttribute("aria-current", String(chip.textContent === state.prompt));
  drawStatus();
}

function drawNotice(text) {
  if (text === view.notice) return;
  view.notice = text;
  $("notice").hidden = !text;
  setText($("notice-text"), text);
}

function drawReceipt(text, stage = "") {
  $("receipt").dataset.stage = stage;
  setText($("receipt"), text);
}

function drawFieldError(field, text) {
  const input = $(field);
  setText($(`${field}-error`), text);
  if (text) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}

function number(id, value, digits, low = false) {
  const node = $(id);
  setText(node, value == null || Number.isNaN(value) ? "–" : value.toFixed(digits));
  node.classList.toggle("low", low);
}

function drawFacts(facts) {
  const wanted = Object.entries(facts).filter(([, value]) => value != null);
  $("facts").replaceChildren(
    ...wanted.flatMap(([name, value]) => {
      const [term, definition] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      definition.textContent = value;
      return [term, definition];
    }),
  );
}

// ---- what the server says -------------------------------------------------------------------------------------------

const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
const quoted = (text) => (text.length > 60 ? `“${text.slice(0, 57)}…”` : `“${text}”`);

function onReceipt(receipt) {
  const request = asked.get(receipt.id);
  if (!request) return;
  const lag = performance.now() - request.at;
  if (receipt.text) request.text = receipt.text; // what the model was given, which may differ from what was typed
  if (receipt.stage === "accepted" && (request.kind === "prompt" || request.kind === "reset")) {
    drawReceipt(view.paused ? "Taken. It shows when you resume." : "Taken. It is being made now.", "accepted");
  } else if (receipt.stage === "shown") {
    number("n-lag", lag / 1000, 2);
    view.lagMs = lag;
    drawReceipt(request.kind === "reset" ? `Started over after ${seconds(lag)}.` : `${quoted(request.text)} is on screen, after ${seconds(lag)}.`, "shown");
  } else if (receipt.stage === "superseded") {
    drawReceipt("A newer prompt took its place.", "superseded");
  } else if (receipt.stage === "refused") {
    onRefused(request.kind, receipt.field, receipt.reason);
  }
  if (["shown", "superseded", "refused"].includes(receipt.stage)) asked.delete(receipt.id);
}

function onRefused(kind, field, reason) {
  drawReceipt("");
  drawFieldError(field === "seed" || kind === "reset" ? "seed" : "prompt", reason);
}

const handlers = {
  hello: ({ state }) => {
    describe().catch(() => {}); // the examples are a comfort; without them the page works
    drawState(state);
  },
  state: drawState,
  receipt: onReceipt,
  stats: (stats) => {
    view.stats = stats;
    number("n-made", stats.made_fps, 0, !view.paused && stats.made_fps < 0.85 * view.fps);
    number("n-chunk", stats.chunk_ms == null ? null : stats.chunk_ms / 1000, 2);
  },
  error: (error) => onRefused(asked.get(error.id)?.kind, error.field, error.message),
  engine_ended: ({ message }) => {
    view.phase = "error";
    drawVeil(message, { busy: false, button: true });
    drawStatus();
  },
};

client.addEventListener("message", ({ detail }) => handlers[detail.type]?.(detail));

client.addEventListener("status", ({ detail }) => {
  const wasError = view.phase === "error" && view.frameSeen;
  view.phase = detail.phase;
  if (detail.phase !== "live") view.frameSeen = false;
  if (detail.phase === "connecting" && !wasError) drawVeil(detail.attempt ? "Connecting again" : "Connecting to the stream");
  if (detail.phase === "waiting") {
    drawVeil(`${detail.message} Trying again in ${Math.max(1, Math.round(detail.waitMs / 1000))} s.`, { button: true });
  }
  if (detail.phase === "error") drawVeil(detail.message, { busy: false });
  if (detail.phase === "live") drawVeil("Waiting for the first frame");
  drawStatus();
});

client.addEventListener("stream", ({ detail }) => {
  video.srcObject = detail.stream;
  const offeredAt = client.offeredAt;
  const seen = () => onFirstFrame(offeredAt);
  if ("requestVideoFrameCallback" in video) video.requestVideoFrameCallback(seen);
  else video.addEventListener("loadeddata", seen, { once: true });
  video.play().catch((error) => {
    if (error.name === "NotAllowedError") drawVeil("This browser wants a press before it plays.", { busy: false, button: true });
  });
});

function onFirstFrame(offeredAt) {
  if (offeredAt !== client.offeredAt) return;
  view.frameSeen = true;
  view.firstFrameMs = performance.now() - offeredAt;
  number("n-first", view.firstFrameMs / 1000, 2);
  drawStatus();
}

// ---- what the visitor asks for --------------------------------------------------------------------------------------

function ask(kind, body = {}) {
  const id = client.send({ type: kind, ...body });
  if (id === null) {
    drawReceipt("There is no connection right now; try again in a moment.");
    return;
  }
  asked.set(id, { kind, at: performance.now(), text: body.prompt ?? "" });
  if (kind === "prompt" || kind === "reset") drawReceipt("Sent …");
}

function sendPrompt(text) {
  const prompt = text.trim();
  drawFieldError("prompt", prompt ? "" : "Write what you want to see first.");
  if (prompt) ask("prompt", { prompt });
  else $("prompt").focus();
}

function readSeed() {
  const seed = $("seed").valueAsNumber;
  const usable = Number.isInteger(seed) && seed >= 0 && seed <= 2147483647;
  drawFieldError("seed", usable ? "" : "A seed is a whole number from 0 to 2,147,483,647.");
  return usable ? seed : null;
}

function startOver() {
  const seed = readSeed();
  if (seed !== null) ask("reset", { seed });
}

function togglePause() {
  ask(view.paused ? "resume" : "pause");
}

function toggleFullscreen() {
  if (document.fullscreenElement) document.exitFullscreen();
  else $("screen").requestFullscreen?.();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sendPrompt($("prompt").value);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    sendPrompt(event.target.value);
  } else if (event.key === "Escape") {
    event.target.blur();
  }
});
$("prompt").addEventListener("input", () => drawFieldError("prompt", ""));

$("seed-form").addEventListener("submit", (event) => {
  event.preventDefault();
  startOver();
});
$("seed").addEventListener("input", readSeed);
$("dice").addEventListener("click", () => {
  $("seed").value = Math.floor(Math.random() * 2147483648);
  startOver();
});
$("pause").addEventListener("click", togglePause);
$("reset").addEventListener("click", () => ask("reset"));
$("fullscreen").addEventListener("click", toggleFullscreen);
$("fullscreen").hidden = !document.fullscreenEnabled;
$("veil-button").addEventListener("click", () => {
  video.play().catch(() => {});
  client.retryNow();
});

document.addEventListener("keydown", (event) => {
  const busy = event.target.closest("input, textarea, button, summary, a, select");
  if (busy || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const act = { "/": () => $("prompt").focus(), " ": togglePause, k: togglePause, r: () => ask("reset"), f: toggleFullscreen }[event.key.toLowerCase()];
  if (!act) return;
  event.preventDefault();
  act();
});

// ---- live numbers ---------------------------------------------------------------------------------------------------

async function measure() {
  const pc = client.pc;
  if (!pc || pc.connectionState !== "connected") return;
  const reports = [...(await pc.getStats()).values()];
  const inbound = reports.find((report) => report.type === "inbound-rtp" && report.kind === "video");
  if (!inbound || pc !== client.pc) return;
  const codec = reports.find((report) => report.id === inbound.codecId)?.mimeType?.replace("video/", "");
  const pair = reports.find((report) => report.type === "candidate-pair" && report.nominated);
  const now = performance.now();
  const passedS = (now - last.at) / 1000;
  const same = inbound.framesDecoded >= last.frames && last.at > 0;
  const fps = same ? (inbound.framesDecoded - last.frames) / passedS : null;
  const kbps = same ? ((inbound.bytesReceived - last.bytes) * 8) / passedS / 1000 : null;
  Object.assign(last, { frames: inbound.framesDecoded, bytes: inbound.bytesReceived, at: now });
  client.noteDecoded(inbound.framesDecoded);
  view.decodedFps = fps;
  number("n-shown", view.paused ? 0 : fps, 0, !view.paused && fps != null && view.stats?.shown_fps > fps / 0.85);
  number("n-dropped", inbound.framesDropped ?? 0, 0);
  if ($("facts").closest("details").open) drawMore(inbound, codec, pair, kbps);
}

function drawMore(inbound, codec, pair, kbps) {
  const emitted = inbound.jitterBufferEmittedCount;
  const delayMs = emitted ? (1000 * inbound.jitterBufferDelay) / emitted : null;
  drawFacts({
    Codec: codec,
    Size: inbound.frameWidth ? `${inbound.frameWidth} × ${inbound.frameHeight}` : null,
    "Bit rate": kbps == null ? null : `${Math.round(kbps)} kbit/s`,
    "Round trip": pair?.currentRoundTripTime == null ? null : `${Math.round(1000 * pair.currentRoundTripTime)} ms`,
    "Jitter buffer": delayMs == null ? null : `${delayMs.toFixed(0)} ms`,
    Freezes: inbound.freezeCount,
    "Packets lost": inbound.packetsLost,
    Network: view.stats?.network,
    "Frame number": view.stats?.frame,
    "Made ahead": view.stats == null ? null : `${view.stats.buffered} frames`,
    Repeated: view.stats?.repeated,
  });
}

setInterval(() => document.visibilityState === "visible" && measure(), 1000);

// ---- life -----------------------------------------------------------------------------------------------------------

async function describe() {
  const { engine } = await (await fetch(`api/state${location.search}`, { headers: client.authorization })).json();
  $("chips").replaceChildren(
    ...engine.examples.map((example) => {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.className = "chip";
      chip.textContent = example;
      chip.setAttribute("aria-current", String(example === view.prompt));
      chip.addEventListener("click", () => {
        $("prompt").value = example;
        sendPrompt(example);
      });
      return chip;
    }),
  );
  setText($("vocabulary-text"), engine.vocabulary.replaceAll("; ", "\n"));
  $("vocabulary").hidden = !engine.vocabulary;
}

addEventListener("pagehide", () => client.stop());
addEventListener("pageshow", (event) => event.persisted && client.start());
addEventListener("online", () => client.retryNow());

drawStatus();
client.start();
