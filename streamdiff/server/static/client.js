// One viewer: connects over WHEP, speaks on the control channel, comes back after every interruption. Where the server
// names a media server to play from, the video comes from there, and what the control channel would tell as events.
// Knows nothing about the page; everything is an event: "status", "stream", "message".

const DISCONNECTED_LIMIT_MS = 3000;
const SILENCE_LIMIT_MS = 3000;
const CONNECT_LIMIT_MS = 12000;
const BACKOFF_MS = [500, 1000, 2000, 4000, 8000];
// No token or a wrong one, no such session, or one that has ended: asking again by itself would change nothing.
const FINAL = [401, 403, 404, 410];

/** What this tab calls itself, also after a reload: where all places are taken, its own dead connection makes room. */
function tabId() {
  const fresh = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  try {
    const id = sessionStorage.getItem("streamdiff-tab") ?? fresh();
    sessionStorage.setItem("streamdiff-tab", id);
    return id;
  } catch {
    return fresh(); // a browser that lets pages keep nothing
  }
}

export class StreamClient extends EventTarget {
  #url;
  #attempt = 0;
  #timers = new Set();
  #resource = null;
  #channel = null;
  #found = []; // candidates, before the server has named the connection that they are for
  #generation = 0;
  #asking = new AbortController();
  #nextId = 1;
  #decoded = { frames: 0, at: 0 };

  constructor(url = "whep", token = null) {
    super();
    this.authorization = token ? { Authorization: `Bearer ${token}` } : {};
    this.#url = new URL(url, document.baseURI);
    this.#url.searchParams.set("client", tabId());
    this.pc = null;
    this.offeredAt = null;
    this.serverShows = false;
  }

  get connected() {
    return this.#channel?.readyState === "open";
  }

  start() {
    this.#attempt = 0;
    this.#connect();
  }

  /** Connect at once instead of waiting for the next try. */
  retryNow() {
    if (!this.connected) this.#connect();
  }

  /** End the connection; `start` begins a new one. */
  stop() {
    this.#generation += 1;
    this.#asking.abort();
    this.#asking = new AbortController();
    this.#clearTimers();
    if (this.#resource) {
      fetch(this.#resource, { method: "DELETE", keepalive: true }).catch(() => {});
      this.#resource = null;
    }
    this.#found = [];
    this.pc?.close();
    this.pc = null;
    this.#channel = null;
  }

  /** Send one control message; returns its id, or null while there is no connection. */
  send(message) {
    if (!this.connected) return null;
    const id = this.#nextId++;
    this.#channel.send(JSON.stringify({ id, ...message }));
    return id;
  }

  /** Tell the watchdog how many frames the browser has decoded. */
  noteDecoded(frames) {
    const now = performance.now();
    if (frames !== this.#decoded.frames || !this.serverShows) this.#decoded = { frames, at: now };
    if (this.connected && now - this.#decoded.at > SILENCE_LIMIT_MS) {
      this.#retry("The video stopped arriving.");
    }
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }

  #later(ms, act) {
    const timer = setTimeout(() => {
      this.#timers.delete(timer);
      act();
    }, ms);
    this.#timers.add(timer);
    return timer;
  }

  #clearTimers() {
    for (const timer of this.#timers) clearTimeout(timer);
    this.#timers.clear();
  }

  async #connect() {
    this.stop();
    if (!("RTCPeerConnection" in globalThis)) {
      this.#fail({ message: "This browser cannot play WebRTC video." });
      return;
    }
    const generation = this.#generation;
    this.#emit("status", { phase: "connecting", attempt: this.#attempt });
    try {
      await this.#offer(generation);
    } catch (error) {
      if (generation !== this.#generation) return;
      if (FINAL.includes(error.status)) this.#fail({ message: error.message, status: error.status, again: true });
      else this.#retry(error.message, error.retryAfterMs);
    }
  }

  async #offer(generation) {
    this.#later(CONNECT_LIMIT_MS, () => {
      if (generation !== this.#generation || this.pc?.connectionState === "connected") return;
      this.#retry(
        this.#resource
          ? "The server answered, but no video came through. A firewall may block UDP, or this machine has no network at all."
          : "The server does not answer.",
      );
    });
    const links = await this.#links(this.#url, this.authorization);
    const elsewhere = parseAlternate(links);
    const iceServers = parseIceServers(elsewhere ? await this.#links(elsewhere) : links);
    if (generation !== this.#generation) return;
    const pc = new RTCPeerConnection({ bundlePolicy: "max-bundle", iceServers });
    this.pc = pc;
    this.offeredAt = performance.now();
    this.serverShows = false;
    const transceiver = pc.addTransceiver("video", { direction: "recvonly" });
    this.#lowerDelay(transceiver.receiver);
    if (elsewhere) this.#read(generation).catch(() => generation === this.#generation && this.#retry("The connection ended."));
    else this.#listen(pc.createDataChannel("control"), generation);
    pc.ontrack = (event) => this.#emit("stream", { stream: event.streams[0] ?? new MediaStream([event.track]) });
    pc.onconnectionstatechange = () => this.#stateChanged(pc, generation);
    // A relay of the server's lets nobody in whose address the server has not been told.
    if (iceServers.length) pc.onicecandidate = ({ candidate }) => candidate?.candidate && this.#trickle(candidate, generation);
    // Sent before the browser has looked for its own addresses: the server's are enough to find each other.
    await pc.setLocalDescription();
    const answer = await this.#post(pc.localDescription.sdp, generation, elsewhere ?? this.#url, elsewhere ? {} : this.authorization);
    if (generation !== this.#generation) return;
    await pc.setRemoteDescription({ type: "answer", sdp: answer });
  }

  /** The STUN and TURN servers that the server names; asked again for every connection, for credentials expire. */
  async iceServers() {
    return parseIceServers(await this.#links(this.#url, this.authorization));
  }

  async #links(url, headers = {}) {
    return fetch(url, { method: "OPTIONS", headers, signal: this.#asking.signal })
      .then((response) => response.headers.get("Link") ?? "")
      .catch(() => "");
  }

  async #post(offer, generation, url, headers) {
    let response;
    try {
      response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/sdp", ...headers }, body: offer });
    } catch {
      throw new Error("The server cannot be reached.");
    }
    if (!response.ok) throw await refusal(response);
    const location = new URL(response.headers.get("Location"), url);
    if (generation !== this.#generation) {
      fetch(location, { method: "DELETE", keepalive: true }).catch(() => {});
      return "";
    }
    this.#resource = location;
    for (const candidate of this.#found.splice(0)) this.#trickle(candidate, generation);
    return response.text();
  }

  #trickle(candidate, generation) {
    if (generation !== this.#generation) return;
    if (!this.#resource) {
      this.#found.push(candidate);
      return;
    }
    sendCandidate(this.#resource, candidate);
  }

  #lowerDelay(receiver) {
    if ("jitterBufferTarget" in receiver) receiver.jitterBufferTarget = 0;
    else if ("playoutDelayHint" in receiver) receiver.playoutDelayHint = 0;
  }

  #listen(channel, generation) {
    this.#channel = channel;
    channel.onmessage = (event) => this.#take(event.data, generation);
    channel.onclose = () => {
      if (generation === this.#generation) this.#retry("The connection ended.");
    };
  }

  /** The session's events (SSE), with the token, which EventSource cannot send; until they end, which is an error. */
  async #read(generation) {
    const response = await fetch("api/sessions/default/events", { headers: this.authorization, signal: this.#asking.signal });
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let kept = ""; ; ) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The events ended.");
      const events = (kept + value).split("\n\n");
      kept = events.pop();
      for (const event of events) if (event.startsWith("data: ")) this.#take(event.slice(6), generation);
    }
  }

  #take(text, generation) {
    if (generation !== this.#generation) return;
    const message = JSON.parse(text);
    if (message.type === "hello") {
      this.#attempt = 0;
      this.#decoded = { frames: -1, at: performance.now() };
      this.#emit("status", { phase: "live" });
    }
    if (message.type === "stats") this.serverShows = message.shown_fps > 1;
    this.#emit("message", message);
    if (message.type === "session_ended") this.#fail({ message: `The session has ended (${message.message ?? message.reason}).`, again: true });
    if (message.type === "bye") this.#retry("The server is shutting down.", 1000 * (message.retry_after_s ?? 2));
  }

  #stateChanged(pc, generation) {
    if (generation !== this.#generation) return;
    if (pc.connectionState === "failed") this.#retry("The connection failed.");
    if (pc.connectionState === "disconnected") {
      this.#later(DISCONNECTED_LIMIT_MS, () => {
        if (generation === this.#generation && pc.connectionState === "disconnected") this.#retry("The connection was lost.");
      });
    }
  }

  /** Stop, for good unless `start` or `retryNow` is called; `again`: whether that could help. */
  #fail(detail) {
    this.stop();
    this.#emit("status", { phase: "error", ...detail });
  }

  #retry(message, afterMs) {
    this.stop();
    const step = BACKOFF_MS[Math.min(this.#attempt, BACKOFF_MS.length - 1)];
    const waitMs = Math.max(afterMs ?? 0, step * (0.8 + 0.4 * Math.random()));
    this.#attempt += 1;
    this.#emit("status", { phase: "waiting", message, waitMs });
    this.#later(waitMs, () => this.#connect());
  }
}

/** The error that an answer other than 2xx stands for; where it is no problem document, the status has to do. */
export async function refusal(response) {
  const told = await response.json().catch(() => null);
  const error = new Error(told?.detail || `The server answered ${response.status}.`);
  error.status = response.status;
  error.field = told?.field;
  const retryAfterS = Number(response.headers.get("Retry-After"));
  if (retryAfterS > 0) error.retryAfterMs = retryAfterS * 1000;
  return error;
}

/** Tell the server an address of this browser's (trickle ICE, RFC 8840), for the connection that `resource` names. */
export function sendCandidate(resource, candidate, headers = {}) {
  const body = `a=mid:${candidate.sdpMid}\r\na=${candidate.candidate}\r\n`;
  fetch(resource, { method: "PATCH", headers: { "Content-Type": "application/trickle-ice-sdpfrag", ...headers }, body }).catch(() => {});
}

/** Where else WHEP's stream plays, of its `Link` headers; null: nowhere. */
export function parseAlternate(header) {
  return /<([^>]+)>;\s*rel="alternate"/.exec(header)?.[1] ?? null;
}

/** `Link` headers of WHEP, rel="ice-server", as RTCConfiguration.iceServers takes them. */
export function parseIceServers(header) {
  const servers = [];
  for (const [, url, rest] of header.matchAll(/<([^>]+)>((?:;\s*[\w-]+="[^"]*")*)/g)) {
    const values = Object.fromEntries([...rest.matchAll(/([\w-]+)="([^"]*)"/g)].map(([, name, value]) => [name, value]));
    if (values.rel !== "ice-server") continue;
    const { username, credential } = values;
    servers.push(username ? { urls: url, username, credential } : { urls: url });
  }
  return servers;
}
