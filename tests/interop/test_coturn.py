"""A real TURN server, coturn, that checks short-lived credentials. `tools/interop.sh` installs it; see there."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription

from streamdiff.config import Config, IceServer, ServeConfig
from tests.free_ports import free_port
from tests.server.conftest import LIMIT_S, open_site
from tests.server.outputs.test_whip import ROOM, media_server

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.coturn]

SECRET = "north-wind"


@contextmanager
def coturn(folder: Path) -> Iterator[str]:
    """coturn on this machine, which takes who shows credentials made with `SECRET`; its address as a URL."""
    port = free_port()
    path = shutil.which("turnserver")
    assert path is not None
    log = folder / "coturn.log"
    here = "127.0.0.1"
    words = (
        *(path, "-n", "--no-cli", "--no-tls", "--no-dtls", "--allow-loopback-peers", "--realm", "streamdiff.test"),
        *("--use-auth-secret", "--static-auth-secret", SECRET, "--listening-ip", here, "--relay-ip", here),
        *("--listening-port", str(port), "--log-file", "stdout", "--pidfile", str(folder / "pid")),
        *("--userdb", str(folder / "users")),
    )
    with log.open("w") as out, subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, cwd=folder) as process:
        try:
            while True:
                assert process.poll() is None, log.read_text()
                try:
                    socket.create_connection(("127.0.0.1", port), 0.2).close()
                    break
                except OSError:
                    continue
            yield f"turn:127.0.0.1:{port}"
        finally:
            process.terminate()


def relayed_only(sdp: str) -> str:
    """A description without candidates that lead past the TURN server."""
    return re.sub(r"a=candidate:.* typ (?!relay).*\r\n", "", sdp)


@pytest.mark.parametrize("known", [True, False])
async def test_viewer_and_server_meet_at_a_turn_server_with_credentials_of_an_hour(tmp_path: Path, known: bool) -> None:
    """Media goes from relay to relay, so both ends were let in. With another secret neither is."""
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET if known else 'south-wind'}\n")

    with coturn(tmp_path) as url:
        servers = [IceServer(url=url, secret_file=str(secret))]
        async with open_site(Config(serve=ServeConfig(ice_servers=servers))) as site:
            link = (await site.http.options("/whep")).headers["link"]
            found = re.fullmatch(r'<(\S+)>; rel="ice-server"; username="(\d+:\S+)"; credential="(\S+)"; .*', link)
            assert found is not None, link
            server = RTCIceServer(found[1], found[2], found[3])
            pc = RTCPeerConnection(RTCConfiguration(iceServers=[server]))
            pc.addTransceiver("video", direction="recvonly")
            try:
                await pc.setLocalDescription(await pc.createOffer())
                offer = relayed_only(pc.localDescription.sdp)
                assert ("typ relay" in offer) == known
                answer = await site.http.post("/whep", content=offer, headers={"Content-Type": "application/sdp"})
                assert ("typ relay" in answer.text) == known
                if known:
                    assert answer.headers["link"] != link, "each viewer has credentials of its own"
                    description = RTCSessionDescription(relayed_only(answer.text), "answer")
                    await pc.setRemoteDescription(description)
                    await asyncio.wait_for(pc.getReceivers()[0].track.recv(), LIMIT_S)
            finally:
                await pc.close()


async def test_a_publication_reaches_a_media_server_by_a_turn_server(tmp_path: Path) -> None:
    """One that sees no candidate of the publication but its relay's."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)

    with coturn(tmp_path) as url:
        async with media_server() as taking:
            taking.seen = relayed_only
            target = f"whip+http://127.0.0.1:{taking.port}/whip/{ROOM}"
            servers = [IceServer(url=url, secret_file=str(secret))]
            async with open_site(Config(serve=ServeConfig(ice_servers=servers, outputs=[target]))) as site:
                await site.until(lambda: taking.track is not None)
                await taking.frame()
