// Steers the world that is shown, by the controls that its model has: keys, buttons on the picture, a gamepad.

import { $, setText } from "./dom.js";

const AGAIN_MS = 300; // what is held is said again: the server lets go of it after a second without a word
const DEAD_ZONE = 0.15; // of a gamepad's stick
const GRADES = 20; // of a stick, each way
const LOOK_PX = 150; // a drag on the picture so far looks about as fast as a key
const LABELS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };

/** Begin to listen. `steers` says whether this page may steer now. Returns what the page calls with the session's
 *  controls, and with each receipt of kind `control`. */
export function startSteering(client, steers, view) {
  const pressed = new Set(); // keys, by code
  const touched = new Map(); // buttons on the picture that are held: element -> { name, value }
  const sent = new Map(); // by control: the value that the server has
  const asked = new Map(); // id of a message -> when it was sent
  let controls = [];
  let timer = 0;
  let drag = null; // where a drag on the picture began

  /** What each control is at, of everything that holds it. */
  function values() {
    const pad = gamepad();
    const at = new Map();
    controls.forEach(({ name, kind, keys }, index) => {
      const down = keys.map((code) => Number(pressed.has(code)));
      // Of an axis every second key means 1, the one before it -1.
      let value = down.reduce((sum, held, at) => sum + (kind === "axis" && at % 2 === 0 ? -held : held), 0);
      for (const touch of touched.values()) if (touch.name === name) value += touch.value;
      value += kind === "axis" ? (pad.axes[index] ?? 0) : Number(pad.buttons[index - axes().length] ?? 0);
      at.set(name, Math.max(-1, Math.min(1, value)));
    });
    return at;
  }

  const graded = (value) => (Math.abs(value) < DEAD_ZONE ? 0 : Math.round(value * GRADES) / GRADES);
  const axes = () => controls.filter(({ kind }) => kind === "axis");

  /** The first gamepad's sticks and buttons, in the order of the controls. */
  function gamepad() {
    const pad = navigator.getGamepads?.().find((each) => each?.connected);
    return { axes: (pad?.axes ?? []).map(graded), buttons: (pad?.buttons ?? []).map((button) => button.pressed) };
  }

  /** Send what has changed; with `again`, what is held too. */
  function send(again = false) {
    if (!controls.length || !steers()) return;
    const body = { axes: {}, buttons: {} };
    let changed = false;
    for (const [name, value] of values()) {
      const differs = value !== (sent.get(name) ?? 0);
      changed ||= differs;
      if (!differs && !(again && value)) continue;
      const button = controls.find((each) => each.name === name).kind === "button";
      body[button ? "buttons" : "axes"][name] = button ? value === 1 : value;
      sent.set(name, value);
    }
    if (!changed && !(again && [...sent.values()].some(Boolean))) return;
    const id = client.send({ type: "control", ...body, t: performance.now() / 1000 });
    if (id !== null && changed) asked.set(id, performance.now());
    draw();
    clearTimeout(timer);
    if ([...sent.values()].some(Boolean)) timer = setTimeout(() => send(true), AGAIN_MS);
  }

  function release() {
    pressed.clear();
    touched.clear();
    drag = null;
    send();
  }

  function draw() {
    for (const button of $("pad-keys").children) {
      const { name, value } = button.dataset;
      const held = sent.get(name) ?? 0;
      button.classList.toggle("held", held * Number(value) > 0);
    }
  }

  /** A button on the picture for each direction of an axis, and for each button. */
  function build() {
    const made = controls.flatMap(({ name, kind, keys }) => (kind === "axis" ? [-1, 1] : [1]).map((value, index) => ({ name, value, key: keys[index] ?? "" })));
    $("pad-keys").replaceChildren(
      ...made.map(({ name, value, key }) => {
        const button = document.createElement("button");
        button.type = "button";
        button.tabIndex = -1; // keys do the same
        button.className = "key";
        Object.assign(button.dataset, { name, value, key });
        button.textContent = LABELS[key] ?? (key.replace(/^Key|^Digit/, "") || name);
        button.title = button.ariaLabel = `${name.replace("_", " ")}${value < 0 ? " back" : ""}`;
        return button;
      }),
    );
  }

  function onKey(event, down) {
    const ours = controls.some(({ keys }) => keys.includes(event.code));
    if (!ours || !steers()) return;
    if (down && (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, a, summary"))) return;
    if (!down && !pressed.has(event.code)) return;
    if (down) {
      event.preventDefault();
      event.stopPropagation(); // Space pauses only where no control has it
    }
    if (event.repeat) return;
    if (down) pressed.add(event.code);
    else pressed.delete(event.code);
    send();
  }

  addEventListener("keydown", (event) => onKey(event, true), { capture: true });
  addEventListener("keyup", (event) => onKey(event, false), { capture: true });
  addEventListener("blur", release);
  addEventListener("pagehide", release);
  document.addEventListener("visibilitychange", () => document.hidden && release());
  document.addEventListener("focusin", (event) => event.target.matches("input, textarea, select") && release());
  $("pad-keys").addEventListener("pointerdown", (event) => {
    const button = event.target.closest(".key");
    if (!button) return;
    event.preventDefault(); // the focus stays where it is
    button.setPointerCapture(event.pointerId);
    touched.set(event.pointerId, { name: button.dataset.name, value: Number(button.dataset.value) });
    send();
  });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
    $("pad-keys").addEventListener(kind, (event) => touched.delete(event.pointerId) && send());
  }
  // Dragging on the picture looks about, as a stick does, in a world that has this.
  const LOOKS = ["look_right", "look_up"];
  $("video").addEventListener("pointerdown", (event) => {
    if (!steers() || !controls.some(({ name }) => LOOKS.includes(name))) return;
    drag = event;
    $("video").setPointerCapture(event.pointerId);
  });
  $("video").addEventListener("pointermove", (event) => {
    if (drag?.pointerId !== event.pointerId) return;
    const way = [event.clientX - drag.clientX, drag.clientY - event.clientY];
    LOOKS.forEach((name, at) => touched.set(name, { name, value: graded(way[at] / LOOK_PX) }));
    send();
  });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
    $("video").addEventListener(kind, () => {
      drag = null;
      for (const name of LOOKS) touched.delete(name);
      send();
    });
  }
  let polling = false;
  function poll() {
    send();
    if (navigator.getGamepads().some((each) => each?.connected)) requestAnimationFrame(poll);
    else polling = false;
  }
  addEventListener("gamepadconnected", () => {
    if (!polling) polling = Boolean(requestAnimationFrame(poll));
  });
  client.addEventListener("status", () => {
    sent.clear(); // of another connection nothing is held
    asked.clear();
  });

  return {
    draw(known) {
      $("pad").hidden = !known.length || !steers();
      if (JSON.stringify(known) === JSON.stringify(controls)) return;
      controls = known;
      $("video").style.touchAction = known.some(({ name }) => LOOKS.includes(name)) ? "none" : "";
      build();
    },
    receipt({ id, stage }) {
      if (stage === "shown" && asked.has(id)) {
        view.keyLagMs = performance.now() - asked.get(id);
        setText($("pad-lag"), `on screen after ${(view.keyLagMs / 1000).toFixed(2)} s`);
      }
      if (["shown", "refused", "superseded"].includes(stage)) asked.delete(id);
    },
  };
}
