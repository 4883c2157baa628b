// The live numbers: what the browser measures of the video it gets, and what the server tells of the stream.

import { $, number, setText } from "./dom.js";

const last = { frames: 0, at: 0, bytes: 0 };

/** Draw the server's figures, a `stats` message. `view` is the page's state, see app.js. */
export function drawStats(stats, view) {
  view.stats = stats;
  number("n-made", stats.made_fps, 0, !view.paused && stats.made_fps < 0.85 * view.fps);
  number("n-chunk", stats.chunk_ms == null ? null : stats.chunk_ms / 1000, 2);
  // Until this page has asked for something, the lag of others.
  if (view.lagMs == null && stats.prompt_lag_ms != null) number("n-lag", stats.prompt_lag_ms / 1000, 2);
  drawRanks(stats.occupancy);
}

/** A bar for each rank of a ring, with the share of the time, 0 to 1, that it was at work; none for one stage. */
function drawRanks(shares) {
  const bars = $("rank-bars");
  $("ranks").hidden = shares.length === 0;
  while (bars.children.length > shares.length) bars.lastChild.remove();
  while (bars.children.length < shares.length) bars.append(rankBar(bars.children.length));
  shares.forEach((share, rank) => {
    const [, meter, percent] = bars.children[rank].children;
    meter.value = share;
    setText(percent, `${Math.round(100 * share)} %`);
  });
}

function rankBar(rank) {
  const [row, name, meter, percent] = ["li", "span", "meter", "span"].map((tag) => document.createElement(tag));
  name.textContent = `rank ${rank}`;
  meter.setAttribute("aria-label", `Rank ${rank}, share of the time at work`);
  row.append(name, meter, percent);
  return row;
}

/** Look at the connection of `client` once a second while the page is seen. */
export function startMeasuring(client, view) {
  setInterval(() => document.visibilityState === "visible" && measure(client, view), 1000);
}

async function measure(client, view) {
  const pc = client.pc;
  if (!pc || pc.connectionState !== "connected") return;
  const reports = [...(await pc.getStats()).values()];
  const inbound = reports.find((report) => report.type === "inbound-rtp" && report.kind === "video");
  if (!inbound || pc !== client.pc) return;
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
  if ($("facts").closest("details").open) drawMore(inbound, reports, kbps, view.stats);
}

function drawMore(inbound, reports, kbps, stats) {
  const codec = reports.find((report) => report.id === inbound.codecId)?.mimeType?.replace("video/", "");
  const pair = reports.find((report) => report.type === "candidate-pair" && report.nominated);
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
    Network: stats?.network,
    "Frame number": stats?.frame,
    "Made ahead": stats == null ? null : `${stats.buffered} frames, at most ${stats.lead_ms} ms`,
    "Video in": videoIn(stats?.input),
    Repeated: stats?.repeated,
    "Made, never shown": stats?.dropped,
    "Shown, not encoded": stats?.encoder_dropped,
  });
}

/** What feeds the session, in a line; null where nothing does. */
function videoIn(input) {
  if (!input) return null;
  const size = input.size ? `${input.size[0]} × ${input.size[1]} at ${input.fps} fps` : "nothing yet";
  const level = input.level == null ? "" : `, noise ${input.level}`;
  return `${input.holds ? "paused" : size}${level}, ${input.dropped} dropped`;
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
