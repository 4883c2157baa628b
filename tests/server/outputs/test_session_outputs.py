"""Outputs of one session, asked for over the API."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.errors import ConfigError, RequestError
from streamdiff.server.outputs.output import AllowedTargets, Output
from streamdiff.video.files import open_clip
from tests.free_ports import free_port
from tests.server.conftest import bearer, open_site
from tests.server.outputs.test_output import _is_received, _receive

pytestmark = pytest.mark.slow


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
