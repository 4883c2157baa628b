"""Recordings and pushes of a live session, against real receivers: PyAV that reads files, RTMP, UDP and TCP. Outputs of
one session, asked for over the API."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.errors import ConfigError, RequestError
from streamdiff.server.outputs import output as outputs
from streamdiff.server.outputs.output import AllowedTargets, Output, parse_target, parse_targets, read_targets
from streamdiff.video.files import open_clip
from tests.free_ports import free_port
from tests.full_disk import fill
from tests.server.conftest import Site, bearer, in_slots, open_site
from tests.server.scripted import COLOURS, SIZE, Painter

pytestmark = pytest.mark.slow

RECEIVER = """
import sys, av
url, container, option = sys.argv[1:]
options = {"listen": "1"} if option else {}
with av.open(url, format=container, options=options) as source:
    number = 0
    for packet in source.demux(video=0):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:  # it joined between two key frames
            continue
        for frame in frames:
            number += 1
            if number == 40:
                print(*frame.to_ndarray(format="rgb24")[40, 40], frame.width, flush=True)
                sys.exit()
"""


class Snow(Painter):
    """Pictures that take all the bits there are."""

    def _paint(self, stream: object, number: int) -> np.ndarray:
        return np.random.default_rng().integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)


def served(*urls: str, painter: Painter | None = None) -> AbstractAsyncContextManager[Site]:
    return open_site(Config(serve=ServeConfig(outputs=list(urls))), painter)


async def _receive(url: str, container: str, option: str = "") -> asyncio.subprocess.Process:
    words = (sys.executable, "-c", RECEIVER, url, container, option)
    return await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)


async def _is_received(receiver: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(240):
            output, _ = await receiver.communicate()
    finally:
        if receiver.returncode is None:
            receiver.kill()
    *colour, width = (int(word) for word in output.split())
    assert width == SIZE
    assert np.abs(np.subtract(colour, COLOURS["red"])).max() < 30


def _writers() -> list[psutil.Process]:
    running = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in running if "streamdiff.server.outputs.muxer" in each.cmdline()]


def _statuses(site: Site) -> list[outputs.OutputStatus]:
    return [output.status for output in site.state.outputs.configured]


async def test_a_session_is_recorded_as_it_is_shown(tmp_path: Path) -> None:
    files = [tmp_path / "show.mp4", tmp_path / "show.webm"]
    async with served(*map(str, files)) as site:
        await site.until(lambda: all(sent.frames >= 60 for sent in _statuses(site)))
        viewer = await site.watch()
        await viewer.frame()
        state = (await site.http.get("/api/state")).json()["outputs"]
        assert [(each["name"], each["state"]) for each in state] == [("show.mp4", "sending"), ("show.webm", "sending")]
        metrics = (await site.http.get("/metrics")).text
        assert 'streamdiff_output_up{output="show.mp4"} 1.0' in metrics
    assert not _writers()
    for file in files:
        frames = list(open_clip(file))
        assert len(frames) >= 60
        assert frames[0].shape == (SIZE, SIZE, 3)
        assert np.abs(frames[30][40, 40].astype(int) - COLOURS["red"]).max() < 30
        with av.open(str(file)) as container:
            times = [float(frame.time) for frame in container.decode(video=0)]
        steps = np.diff(times)
        assert times[0] == pytest.approx(0, abs=0.05)
        assert (steps > 0).all()
        assert np.median(steps) == pytest.approx(1 / 40, abs=0.002)


@pytest.mark.parametrize(("scheme", "container"), [("rtmp", "flv"), ("udp", "mpegts"), ("tcp", "mpegts")])
async def test_a_session_is_pushed_and_comes_back_when_its_receiver_does(
    scheme: str, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "BACK_OFF_S", (0.2,))
    port = free_port(socket.SOCK_DGRAM if scheme == "udp" else socket.SOCK_STREAM)
    url = f"{scheme}://127.0.0.1:{port}" + ("/live/secret" if scheme == "rtmp" else "")
    listening = url + ("?listen=1" if scheme == "tcp" else "")
    async with served(url) as site:
        [sent] = _statuses(site)
        for _ in range(2):
            receiver = await _receive(listening, container, "listen" if scheme == "rtmp" else "")
            await _is_received(receiver)
            assert sent.state == "retrying" or not sent.reason, "of what is over"
            if scheme != "udp":  # nobody there is no news to UDP
                restarts = sent.restarts
                await site.until(lambda restarts=restarts: sent.restarts > restarts)
                assert sent.reason
        assert "secret" not in str((await site.http.get("/api/state")).json())
        assert "secret" not in (await site.http.get("/metrics")).text
    assert not _writers()


async def test_a_writer_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, regular_stamps: None
) -> None:
    monkeypatch.setattr(outputs, "STUCK_S", 120.0)  # it is not given up while a busy machine plays the frames below
    async with served(str(tmp_path / "show.mp4"), painter=Snow(chunk_s=0.02)) as site:
        [sent] = _statuses(site)
        viewer = await site.watch()
        await site.until(lambda: sent.frames > 20)
        [writer] = _writers()
        writer.send_signal(signal.SIGSTOP)
        frames = sent.frames
        await site.until(lambda: sent.dropped > 0)
        stamps = [(await viewer.frame()).pts for _ in range(60)]
        assert in_slots(stamps[20:], 2250)
        writer.send_signal(signal.SIGCONT)
        await site.until(lambda: sent.frames > frames + 100)
        assert sent.restarts == 0
    assert len(list(open_clip(tmp_path / "show.mp4"))) > 100


@pytest.mark.parametrize("ending", [".mp4", ".webm"])
async def test_a_recording_that_breaks_off_can_be_played_and_is_not_written_over(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "BACK_OFF_S", (0.1,))
    async with served(str(tmp_path / f"show{ending}")) as site:
        [sent] = _statuses(site)
        await site.until(lambda: sent.frames > 140)
        [writer] = _writers()
        writer.kill()
        await site.until(lambda: sent.restarts == 1 and sent.state == "sending")
        frames = sent.frames
        await site.until(lambda: sent.frames > frames + 20)
    assert len(list(open_clip(tmp_path / f"show{ending}"))) >= 40
    assert len(list(open_clip(tmp_path / f"show-2{ending}"))) >= 20


@pytest.mark.parametrize("early", [False, True])
async def test_a_recording_waits_on_a_full_disk_and_goes_on_in_a_new_file(
    early: bool, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outputs, "BACK_OFF_S", (0.05,))
    if early:
        fill(small_disk)
    async with served(str(small_disk / "show.mp4"), painter=Snow(chunk_s=0.02)) as site:
        [sent] = _statuses(site)
        if not early:
            await site.until(lambda: sent.frames > 120)
            fill(small_disk)
        await site.until(lambda: sent.restarts > 5)
        assert len(list(small_disk.glob("*.mp4"))) == (not early)
        assert sum("broke off" in record.getMessage() for record in caplog.records) <= 2, "said once for each reason"
        (small_disk / "filler").unlink()
        frames = sent.frames
        await site.until(lambda: sent.frames > frames + 80)
    videos = list(small_disk.glob("*.mp4"))
    assert len(videos) == 2 - early
    assert all(len(list(open_clip(video))) >= 10 and video.stat().st_mode & 0o777 == 0o600 for video in videos)


@pytest.mark.parametrize(
    "text",
    [
        "show.avi", "ftp://example.org/x", "rtmp:///live", "RTMP:///live", "rtmp://host:99999/live",
        "rtmp://host:0/live", "rtmp://[::1/live", "rtmp://a host/live", "tcp://host/live", "/nowhere/at/all/show.mp4",
        "whip+https:///x", "whip+https://ann:secret@host.example/x", "whip+https://caf%C3%A9:secret@host.example/x",
        "whip+https://two%0Alines@host.example/x",
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_target(text)
    assert "secret" not in str(refused.value)


async def test_outputs_come_from_a_file_that_is_not_shown(tmp_path: Path) -> None:
    file, show = tmp_path / "outputs", tmp_path / "show.mp4"
    file.write_text(f"\ufeff{show}\n\n  RTMP://host.example/live/Key1\r\n")
    targets = parse_targets(read_targets(str(file)))
    assert [target.name for target in targets] == ["show.mp4", "rtmp://host.example"]
    assert targets[1].url == "rtmp://host.example/live/Key1"
    file.write_text("ftp://host.example/live/key1\n")
    with pytest.raises(ConfigError) as caught:
        parse_targets(read_targets(str(file)))
    assert "key1" not in str(caught.value)
    with pytest.raises(ConfigError):
        read_targets(str(tmp_path / "none"))
    file.write_text(str(show))
    async with open_site(Config(serve=ServeConfig(outputs_file=str(file)))) as site:
        await site.until(lambda: _statuses(site)[0].frames > 20)
    assert show.stat().st_size > 1000


def test_a_recording_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "show.mp4").write_text("precious")
    with pytest.raises(ConfigError):
        parse_target(str(tmp_path / "show.mp4"))
    (tmp_path / "tell-2.mp4").write_text("precious")
    recording = parse_target(str(tmp_path / "tell.mp4"))
    assert [Path(recording.attempt(number)).name for number in range(3)] == ["tell.mp4", "tell-3.mp4", "tell-3.mp4"]
    with pytest.raises(ConfigError):
        parse_targets([str(tmp_path / "a.mp4")] * 2)
    two = parse_targets(["rtmp://host.example/live/key1", "rtmp://host.example/live/key2"])
    assert [target.name for target in two] == ["rtmp://host.example", "rtmp://host.example #2"]


async def test_a_session_that_was_opened_is_recorded_and_sent_on_until_it_ends(tmp_path: Path) -> None:
    port = free_port()
    allowed = [str(tmp_path), f"tcp://127.0.0.1:{port}"]
    async with open_site(Config(serve=ServeConfig(output_targets=allowed))) as site:
        opened = (await site.http.post("/api/sessions", json={"prompt": "red"})).json()
        here, token = f"/api/sessions/{opened['id']}/outputs", bearer(opened["control_token"])
        assert (await site.http.post(here, json={"target": "show.mp4"})).status_code == 401
        assert (
            await site.http.post(here, json={"target": "show.mp4"}, headers=bearer(opened["view_token"]))
        ).status_code == 403
        receiver = await _receive(f"tcp://127.0.0.1:{port}", "mpegts", "listen")
        made = [await site.http.post(here, json={"target": each}, headers=token) for each in ("show.mp4", allowed[1])]
        assert [each.status_code for each in made] == [201, 201]
        file, address = (each.json() for each in made)
        await _is_received(receiver)

        async def state(id: str) -> dict[str, object]:
            listed = (await site.http.get(here, headers=token)).json()["outputs"]
            return next(each for each in listed if each["id"] == id)

        while int(str((await state(file["id"]))["frames"])) < 40:
            await asyncio.sleep(0.05)
        assert f'output="{file["name"]}"' in (await site.http.get("/metrics")).text
        again = await site.http.post(here, json={"target": "show.mp4"}, headers=token)
        assert again.status_code == 422 and str(tmp_path) not in again.text
        assert (await site.http.delete(made[1].headers["location"], headers=token)).status_code == 204
        assert (await site.http.delete(made[1].headers["location"], headers=token)).status_code == 404
        assert address["name"] not in (await site.http.get("/metrics")).text
        others = (await site.http.get("/api/sessions/default/outputs")).json()
        assert others == {"outputs": []}, "each session has its own"
        assert (await site.http.delete(f"/api/sessions/{opened['id']}", headers=token)).status_code == 200
        await site.until(lambda: not site.state.outputs._added)
        assert len(list(open_clip(tmp_path / "show.mp4"))) >= 40, "complete when the session has ended"


async def test_there_is_a_limit(tmp_path: Path) -> None:
    async with open_site(Config(serve=ServeConfig(output_targets=[str(tmp_path)]))) as site:
        outputs = "/api/sessions/default/outputs"
        answers = [await site.http.post(outputs, json={"target": f"{number}.mp4"}) for number in range(5)]
        assert [each.status_code for each in answers] == [201] * 4 + [422]


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("rtmp://live.example.org/app/key", True),
        ("rtmp://live.example.org/app", True),
        ("rtmp://live.example.org/application", False),
        ("rtmp://live.example.org/app/../admin", False),
        ("rtmp://live.example.org/app/%2e%2e/admin", False),
        ("rtmp://live.example.org/app/key listen=1", False),
        ("rtmp://live.example.org/app/key?x=1", False),
        ("rtmp://live.example.org:1936/app/key", False),
        ("rtmp://live.example.org@evil.example/app/key", False),
        ("rtmp://live.example.org/app/\nkey", False),
        ("rtmps://live.example.org/app/key", False),
        ("whip+https://token@sfu.example.org/whip/room", True),
        ("whip+https://sfu.example.org.evil.example/whip/room", False),
        ("tcp://127.0.0.1:22", False),
        ("tcp://[::1]:9000/live/x", True),
        ("tcp://evil.example.org:80[::1]:9000/live/x", False),  # Python: ::1, FFmpeg: evil.example.org
        ("http://[", False),
        ("file:///etc/passwd", False),
        ("show.mp4", True),
        ("show.avi", False),
        ("../show.mp4", False),
        ("/tmp/show.mp4", False),
        ("a\0.mp4", False),
        ("a\nb.mp4", False),
        ("a" * 300 + ".mp4", False),
        (".mp4", False),
    ],
)
def test_only_what_the_operator_lists_is_written(target: str, allowed: bool, tmp_path: Path) -> None:
    addresses = ("rtmp://live.example.org/app", "whip+https://sfu.example.org/whip/", "tcp://[::1]:9000/live")
    known = AllowedTargets([str(tmp_path), *addresses])
    if allowed:
        known.parse(target)
        return
    with pytest.raises(RequestError) as refused:
        known.parse(target)
    assert refused.value.field == "target" and str(tmp_path) not in str(refused.value)
    assert "evil" not in str(refused.value) or "not among" in str(refused.value)


async def test_an_output_counts_until_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site(Config(serve=ServeConfig(output_targets=[str(tmp_path)]))) as site:
        outputs, ending, may_end, stop = "/api/sessions/default/outputs", asyncio.Event(), asyncio.Event(), Output.stop

        async def slow(output: Output) -> None:
            ending.set()
            await may_end.wait()
            await stop(output)

        monkeypatch.setattr(Output, "stop", slow)
        made = [await site.http.post(outputs, json={"target": f"{number}.mp4"}) for number in range(4)]
        deleting = asyncio.create_task(site.http.delete(made[0].headers["location"]))
        await ending.wait()
        assert (await site.http.post(outputs, json={"target": "more.mp4"})).status_code == 422
        may_end.set()
        assert (await deleting).status_code == 204
        assert (await site.http.post(outputs, json={"target": "more.mp4"})).status_code == 201


def test_a_list_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    for target in (str(tmp_path / "none"), "gopher://127.0.0.1"):
        with pytest.raises(ConfigError):
            AllowedTargets([target])
