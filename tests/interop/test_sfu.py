"""deploy/sfu as it stands, but for ports: a session published to Janus, which its viewers watch there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from selenium.webdriver.common.by import By

from benchmarks.browser import chromium, console_errors, running_server
from streamdiff.config import Config, ServeConfig
from streamdiff.server.outputs.output import Publication, parse_target
from tests.browser.looking import coloured, painted_server, until
from tests.free_ports import free_ports
from tests.rules.source import ROOT
from tests.server.conftest import LIMIT_S, open_site
from tests.server.scripted import COLOURS

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.janus]
SFU = ROOT / "deploy" / "sfu"
TOKEN, SDP = "token-of-this-publication", {"Content-Type": "application/sdp"}


@contextmanager
def sfu(folder: Path) -> Iterator[str]:
    """Janus and the gateway on free ports; the gateway's address."""
    api, port = free_ports(2)
    for file in (SFU / "janus").iterdir():
        (folder / file.name).write_text(file.read_text("utf-8").replace("port = 8088", f"port = {api}"), "utf-8")
    words = [sys.executable, "-m", "uvicorn", "--app-dir", str(SFU), "gateway:app", "--port", str(port)]
    environment = {
        **os.environ,
        "JANUS": f"http://127.0.0.1:{api}/janus",
        "WHIP_TOKEN": TOKEN,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log = (folder / "log").open("wb")
    with log, subprocess.Popen(["janus", f"--configs-folder={folder}"], stdout=log, stderr=log) as janus:
        try:
            _wait(f"http://127.0.0.1:{api}/janus/info", folder / "log", janus)
            with subprocess.Popen(words, env=environment, stdout=log, stderr=log) as gateway:
                try:
                    _wait(f"http://127.0.0.1:{port}/whep", folder / "log", gateway)
                    yield f"http://127.0.0.1:{port}"
                finally:
                    gateway.terminate()
        finally:
            janus.kill()


def _wait(url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None, log.read_text()
        try:
            httpx.get(url, timeout=LIMIT_S)
            return
        except httpx.TransportError:
            continue


async def watch(http: httpx.AsyncClient, payload: str | None = None) -> tuple[RTCPeerConnection, str]:
    """A viewer at the SFU, which takes H.264 by another number where `payload` is one."""
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    pc.addTransceiver("video", direction="recvonly")
    await pc.setLocalDescription(await pc.createOffer())
    offer = pc.localDescription.sdp
    if payload is not None:
        offer = offer.replace("a=rtpmap:99 H264", "a=rtpmap:99 rtx").replace(":101 H264", f":{payload} H264")
        offer = offer.replace("a=fmtp:101", f"a=fmtp:{payload}").replace(" 101", f" {payload}")
    async with asyncio.timeout(LIMIT_S):
        while (answer := await http.post("/whep", content=offer, headers=SDP)).status_code == 503:
            await asyncio.sleep(0.1)
    assert answer.status_code == 201, answer.text
    await pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
    return pc, answer.headers["Location"]


async def frame(pc: RTCPeerConnection) -> np.ndarray:
    async with asyncio.timeout(LIMIT_S):
        return np.asarray((await pc.getReceivers()[0].track.recv()).to_ndarray(format="rgb24"))


async def test_one_publication_is_watched_by_many_and_goes_on_when_it_is_begun_again(tmp_path: Path) -> None:
    with sfu(tmp_path) as address:
        whip = f"{address.replace('http://', f'whip+http://{TOKEN}@')}/whip"

        async with (
            open_site(Config(serve=ServeConfig(outputs=[whip]))) as site,
            httpx.AsyncClient(base_url=address, timeout=LIMIT_S) as http,
        ):
            watching = [await watch(http) for _ in range(4)]
            for pc, _ in watching:
                for _ in range(20):
                    picture = await frame(pc)
                assert np.abs(picture[40, 40].astype(int) - COLOURS["red"]).max() < 30
            assert site.state.viewers.count == 0

            other = Publication(parse_target(whip), site.live.playback, lambda url: True, ())
            await other.open()  # takes the place of the one before, and the viewers stay
            await site.until(lambda: other.sender.sent > 20)
            for pc, _ in watching:
                for _ in range(60):
                    await frame(pc)
            await other.close()

            for pc, location in watching:
                assert (await http.delete(location)).status_code == 200
                await pc.close()
            unknown = await http.post("/whep", content="v=0", headers=SDP)
            assert unknown.status_code == 406
            refused = await http.post("/whip", content="v=0", headers={**SDP, "Authorization": "Bearer wrong"})
            assert refused.status_code == 401


@pytest.mark.browser
def test_the_page_of_who_only_watches_plays_from_the_media_server(tmp_path: Path) -> None:
    """The state comes by events; who may steer plays from the engine's own server."""
    control = tmp_path / "control"
    control.write_text("control-token-of-this-test")
    steering = {"Authorization": "Bearer control-token-of-this-test"}
    (tmp_path / "sfu").mkdir()
    with sfu(tmp_path / "sfu") as address:
        whip = f"{address.replace('http://', f'whip+http://{TOKEN}@')}/whip"
        words = ("--control-token-file", str(control), "--output", whip, "--whep-url", f"{address}/whep")
        with running_server(painted_server(*words)) as server, chromium() as browser:

            def viewers() -> int:
                return int(httpx.get(f"{server.url}api/state", timeout=LIMIT_S).json()["viewers"])

            browser.get(server.url)
            for prompt, over, under in (("a red circle", 0, 2), ("a blue circle", 2, 0)):
                message = {"type": "prompt", "id": 1, "prompt": prompt}
                said = httpx.post(f"{server.url}api/control", json=message, headers=steering, timeout=LIMIT_S)
                assert said.status_code == 200
                until(browser, lambda seen, at=(over, under): seen["pixels"] and coloured(seen, *at) > 500)  # type: ignore[misc]
                until(browser, lambda _, prompt=prompt: browser.find_element(By.ID, "playing").text == prompt)  # type: ignore[misc]
            assert browser.find_element(By.ID, "status-text").text == "Live"
            assert browser.find_element(By.ID, "readonly").is_displayed() and viewers() == 0
            assert [line for line in console_errors(browser) if "whep" in line] == []

            browser.get("about:blank")
            browser.get(f"{server.url}#token=control-token-of-this-test")
            until(browser, lambda seen: seen["status"] == "Live" and seen["pixels"] and viewers() == 1)
