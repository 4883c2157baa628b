"""Parts of the page, run by Node: what its client makes of the server's `Link` header, and a camera that is stopped."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from starlette.responses import Response

from streamdiff.config import IceServer
from streamdiff.server.routes.webrtc import with_links

pytestmark = [pytest.mark.interop, pytest.mark.node]

CLIENT = Path(__file__).parents[2] / "streamdiff" / "server" / "static" / "client.js"
SCRIPT = """
import { readFileSync } from "node:fs";
const source = readFileSync(process.argv[1], "utf8");
const client = await import(`data:text/javascript,${encodeURIComponent(source)}`);
console.log(JSON.stringify(client.parseIceServers(process.argv[2])));
"""

STOPPED = """
const elements = {}, asked = [];
const element = () => ({ dataset: {}, handlers: {}, textContent: "", valueAsNumber: 0.4, classList: { toggle() {} },
  addEventListener(type, handler) { this.handlers[type] = handler; }, setAttribute() {}, play: async () => {} });
globalThis.document = { getElementById: (id) => elements[id] ??= element(), baseURI: "http://page/" };
globalThis.addEventListener = () => {};
const track = { stopped: false, stop() { this.stopped = true; } };
const media = { getTracks: () => [track], getVideoTracks: () => [track] };
const turn = () => new Promise((resolve) => setTimeout(resolve));
let reached, proceed;
const stage = (name) => name === process.argv[2] && new Promise((resolve) => { proceed = resolve; reached(); });
Object.defineProperty(globalThis, "navigator", { configurable: true,
  value: { mediaDevices: { getUserMedia: async () => { await stage("media"); return media; } } } });
globalThis.RTCPeerConnection = class {
  localDescription = { sdp: "" };
  addTransceiver() {}
  setLocalDescription() { return stage("local"); }
  setRemoteDescription() { return stage("remote"); }
  close() {}
};
globalThis.fetch = async (url, { method }) => {
  asked.push(`${method} ${new URL(url).pathname}`);
  if (method === "POST") await stage("post");
  return { ok: true, headers: { get: () => "/whip/default/x" }, text: async () => (await stage("text"), "") };
};
const { startCamera } = await import(process.argv[1]);
startCamera({ address: () => "whip/default", headers: {}, strength() {}, size: () => ({ width: 1, height: 1 }),
  iceServers: async () => (await stage("servers"), []) });
const there = new Promise((resolve) => { reached = resolve; });
elements["camera-camera"].handlers.click();
await there;
elements["camera-stop"].handlers.click();
await turn();
proceed();
await turn();
const { hidden, srcObject } = elements["camera-preview"];
console.log(JSON.stringify([asked, elements["camera-error"].textContent, hidden, srcObject, track.stopped]));
"""


def _parsed(header: str) -> list[dict[str, str]]:
    words = ["node", "--input-type=module", "-e", SCRIPT, "--", str(CLIENT), header]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert isinstance(found, list)
    return found


def test_the_page_reads_the_servers_that_the_server_names() -> None:
    servers = [
        IceServer(url="stun:stun.example:3478"),
        IceServer(url="turn:turn.example:3478?transport=udp", username="ann", credential="s3;cr,et="),
    ]
    headers = with_links(Response(), servers).headers.getlist("Link")
    assert len(headers) == 2
    assert _parsed(", ".join(headers)) == [  # as a browser gives them
        {"urls": "stun:stun.example:3478"},
        {"urls": "turn:turn.example:3478?transport=udp", "username": "ann", "credential": "s3;cr,et="},
    ]


@pytest.mark.parametrize("stage", ["media", "local", "post", "remote"])
def test_a_camera_that_is_stopped_while_the_connection_is_made_is_off_and_given_up(stage: str) -> None:
    words = ["node", "--input-type=module", "-e", STOPPED, "--", CLIENT.with_name("camera.js").as_uri(), stage]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    asked, error, hidden, shown, stopped = json.loads(done.stdout)
    posted = stage in ("post", "text", "remote")
    assert asked == (["POST /whip/default", "DELETE /whip/default/x"] if posted else [])
    assert (error, hidden, shown, stopped) == ("", True, None, True)
