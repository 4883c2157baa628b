// The viewer page that the server serves at `/`: plays the video, draws the session's state, sends control messages.

import { drawInput, drawInputError, startCamera } from "./camera.js";
import { refusal, StreamClient } from "./client.js";
import { $, chosen, drawFieldError, number, remember, setText } from "./dom.js";
import { startFolding } from "./fold.js";
import { drawLoras, drawScale, startLoras } from "./lora.js";
import { dataOf, drawPicture, frameOf, startPictures } from "./picture.js";
import { startRecording } from "./record.js";
import { startRewinding } from "./rewind.js";
import { openOwn, openShared, share } from "./share.js";
import { drawStats, startMeasuring } from "./stats.js";
import { drawKeys, startSteering } from "./steer.js";
import { chip, drawSuggestions, startSuggestions } from "./suggestions.js";
import { startWheel } from "./wheel.js";

const video = $("video");
const token = tokenOf(location.hash);
// `?session=` and `?codec=` of the page's address are the server's business.
const client = new StreamClient(`whep${location.search}`, token);
const view = { phase: "connecting", size: { width: 0, height: 0 }, steers: true, paused: false, seed: 0, fps: 0, askedFps: 0, steps: 0, prompt: "", frameSeen: false, refused: false, notice: "", engine: "running", needsPicture: false, awaitsPicture: false };
const NOTICE_MS = 10000;
const FADE_MS = 3000;
const earlier = { prompts: [], at: 0 }; // what was sent from this page, for the arrow keys
const asked = new Map(); // id of a request -> { kind, at }

globalThis.streamdiff = { client, view };

// ---- drawing --------------------------------------------------------------------------------------------------------

function drawStatus() {
  const live = view.phase === "live" && view.frameSeen && !view.refused;
  const held = view.phase === "live" && view.paused && !view.refused;
  const phase = live || held ? (view.paused ? "paused" : "live") : view.phase === "error" ? "error" : "connecting";
  const words = { live: "Live", paused: "Paused", error: "Stopped", connecting: view.phase === "waiting" ? "Reconnecting" : "Connecting" };
  $("status").dataset.phase = phase;
  const again = phase !== "error" && view.engine === "restarting";
  setText($("status-text"), again ? "Restarting" : view.awaitsPicture ? "Waiting for a picture" : words[phase]);
  $("veil").hidden = live;
  if (view.phase === "live" && !live) drawWait();
  $("paused-badge").hidden = !(live && view.paused);
  $("pause").setAttribute("aria-pressed", String(view.paused));
  setText($("pause-text"), view.paused ? "Resume" : "Pause");
  drawControls();
}

/** Who may only watch sees every control, disabled, and why. Of the others a few wait for the connection and the engine. */
function drawControls() {
  const why = view.steers ? "" : view.wheelSays ? view.wheelSays : token
    ? "The token in this page's address lets you watch. Steering takes the control token."
    : "You may watch. Steering takes the control token, at the end of this page's address: #token=…";
  $("readonly").hidden = view.steers || Boolean(view.wheelSays); // in a line of its own
  document.body.classList.toggle("watching", !view.steers);
  setText($("readonly-text"), why);
  const obeyed = client.connected && view.engine === "running";
  for (const control of document.querySelectorAll("[data-steers]")) {
    const ready = obeyed || (view.awaitsPicture && control.closest("#picture-form"));
    control.disabled = !view.steers || (control.dataset.steers === "connected" && !ready);
    if (why) control.title = why;
    else if (control.title !== control.dataset.title) control.title = control.dataset.title ?? "";
  }
}

/** What a new prompt can do to the past of this session, the model's own way first, and what the chosen one does. */
function drawSwitches(known) {
  const select = $("switch");
  $("switch-advanced").hidden = !["recache", "recache-causal", "flush"].some((each) => known.includes(each));
  for (const option of select.options) option.hidden = option.disabled = !known.includes(option.value);
  if (known[0] !== view.switch || !known.includes(select.value)) select.value = view.switch = known[0];
  drawSwitchHelp();
}

function drawSwitchHelp() {
  const select = $("switch");
  const help = select.selectedOptions[0].dataset.help;
  setText($("switch-help"), help);
  select.dataset.title = help;
  if (view.steers) select.title = help;
}

/** The numbers of steps that the model has; where there is one, there is nothing to choose. */
function drawSteps({ steps: made, asked_steps: steps, steps_known: known }) {
  const select = $("steps");
  $("steps-form").hidden = known.length < 2;
  if ([...select.options].map((option) => option.value).join() !== known.join()) {
    select.replaceChildren(...known.map((number) => new Option(number, number)));
    select.value = steps;
  }
  if (steps !== view.steps) select.value = steps;
  view.steps = steps;
  setText($("steps-help"), made < steps ? `Server busy: using ${made} steps.` : "Fewer steps are faster, more are finer.");
}

function drawVeil(text, { busy = true, button = false, says = "Try again now" } = {}) {
  setText($("veil-text"), text);
  setText($("veil-button"), says);
  $("spinner").hidden = !busy;
  $("veil-button").hidden = !button;
}

function drawState(state) {
  view.paused = state.paused;
  view.prompt = state.prompt;
  view.text = state.text;
  const typing = document.activeElement === $("fps") && $("fps").valueAsNumber !== view.askedFps;
  if (state.asked_fps !== view.askedFps && !typing) $("fps").value = state.asked_fps;
  view.fps = state.fps;
  view.askedFps = state.asked_fps;
  const slowed = state.fps < state.asked_fps ? `Server busy: playing ${state.fps}. ` : "";
  setText($("fps-native"), `${slowed}The model's own rate: ${state.native_fps}`);
  setText($("playing-label"), state.session === "default" ? "Now playing" : `Now playing in session ${state.session}`);
  drawSwitches(state.switches);
  drawSteps(state);
  drawLoras(state);
  setText($("playing"), state.text || state.prompt);
  $("playing").title = state.text || state.prompt;
  video.setAttribute("aria-label", `Live video: ${state.text || state.prompt}`);
  view.size = { width: state.width, height: state.height };
  document.documentElement.style.setProperty("--ratio", state.width / state.height);
  if (document.activeElement !== $("seed") && state.seed !== view.seed) $("seed").value = state.seed;
  view.seed = state.seed;
  view.kvContext = state.kv_context;
  view.engine = state.engine;
  view.session = state.session;
  view.image = state.image;
  view.more = state.image || state.input !== null || state.features.length > 0;
  drawPicture(state.image, view.needsPicture);
  drawInput(state.input);
  if (!state.input) camera.ended();
  const away = { restarting: "The engine is restarting", waiting: "The session waits for memory" }[state.engine];
  drawNotice(away ? `${away}: ${state.engine_reason}` : state.notice);
  for (const chip of $("chips").children) chip.setAttribute("aria-current", String(chip.textContent === state.prompt));
  drawSuggestions(state.text, suggest);
  view.controls = state.controls;
  past.draw(state.kept);
  past.drawComing(state.timeline);
  wheel.draw(state.wheel);
}

function drawNotice(text) {
  if (text === view.notice) return;
  view.notice = text;
  clearTimeout(view.noticeTimer);
  $("notice").hidden = !text;
  setText($("notice-text"), text);
  if (view.engine === "running") view.noticeTimer = setTimeout(() => ($("notice").hidden = true), NOTICE_MS);
}

function drawReceipt(text, stage = "") {
  $("receipt").dataset.stage = stage;
  setText($("receipt"), text);
}

// ---- what the server says -------------------------------------------------------------------------------------------

const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
const AT_ONCE = ["pause", "resume", "fps"]; // nothing has to be made for these: accepted is all that comes
const MADE = ["prompt", "reset", "rewind", "steps", "strength", "lora"];
const PAST = { recache: ", past recached", "recache-causal": ", past recached", flush: ", past flushed", reset: ", restarted" };

function onReceipt(receipt) {
  if (receipt.kind === "control") steering.receipt(receipt);
  const request = asked.get(receipt.id);
  if (!request) return;
  const lag = performance.now() - request.at;
  if (AT_ONCE.includes(request.kind) && receipt.stage === "accepted") {
    asked.delete(receipt.id);
    if (request.kind === "fps") drawReceipt(`Plays at ${receipt.fps ?? request.fps} frames per second.`, "shown");
  } else if (receipt.stage === "accepted" && MADE.includes(request.kind)) {
    drawReceipt(view.paused ? "Accepted. It shows when you resume." : "Accepted. The picture changes in a moment.", "accepted");
  } else if (receipt.stage === "shown" && request.kind === "steps") {
    drawReceipt(`Chunks have ${receipt.steps ?? request.steps} steps now, after ${seconds(lag)}.`, "shown");
  } else if (receipt.stage === "shown" && ["strength", "lora"].includes(request.kind)) {
    drawReceipt(`The ${request.kind === "lora" ? "LoRA" : "strength"} is on screen, after ${seconds(lag)}.`, "shown");
  } else if (receipt.stage === "shown") {
    number("n-lag", lag / 1000, 2);
    view.lagMs = lag;
    drawReceipt(request.kind === "rewind" ? `Gone back after ${seconds(lag)}.` : request.kind === "reset" ? `Restarted after ${seconds(lag)}.` : `On screen after ${seconds(lag)}${PAST[receipt.switch] ?? ""}.`, "shown");
  } else if (receipt.stage === "superseded") {
    drawReceipt("A newer request took its place.", "superseded");
  } else if (receipt.stage === "refused") {
    onRefused(request.kind, receipt.field, receipt.reason);
  }
  if (["shown", "superseded", "refused"].includes(receipt.stage)) asked.delete(receipt.id);
}

function onRefused(kind, field, reason) {
  drawReceipt("");
  if (kind === "strength") {
    drawInputError(reason);
    return;
  }
  const fields = { seed: "seed", fps: "fps", switch: "switch", steps: "steps", chunk: "rewind" };
  const place = fields[field] ?? { reset: "seed", steps: "steps", rewind: "rewind", lora: "lora" }[kind] ?? "prompt";
  drawFieldError(place, reason);
  if (place === "lora") drawScale();
  if (place === "steps") $("steps").value = view.steps;
}

const handlers = {
  hello: (hello) => {
    wheel.hello(hello);
    describe().catch(() => {}); // the examples are a comfort; without them the page works
    drawState(hello.state);
  },
  state: drawState,
  wheel: (told) => wheel.draw(told),
  kept: ({ kept }) => past.draw(kept),
  rewound: () => drawReceipt("The stream goes on from an earlier moment.", "accepted"),
  receipt: onReceipt,
  stats: (stats) => {
    drawStats(stats, view);
    past.drawComing();
  },
  error: (error) => {
    onRefused(asked.get(error.id)?.kind, error.field, error.message);
    asked.delete(error.id);
  },
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
  if (detail.phase !== "live") {
    view.frameSeen = view.refused = false;
    for (const figure of ["n-shown", "n-made"]) number(figure, null, 0);
    if (asked.size) drawReceipt("The connection was lost before the answer came.");
    asked.clear(); // receipts go to the connection that asked
  }
  if (detail.phase === "connecting" && !wasError) drawVeil(detail.attempt ? "Connecting again" : "Connecting to the stream");
  if (detail.phase === "waiting") {
    drawVeil(`${detail.message} Trying again in ${Math.max(1, Math.round(detail.waitMs / 1000))} s.`, { button: true });
  }
  if (detail.phase === "error") drawVeil(detail.status === 401 ? needsToken() : detail.message, { busy: false, button: detail.again });
  if (detail.status === 404 && !new URLSearchParams(location.search).has("session")) awaitPicture();
  drawStatus();
});

client.addEventListener("stream", ({ detail }) => {
  video.srcObject = detail.stream;
  const offeredAt = client.offeredAt;
  const seen = () => onFirstFrame(offeredAt);
  if ("requestVideoFrameCallback" in video) video.requestVideoFrameCallback(seen);
  else video.addEventListener("loadeddata", seen, { once: true });
  video.play().catch((error) => {
    if (error.name !== "NotAllowedError") return;
    view.refused = true;
    drawStatus();
  });
});
video.addEventListener("playing", () => {
  view.refused = false;
  drawStatus();
});

/** Why there is no picture yet, though the connection stands or is about to. */
function drawWait() {
  if (view.refused) drawVeil("Press to play.", { busy: false, button: true });
  else if (view.paused) drawVeil("The stream is paused.", { busy: false });
  else drawVeil("Waiting for the first frame");
}

function needsToken() {
  return token
    ? "The token in this page's address is not one of this stream's."
    : "Watching this stream takes a token, at the end of this page's address: #token=…";
}

/** Where there is no session yet, as this server's world begins with a picture: have one chosen, and say what keys do. */
async function awaitPicture() {
  const answer = await fetch("api/sessions", { headers: client.authorization }).catch(() => null);
  const { capacity } = answer?.ok ? await answer.json() : {};
  if (!capacity?.begins_with_picture) return;
  view.awaitsPicture = true;
  drawKeys(capacity.controls);
  drawAwaited("");
  drawStatus();
}

function drawAwaited(fault) {
  const says = "Choose a picture";
  drawVeil(`${fault} This world begins with a picture: choose one, or drop or paste it here.`.trim(), { busy: false, button: true, says });
}

function onFirstFrame(offeredAt) {
  if (offeredAt !== client.offeredAt) return;
  view.frameSeen = true;
  view.firstFrameMs = performance.now() - offeredAt;
  view.firstFrameAt = performance.timeOrigin + performance.now();
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
  asked.set(id, { kind, at: performance.now(), fps: body.fps, steps: body.steps });
  if (MADE.includes(kind)) drawReceipt("Sent …");
}

function sendPrompt(text) {
  const prompt = text.trim();
  drawFieldError("prompt", prompt ? "" : "Write what you want to see first.");
  drawFieldError("switch", "");
  if (!prompt) {
    $("prompt").focus();
    return;
  }
  if (view.awaitsPicture) {
    drawReceipt("The stream begins with this prompt, and a picture: choose one.");
    return;
  }
  ask("prompt", { prompt, switch: $("switch").value });
  if (earlier.prompts.at(-1) !== prompt) earlier.prompts.push(prompt);
  earlier.at = earlier.prompts.length;
}

/** The prompt before or after the one in the box, of those that were sent. */
function recall(step) {
  const at = Math.min(Math.max(earlier.at + step, 0), earlier.prompts.length - 1);
  if (at < 0) return;
  earlier.at = at;
  $("prompt").value = earlier.prompts[at];
  $("prompt").select();
}

/** A prompt that the page offers, as if it had been typed. */
function suggest(prompt) {
  $("prompt").value = prompt;
  sendPrompt(prompt);
}

const wholeSelected = ({ selectionStart, selectionEnd, value }) => selectionStart === 0 && selectionEnd === value.length;

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

function changeFps() {
  const fps = $("fps").valueAsNumber;
  const usable = fps >= 1 && fps <= 120;
  drawFieldError("fps", usable ? "" : "Frames per second: a number from 1 to 120.");
  if (usable && fps !== view.askedFps) ask("fps", { fps });
}

function changeSteps() {
  drawFieldError("steps", "");
  ask("steps", { steps: Number($("steps").value) });
}

/** A picture is too large for the control channel, so it goes over HTTP; the state says when it shows. */
async function beginWith(file, fit) {
  const at = performance.now();
  drawReceipt("Sending the picture …");
  if (view.awaitsPicture) {
    const prompt = $("prompt").value.trim() || undefined;
    await openOwn(client.authorization, { image: await dataOf(file), fit, ...(prompt && { prompt }) }).finally(() => drawReceipt(""));
    return;
  }
  const form = new FormData();
  form.append("image", file ?? "");
  if (file) form.append("fit", fit);
  const address = `api/sessions/${encodeURIComponent(view.session)}`;
  const answer = await fetch(address, { method: "PATCH", body: form, headers: client.authorization }).catch(() => {
    drawReceipt("");
    throw new Error("The server cannot be reached.");
  });
  if (answer.ok) {
    drawReceipt(`Restarted with the picture after ${seconds(performance.now() - at)}.`, "accepted");
    return;
  }
  drawReceipt("");
  throw await refusal(answer);
}

function togglePause() {
  ask(view.paused ? "resume" : "pause");
}

async function shareLink() {
  const receipt = await share(
    { prompt: view.text || view.prompt, seed: view.seed, steps: view.steps, fps: view.askedFps, kv_context: view.kvContext },
    view.more ? " The picture or video of this stream is not in the link." : "",
  );
  if (receipt) drawReceipt(receipt);
}

function toggleFullscreen() {
  if (document.fullscreenElement) document.exitFullscreen();
  else $("stage").requestFullscreen?.();
}

/** On a full screen the prompt lies over the picture, and fades while nobody moves or types. */
function stirred() {
  $("stage").classList.remove("idle");
  clearTimeout(view.fadeTimer);
  if (document.fullscreenElement) view.fadeTimer = setTimeout(() => $("stage").classList.add("idle"), FADE_MS);
}
for (const kind of ["pointermove", "pointerdown", "keydown", "focusin"]) $("stage").addEventListener(kind, stirred);
document.addEventListener("fullscreenchange", stirred);

/** Sharpened or plain: as chosen on an earlier visit; else sharpened where a GPU does it, for a processor has better to do. */
function startSharpening() {
  const select = $("sharpen");
  const gpu = document.createElement("canvas").getContext("webgl", { failIfMajorPerformanceCaveat: true });
  select.value = gpu ? "sharp" : "plain";
  const draw = () => document.body.classList.toggle("sharp", select.value === "sharp");
  select.addEventListener("change", () => {
    draw();
    remember("picture", select.value);
  });
  select.value = chosen("picture") ?? select.value;
  draw();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sendPrompt($("prompt").value);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    sendPrompt(event.target.value);
    event.target.select(); // the next words replace these
  } else if (["ArrowUp", "ArrowDown"].includes(event.key) && wholeSelected(event.target)) {
    event.preventDefault();
    recall(event.key === "ArrowUp" ? -1 : 1);
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
$("fps-form").addEventListener("submit", (event) => event.preventDefault()); // Enter is a change already
$("fps").addEventListener("change", changeFps);
$("steps-form").addEventListener("submit", (event) => event.preventDefault());
$("steps").addEventListener("change", changeSteps);
$("switch").addEventListener("change", () => {
  drawFieldError("switch", "");
  drawSwitchHelp();
});
$("dice").addEventListener("click", () => {
  $("seed").value = Math.floor(Math.random() * 2147483648);
  startOver();
});
$("pause").addEventListener("click", togglePause);
$("reset").addEventListener("click", () => ask("reset"));
$("fullscreen").addEventListener("click", toggleFullscreen);
$("share").addEventListener("click", shareLink);
$("fullscreen").hidden = !document.fullscreenEnabled;
$("veil-button").addEventListener("click", () => {
  video.play().catch(() => {});
  if (view.awaitsPicture) $("picture").click();
  else if (view.phase === "error") client.start(); // also where the engine has ended and the connection still stands
  else client.retryNow();
});

document.addEventListener("keydown", (event) => {
  const busy = event.target.closest("input, textarea, button, summary, a, select");
  if (busy || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const act = { "/": () => $("prompt").focus(), " ": togglePause, k: togglePause, r: () => ask("reset"), f: toggleFullscreen, c: () => $("fold").click(), s: shareLink, v: () => $("record").click() }[event.key.toLowerCase()];
  if (/^[1-9]$/.test(event.key) && view.steers) ideas.press(Number(event.key));
  if (!act || (!view.steers && !"fcsv".includes(event.key.toLowerCase()))) return;
  event.preventDefault();
  act();
});

// ---- life -----------------------------------------------------------------------------------------------------------

async function describe() {
  const { engine } = await (await fetch(`api/state${location.search}`, { headers: client.authorization })).json();
  $("chips").replaceChildren(
    ...engine.examples.map((example) => {
      const made = chip(example, suggest);
      made.setAttribute("aria-current", String(example === view.prompt));
      return made;
    }),
  );
  view.needsPicture = engine.begins_with_picture;
  drawPicture(view.image, view.needsPicture);
  drawSuggestions(view.text, suggest, engine.suggestions);
  view.chunkFrames = engine.chunk_frames;
  if (engine.examples.length) $("prompt").placeholder = engine.examples[0];
  drawControls();
  $("camera-embedded").hidden = engine.model !== "tiny";
}

/** The token of a page's address. It stands in the fragment, which is never sent to a server or kept in its log. */
function tokenOf(fragment) {
  const given = /[#&]token=([^&]+)/.exec(fragment)?.[1] ?? null;
  try {
    return given && decodeURIComponent(given);
  } catch {
    return given; // a percent sign that stands for itself
  }
}

addEventListener("hashchange", () => tokenOf(location.hash) !== token && location.reload());
// A plain link to the prompt would take the token out of the address.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("prompt").focus();
});
addEventListener("pagehide", () => client.stop());
addEventListener("pageshow", (event) => event.persisted && client.start());
addEventListener("online", () => client.retryNow());

for (const control of document.querySelectorAll("[data-steers][title]")) control.dataset.title = control.title;
drawStatus();
startPictures({
  steers: () => view.steers && (client.connected || view.awaitsPicture),
  send: beginWith,
  frame: () => frameOf(video),
  say: (text) => {
    drawFieldError("picture", text);
    if (view.awaitsPicture) drawAwaited(text);
  },
});
const camera = startCamera({
  address: () => `whip/${encodeURIComponent(view.session)}`,
  headers: client.authorization,
  strength: (strength) => ask("strength", { strength }),
  iceServers: () => client.iceServers(),
  size: () => view.size,
});
const steering = startSteering(client, () => view.steers && client.connected, view);
startLoras((name, scale) => ask("lora", { name, scale }));
const wheel = startWheel(client, view, () => {
  steering.draw(view.controls ?? []);
  drawStatus();
});
startMeasuring(client, view);
startFolding();
startRecording({
  address: () => `api/sessions/${encodeURIComponent(view.session)}/clip`,
  authorization: client.authorization,
  told: (text) => drawReceipt(text),
});
const past = startRewinding({ client, view, rewind: (chunk) => ask("rewind", { chunk }), told: (text) => drawReceipt(text) });
startSharpening();
const ideas = startSuggestions(() => view.prompt);
openShared(client.authorization).then(
  (opened) => opened || client.start(), // else the page is on its way to the session
  (refused) => {
    if (refused.field === "image") {
      awaitPicture();
      return;
    }
    client.start();
    drawReceipt(`A stream of your own could not be opened; this is the server's. ${refused.message}`);
  },
);
