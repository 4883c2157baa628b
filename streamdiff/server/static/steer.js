// Steers the world that is shown, by the controls that its model has: keys, buttons and, for fingers, sticks on the
// picture, the mouse, a gamepad.

import { $, setText } from "./dom.js";

const AGAIN_MS = 300; // what is held is said again: the server lets go of it after a second without a word
const DEAD_ZONE = 0.15; // of a gamepad's stick
const GRADES = 20; // of a stick, each way
const MOUSE_FULL = 12; // pixels per frame of the screen that turn an axis fully
const MOUSE_REST_MS = 80; // without movement, until the mouse's axes are at rest
const MOUSE = [["MouseX", "movementX", 1], ["MouseY", "movementY", 1], ["-MouseY", "movementY", -1]];
const OTHER_WAY = { right: "left", up: "down", forward: "back" };
const LABELS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };

const ways = ({ kind }) => (kind === "axis" ? [-1, 1] : [1]);
const labelOf = (code) => LABELS[code] ?? code.replace(/^Key|^Digit/, "");

/** What a control does when it is held at `value`, in words. */
function does(name, value) {
  const words = name.replaceAll("_", " ");
  if (value > 0) return words;
  const other = words.replace(/\b(right|up|forward)\b/, (word) => OTHER_WAY[word]);
  return other === words ? `${words} back` : other;
}

/** Say what the keys of these controls do: beside the other shortcuts, and while there is no picture in its place. */
export function drawKeys(controls) {
  const rows = controls.flatMap((each) =>
    ways(each).map((value, way) => [
      each.keys.filter((code, at) => !code.includes("Mouse") && (each.kind === "button" || at % 2 === way)).map(labelOf),
      does(each.name, value),
    ]),
  );
  if (controls.some(({ keys }) => keys.some((code) => code.includes("Mouse")))) rows.push([["mouse"], "after a click on the picture"]);
  for (const place of ["world-keys", "veil-keys"]) {
    const said = rows.filter(([keys]) => keys.length).map(([keys, what]) => {
      const span = document.createElement("span");
      span.append(...keys.flatMap((key) => [Object.assign(document.createElement("kbd"), { textContent: key }), " "]), what);
      return span;
    });
    $(place).replaceChildren(...said);
  }
}

/** Begin to listen. `steers` says whether this page may steer now. Returns what the page calls with the session's
 *  controls, and with each receipt of kind `control`. */
export function startSteering(client, steers, view) {
  const pressed = new Set(); // keys, by code
  const touched = new Map(); // by pointer: what it holds on the picture, by control
  const moved = new Map(); // by control: what the mouse says
  const sent = new Map(); // by control: the value that the server has
  const asked = new Map(); // id of a message -> when it was sent
  let controls = [];
  let timer = 0;

  /** What each control is at, of everything that holds it. */
  function values() {
    const pad = gamepad();
    const at = new Map();
    controls.forEach(({ name, kind, keys }, index) => {
      const down = keys.map((code) => Number(pressed.has(code)));
      // Of an axis every second key means 1, the one before it -1.
      let value = down.reduce((sum, held, at) => sum + (kind === "axis" && at % 2 === 0 ? -held : held), 0);
      for (const touch of touched.values()) value += touch[name] ?? 0;
      value += moved.get(name) ?? 0;
      value += kind === "axis" ? (pad.axes[index] ?? 0) : Number(pad.buttons[index - axes().length] ?? 0);
      at.set(name, Math.max(-1, Math.min(1, value)));
    });
    return at;
  }

  const axes = () => controls.filter(({ kind }) => kind === "axis");
  const graded = (value) => (Math.abs(value) < DEAD_ZONE ? 0 : Math.max(-1, Math.min(1, Math.round(value * GRADES) / GRADES)));

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
    moved.clear();
    if (document.pointerLockElement) document.exitPointerLock();
    send();
  }

  function draw() {
    for (const button of $("pad-keys").querySelectorAll(".key")) {
      const { name, value } = button.dataset;
      const held = sent.get(name) ?? 0;
      button.classList.toggle("held", held * Number(value) > 0);
    }
    for (const stick of $("pad-keys").querySelectorAll(".stick")) {
      const [x, y] = stick.dataset.names.split(" ").map((name) => sent.get(name) ?? 0);
      stick.style.setProperty("--x", x);
      stick.style.setProperty("--y", y ?? 0);
    }
  }

  /** A button on the picture for each direction of an axis, and for each button; for fingers, a stick for two axes. */
  function build() {
    const fingers = matchMedia("(pointer: coarse)").matches;
    const names = fingers ? axes().map(({ name }) => name) : [];
    const sticks = names.flatMap((_, at) => (at % 2 ? [] : [names.slice(at, at + 2)])).map((pair) => {
      const stick = document.createElement("div");
      stick.className = "stick";
      stick.dataset.names = pair.join(" ");
      stick.ariaLabel = stick.title = pair.join(", ").replaceAll("_", " ");
      stick.role = "img";
      return stick;
    });
    const shown = fingers ? controls.filter(({ kind }) => kind === "button") : controls;
    const made = shown.flatMap((each) => ways(each).map((value, index) => ({ name: each.name, value, key: each.keys[index] ?? "" })));
    const buttons = made.map(({ name, value, key }) => {
      const button = document.createElement("button");
      button.type = "button";
      button.tabIndex = -1; // keys do the same
      button.className = "key";
      Object.assign(button.dataset, { name, value, key });
      button.textContent = (!fingers && labelOf(key)) || name;
      button.title = button.ariaLabel = does(name, value);
      return button;
    });
    $("pad-keys").replaceChildren(...sticks, ...buttons);
  }

  /** What a pointer at `event` holds on `target`, a button or a stick. */
  function held(target, event) {
    if (target.matches(".key")) return { [target.dataset.name]: Number(target.dataset.value) };
    const box = target.getBoundingClientRect();
    const at = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    return Object.fromEntries(target.dataset.names.split(" ").map((name, axis) => [name, graded(3 * at[axis] - 1.5)]));
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
    const target = event.target.closest(".key, .stick");
    if (!target) return;
    event.preventDefault(); // the focus stays where it is
    target.setPointerCapture(event.pointerId);
    touched.set(event.pointerId, held(target, event));
    send();
  });
  $("pad-keys").addEventListener("pointermove", (event) => {
    if (!touched.has(event.pointerId) || !event.target.matches(".stick")) return;
    touched.set(event.pointerId, held(event.target, event));
    send();
  });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
    $("pad-keys").addEventListener(kind, (event) => touched.delete(event.pointerId) && send());
  }

  /** Axes that the mouse turns, by the direction of its movement. */
  const turned = () => controls.flatMap(({ name, keys }) => MOUSE.filter(([key]) => keys.includes(key)).map(([, along, way]) => [name, along, way]));
  let resting = 0;
  $("video").addEventListener("click", () => turned().length && steers() && $("video").requestPointerLock());
  addEventListener("mousemove", (event) => {
    if (document.pointerLockElement !== $("video")) return;
    for (const [name, along, way] of turned()) moved.set(name, graded((way * event[along]) / MOUSE_FULL));
    send();
    clearTimeout(resting);
    resting = setTimeout(() => {
      moved.clear();
      send();
    }, MOUSE_REST_MS);
  });
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
      if (!steers()) for (const each of [pressed, touched, sent]) each.clear(); // somebody else has the wheel
      if (JSON.stringify(known) === JSON.stringify(controls)) return;
      controls = known;
      build();
      drawKeys(known);
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
