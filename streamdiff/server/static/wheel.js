// The wheel of a session that many watch: who has it, who waits, and what the session's owner may do about it. Names are
// strangers' words: they are written as text only.

import { refusal } from "./client.js";
import { $, chosen, drawFieldError, remember, setText } from "./dom.js";

/** `changed` is called when `view.steers` may have changed. Returns what the page calls with `hello` and `wheel`. */
export function startWheel(client, view, changed) {
  let me = 0;
  let controller = true; // steers while nobody has the wheel
  let wheel = { holder: null, queue: [], open: false };
  const place = () => [wheel.holder, ...wheel.queue].findIndex((each) => each?.id === me);

  /** Ask over HTTP, where the owner's token counts; without a body only look. */
  async function ask(body) {
    const how = body && { method: "POST", body: JSON.stringify(body) };
    const headers = { "Content-Type": "application/json", ...client.authorization };
    const answer = await fetch(`api/sessions/${encodeURIComponent(view.session)}/wheel`, { ...how, headers });
    if (!answer.ok) throw await refusal(answer);
    const told = await answer.json();
    drawWatchers(told.watchers);
    draw(told);
  }

  /** `ask`, and say beside the name why not. */
  const say = (body) => ask(body).then(() => drawFieldError("wheel-name", ""), (error) => drawFieldError("wheel-name", error.message));

  function named(wanted) {
    const name = $("wheel-name").value.trim();
    remember("name", name);
    say({ do: wanted, name: name || undefined });
  }

  function toggle() {
    if (place() >= 0) say({ do: "give_up" });
    else named("take");
  }

  function draw(told) {
    wheel = { holder: told.holder, queue: told.queue, open: told.open };
    const { holder, queue } = wheel;
    const at = place();
    view.steers = holder ? at === 0 : controller;
    const mayTake = client.connected && (controller || wheel.open || at >= 0); // who plays from elsewhere has no channel to steer by
    const waiting = queue.length ? ` ${queue.length} ${queue.length === 1 ? "waits" : "wait"}.` : "";
    const who = !holder ? "Nobody has the wheel." : at === 0 ? "You have the wheel." : `${holder.name} has the wheel.`;
    setText($("wheel-text"), at > 0 ? `${who} You are number ${at} of ${queue.length} in the queue.` : `${who}${waiting}`);
    for (const button of [$("wheel-take"), $("wheel-go")]) {
      button.hidden = !mayTake;
      setText(button, at === 0 ? "Give it up" : at > 0 ? "Leave the queue" : holder ? "Wait for it" : "Take the wheel");
    }
    $("wheel").hidden = !holder && (controller || !wheel.open);
    view.wheelSays = $("wheel").hidden ? "" : who;
    $("wheel-form").hidden = !mayTake && $("wheel-owner").hidden;
    setText($("wheel-open"), wheel.open ? "Only who may steer" : "Open to all who watch");
    changed();
  }

  /** For the session's owner: all who are connected; undefined for others. */
  function drawWatchers(watchers) {
    $("wheel-owner").hidden = !watchers;
    const others = (watchers ?? []).filter(({ id }) => id !== me);
    $("wheel-watchers").replaceChildren(
      ...others.map(({ id, name }) => {
        const item = document.createElement("li");
        item.append(Object.assign(document.createElement("span"), { textContent: name }));
        for (const [text, wanted] of [["Pass the wheel", "pass"], ["Remove", "remove"]]) {
          const button = Object.assign(document.createElement("button"), { type: "button", className: "button", textContent: text });
          button.addEventListener("click", () => say({ do: wanted, watcher: id }).then(() => say()));
          item.append(button);
        }
        return item;
      }),
    );
  }

  $("wheel-name").value = chosen("name") ?? "";
  $("wheel-go").addEventListener("click", toggle);
  $("wheel-form").addEventListener("submit", (event) => {
    event.preventDefault();
    toggle();
  });
  $("wheel-back").addEventListener("click", () => named("take_back"));
  $("wheel-open").addEventListener("click", () => say({ do: wheel.open ? "close" : "open" }));
  $("wheel-list").addEventListener("toggle", () => $("wheel-list").open && say());

  return {
    hello({ role, watcher, wheel_token, state }) {
      me = watcher;
      controller = role === "controller";
      client.authorization["Wheel-Token"] = wheel_token; // pictures and cameras go over HTTP too
      view.session = state.session;
      draw(state.wheel);
      if (client.authorization.Authorization && controller) ask().catch(() => {}); // whether this page is the owner's
    },
    draw,
  };
}
