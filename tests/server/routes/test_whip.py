"""Video that comes in over WHIP: sent by a peer, fitted, used by the stream, told, refused by name, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import fractions
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiortc.rtcrtpreceiver
import av
import httpx
import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription, VideoStreamTrack
from aiortc.codecs import get_decoder

from streamdiff import clock
from streamdiff.config import Config, PlaybackConfig, SessionConfig
from streamdiff.engine.messages import InputFrames, InputUsed, SetInput
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.server.webrtc import aiortc_compat, peer_connections
from streamdiff.server.webrtc.aiortc_compat import RECEIVE_WINDOW_BYTES
from streamdiff.server.webrtc.peer_connections import with_start_bitrate
from tests.server.conftest import Site, open_site
from tests.small import CPU, small_encoder, small_model

pytestmark = pytest.mark.slow
MODEL = small_model(4, layers=2)
SIZE = (MODEL.spec.width, MODEL.spec.height)
SDP = {"Content-Type": "application/sdp"}


class Colour(VideoStreamTrack):
    """A camera: pictures of one colour, of the `size` they have by then, with another colour outside their middle."""

    def __init__(self, colour: tuple[int, int, int], size: tuple[int, int] = (320, 180)) -> None:
        super().__init__()
        self.colour, self.size, self.sent = colour, size, 0
        self.running = asyncio.Event()
        self.running.set()

    async def recv(self) -> av.VideoFrame:
        await self.running.wait()
        await asyncio.sleep(0.02)
        width, height = self.size
        picture = np.zeros((height, width, 3), np.uint8)
        side = min(width, height)
        picture[:, (width - side) // 2 : (width + side) // 2] = self.colour
        frame = av.VideoFrame.from_ndarray(picture, "rgb24")
        self.sent += 1
        frame.pts, frame.time_base = self.sent * 1800, fractions.Fraction(1, 90000)
        return frame


class Sender:
    """A peer that sends a track."""

    def __init__(self, site: Site, track: VideoStreamTrack, codec: str = "VP8", audio: bool = False) -> None:
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.site, self.location = site, ""
        if audio:
            self.pc.addTransceiver("audio", direction="sendonly")
        transceiver = self.pc.addTransceiver(track, direction="sendonly")
        known = transceiver.sender.getCapabilities("video")
        assert known is not None
        transceiver.setCodecPreferences([each for each in known.codecs if each.name == codec])

    async def post(self, path: str = "/whip", headers: dict[str, str] | None = None) -> httpx.Response:
        await self.pc.setLocalDescription(await self.pc.createOffer())
        content = self.pc.localDescription.sdp
        answer = await self.site.http.post(path, content=content, headers={**SDP, **(headers or {})})
        if answer.status_code == 201:
            self.location = answer.headers["location"]
            await self.pc.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        return answer


@contextlib.asynccontextmanager
async def sending(site: Site, track: VideoStreamTrack, *where: Any, **how: Any) -> AsyncIterator[Sender]:
    sender = Sender(site, track, **how)
    try:
        answer = await sender.post(*where)
        assert answer.status_code == 201, answer.text
        yield sender
    finally:
        await sender.pc.close()


@contextlib.asynccontextmanager
async def served(config: Config | None = None) -> AsyncIterator[Site]:
    """A server whose model encodes video."""
    pictures = ImageEncoder(lambda: small_encoder(4), MODEL.spec)
    pipeline: Any = StreamingPipeline(MODEL, CPU, parts=local_parts(MODEL, CPU, 2), pictures=pictures)
    async with open_site(config or Config(playback=PlaybackConfig(max_ahead_s=1.0)), pipeline) as site:
        yield site


def fed(site: Site) -> list[np.ndarray]:
    """The frames that the engine was handed."""
    return [picture for each in site.client.sent if isinstance(each, InputFrames) for picture in each.pictures]


async def used(site: Site, frames: int = 1, figure: str = "used") -> dict[str, Any]:
    """The default session's statistics, once so many frames were used."""
    async with asyncio.timeout(240):
        while True:
            figures = (await site.http.get("/api/state")).json()["stats"]["input"]
            if figures is not None and figures[figure] >= frames:
                return dict(figures)
            await asyncio.sleep(0.02)


async def state(site: Site, session: str = "default") -> dict[str, Any]:
    return dict((await site.http.get("/api/state", params={"session": session})).json()["state"])


@pytest.mark.parametrize("codec", ["VP8", "H264"])
async def test_what_is_sent_is_fitted_and_the_stream_starts_from_it(codec: str) -> None:
    async with served() as site:
        viewer = await site.watch()
        await viewer.frame()
        camera = Colour((20, 200, 30))
        async with sending(site, camera, codec=codec, audio=True) as sender:
            figures = await used(site, 2 * MODEL.spec.chunk_frames)
            assert figures["level"] is not None and figures["fps"] >= 0
            assert figures["size"] == [320, 180]
            middle = np.median(fed(site)[-1].reshape(-1, 3), axis=0)
            assert fed(site)[-1].shape == (*SIZE[::-1], 3), "the middle, at the model's size"
            assert np.abs(middle - camera.colour).max() < 30
            told = await state(site)
            assert told["input"] == {"kind": "WHIP sender", "strength": 0.4, "fault": ""}
            camera.colour, camera.size = (220, 30, 30), (120, 200)  # another size in mid-call
            await site.until(lambda: np.abs(np.median(fed(site)[-1].reshape(-1, 3), axis=0) - camera.colour).max() < 40)
            ended = await site.http.delete(sender.location)
            assert ended.status_code == 200
            assert (await state(site))["input"] is None
            assert [each.strength for each in site.client.sent if isinstance(each, SetInput)] == [0.4, None]
            await viewer.frame()
            assert (await site.http.delete(sender.location)).status_code == 200, "it has ended, as is asked for"
            assert (await site.http.delete(f"{sender.location}x")).status_code == 404


async def test_strength_changes_live_with_receipts_and_is_refused_where_nothing_feeds() -> None:
    async with served() as site:
        viewer = await site.watch()
        await viewer.frame()
        await viewer.message({"type": "hello"})  # the channel is open then
        viewer.channel.send('{"type": "strength", "strength": 0.4, "id": 1}')
        refused = await viewer.message({"id": 1})
        assert refused["code"] == "no_input" and refused["field"] == "strength"
        async with sending(site, Colour((9, 9, 9)), "/whip?strength=0.8"):
            assert (await state(site))["input"]["strength"] == 0.8
            await used(site)
            viewer.channel.send('{"type": "strength", "strength": 0.3, "id": 2}')
            for stage in ("accepted", "applied", "shown"):
                assert (await viewer.message({"type": "receipt", "id": 2, "stage": stage}))["kind"] == "strength"
            assert (await state(site))["input"]["strength"] == 0.3
            session = "/api/sessions/default"
            changed = await site.http.patch(session, json={"strength": 0.5, "fps": 30})
            assert changed.status_code == 200, changed.text
            told = (await site.http.get(session)).json()
            assert told["fps"] == 30.0
            assert told["input"] == {"kind": "WHIP sender", "strength": 0.5, "fault": ""}
            viewer.channel.send('{"type": "strength", "strength": 1.5, "id": 3}')
            assert (await viewer.message({"id": 3}))["code"] == "out_of_range"
        await site.until(lambda: site.state.manager.sessions[0].input is None)
        refused = await site.http.patch(session, json={"strength": 0.5, "fps": 20})
        assert (refused.status_code, refused.json()["field"]) == (422, "strength")
        assert (await site.http.get(session)).json()["fps"] == 30.0, "nothing of it was changed"


async def test_a_sender_that_vanished_gives_way_and_a_still_screen_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "SILENT_S", 60.0)  # a busy machine may be silent for long
    async with served() as site:
        await (await site.watch()).frame()
        camera, second = Colour((9, 9, 9)), Sender(site, Colour((9, 9, 9)))
        async with sending(site, camera, "/whip?on_end=end") as first:
            await used(site)
            camera.running.clear()
            [feeder] = site.state.feeders._peers.values()
            await site.until(lambda: feeder.video_input.holds)
            for _ in range(2):  # RTCP or STUN comes
                heard_s = feeder.heard_s
                await site.until(lambda heard_s=heard_s: feeder.heard_s > heard_s)
            refused = await second.post()
            assert (refused.status_code, refused.json()["code"]) == (409, "fed")
            aiortc_compat._drop_sockets(first.pc)
            monkeypatch.setattr(peer_connections, "SILENT_S", 0.1)
            await site.until(lambda: clock.monotonic_s() - feeder.heard_s > 0.1)
            async with sending(site, Colour((20, 200, 30))):
                await site.until(lambda: np.median(fed(site)[-1].reshape(-1, 3), axis=0)[1] > 150)
                assert len(site.state.feeders._peers) == 1
                assert (await site.http.delete(first.location)).status_code == 200, "of the one that vanished"
                assert (await state(site))["input"] is not None
        await second.pc.close()


class Garbage(VideoStreamTrack):
    """Packets that say they are encoded video, and are not."""

    async def recv(self) -> Any:
        await asyncio.sleep(0.01)
        packet = av.Packet(b"\x9d\x01\x2a" + bytes(200))
        packet.pts = packet.dts = clock.monotonic_s() * 90000 // 1
        packet.time_base = fractions.Fraction(1, 90000)
        return packet


async def test_video_that_cannot_be_decoded_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_connections, "UNDECODABLE_S", 0.5)
    async with served() as site:
        await (await site.watch()).frame()
        async with sending(site, Garbage()):
            [feeder] = site.state.feeders._peers.values()
            await site.until(lambda: feeder.video_input is not feeder.session.input)
            assert (await state(site))["input"] is None
        await site.until(lambda: not site.state.feeders._peers)
        monkeypatch.setattr(peer_connections, "UNDECODABLE_S", 60.0)  # a busy machine takes long to decode the first
        async with sending(site, Colour((9, 9, 9))):
            await used(site)
    [line] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert line.args == {"session": "default", "reason": "fault"}, "and none for each frame"


async def test_an_input_is_ended_by_whoever_may_steer(tmp_path: Path) -> None:
    where, path = "/api/sessions/default/input", tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height = 64, 48
        for _ in range(1500):
            container.mux(stream.encode(av.VideoFrame(64, 48, "yuv420p")))
        container.mux(stream.encode())
    session = SessionConfig(input=str(path))
    async with served(Config(session=session, playback=PlaybackConfig(max_ahead_s=1.0))) as site:
        await site.watch()
        await used(site)
        assert (await site.http.delete(where)).status_code == 204
        assert (await state(site))["input"] is None
        async with sending(site, Colour((9, 9, 9))):
            assert (await site.http.delete(where)).status_code == 204
            assert (await state(site))["input"] is None
            nothing = await site.http.delete(where)
            assert (nothing.status_code, nothing.json()["code"]) == (404, "no_input")


async def test_a_senders_data_channels_are_bounded_as_a_viewers_are() -> None:
    async with served() as site:
        sender = Sender(site, Colour((9, 9, 9)))
        sender.pc.createDataChannel("more")
        assert (await sender.post()).status_code == 201
        [feeder] = site.state.feeders._peers.values()
        assert feeder.pc.sctp is not None
        assert feeder.pc.sctp._advertised_rwnd == RECEIVE_WINDOW_BYTES
        await sender.pc.close()


class HeldDecoder:
    """aiortc's decoder of a codec, which decodes nothing before it `may`."""

    may: threading.Event

    def __init__(self, codec: Any) -> None:
        self.real = get_decoder(codec)

    def decode(self, frame: Any) -> list[Any]:
        self.may.wait()
        return list(self.real.decode(frame))


@pytest.fixture
def may_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    HeldDecoder.may = threading.Event()
    monkeypatch.setattr(aiortc.rtcrtpreceiver, "get_decoder", HeldDecoder)
    yield HeldDecoder.may
    HeldDecoder.may.set()


async def test_nobody_waits_for_a_frame_that_takes_long_to_decode(may_decode: threading.Event) -> None:
    """aiortc waits for all of them, on the event loop."""
    async with served() as site, sending(site, Colour((200, 20, 30))) as sender:
        await used(site, figure="left_out")
        [feeder] = site.state.feeders._peers.values()
        too_late = threading.Timer(20, may_decode.set)  # or an event loop that waits would wait for ever
        too_late.start()
        ending = asyncio.create_task(site.http.delete(sender.location))
        while feeder.queue._thread is None:  # until its decoder has been told to end
            await asyncio.sleep(0.02)
        assert not may_decode.is_set()
        too_late.cancel()
        may_decode.set()
        assert (await ending).status_code == 200


async def test_bad_offers_are_refused_by_name_and_the_stream_goes_on() -> None:
    async with served() as site:
        viewer = await site.watch()
        await viewer.frame()
        receiving = await site.offer(control=False)
        receive = receiving.pc.localDescription.sdp
        hevc = receive.replace("a=recvonly", "a=sendonly").replace("VP8/90000", "H265/90000").replace("H264/", "H265/")
        send = receive.replace("a=recvonly", "a=sendonly")
        text = "m=text 9 UDP/TLS/RTP/SAVPF 98\r\na=mid:text\r\n"
        video = send[send.index("m=video") :].replace("a=mid:0", "a=mid:1")
        for body, status, code in (
            (b"v=0", 400, "offer"),
            (b"hello", 400, "offer"),
            (b"\xff\xfe", 400, "400"),
            (receive.encode(), 406, "offer"),
            (hevc.encode(), 406, "codec"),
            ((send + video).encode(), 406, "offer"),
            ((send + text).encode(), 406, "offer"),
        ):
            answer = await site.http.post("/whip", content=body, headers=SDP)
            assert (answer.status_code, answer.json().get("code", "400")) == (status, code), answer.text
        assert (await site.http.post("/whip", content=b"{}")).status_code == 415
        assert (await site.http.post("/whip?strength=7", content=b"v=0", headers=SDP)).status_code == 400
        assert (await site.http.patch("/whip/default/nobody", content=b"")).status_code == 415
        assert (await state(site))["input"] is None
        assert site.state.viewers.count == 1
        await viewer.frame()


async def test_video_that_cannot_be_encoded_ends_the_connection_and_not_the_stream() -> None:
    async with served() as site:
        viewer = await site.watch()
        await viewer.frame()
        async with sending(site, Colour((9, 9, 9))):
            await used(site)
            await site.client.inject(InputUsed("default", None, 0, 0, "no memory"))
            live = site.live
            await site.until(lambda: live.input is None)
            await viewer.frame()


def test_chromium_is_told_to_begin_with_a_good_picture() -> None:
    answer = "v=0\r\nm=audio 9 X 8\r\na=rtpmap:8 PCMA/8000\r\nm=video 9 X 97 98 99\r\na=rtpmap:97 VP8/90000\r\n"
    answer += (
        "a=rtpmap:98 rtx/90000\r\na=fmtp:98 apt=97\r\na=rtpmap:99 H264/90000\r\na=fmtp:99 packetization-mode=1\r\n"
    )
    lines = with_start_bitrate(answer).split("\r\n")
    assert "a=fmtp:97 x-google-start-bitrate=2500" in lines
    assert "a=fmtp:99 packetization-mode=1;x-google-start-bitrate=2500" in lines
    assert "a=fmtp:98 apt=97" in lines
    assert len(lines) == len(answer.split("\r\n")) + 1
