"""Jobs outlive what ends around them: the server, the engine, the memory they ran in; and then they expire."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from streamdiff import clock
from streamdiff.config import ServeConfig
from streamdiff.engine import messages
from streamdiff.engine.features import Features
from streamdiff.engine.process.supervisor import Restarting
from streamdiff.errors import ConfigError
from streamdiff.server.jobs import runner
from streamdiff.server.jobs import store as store_module
from streamdiff.server.jobs.store import ENDED, KEEP_S, PICTURE, JobStore, VideoRequest
from streamdiff.server.metrics import Metrics
from tests.full_disk import fill
from tests.server.conftest import bearer
from tests.server.jobs.test_videos import ask, ended, making, pictures_of, refusal, yellow_png
from tests.server.outputs.test_output import Snow
from tests.server.scripted import INFO, Painter
from tests.server.test_restart import serving

REQUEST = VideoRequest("scripted", "a blue star", 1, 4, 20, 40.0, 128, 128)


async def _ask(http: httpx.AsyncClient, frames: int) -> str:
    """Ask for a video as soon as the server is there; its id."""
    while (answer := await http.post("/v1/videos", json={"prompt": "blue", "num_frames": frames})).status_code == 503:
        await asyncio.sleep(0.05)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def _until(http: httpx.AsyncClient, id: str, condition: Any) -> dict[str, Any]:
    async with asyncio.timeout(240):
        while True:
            answer = await http.get(f"/v1/videos/{id}")
            if answer.status_code == 200 and condition(video := answer.json()):
                return dict(video)
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
async def test_a_killed_server_loses_no_job_and_leaves_no_half_video(tmp_path: Path) -> None:
    """One job done, one under way, one waiting when the server is killed; the next server has all three whole."""
    folder = tmp_path / "jobs"
    async with serving("--jobs-dir", str(folder), code=-signal.SIGKILL) as (server, http):
        done = await _ask(http, 8)
        await _until(http, done, lambda video: video["status"] == "completed")
        running, waiting = await _ask(http, 400), await _ask(http, 8)
        await _until(http, running, lambda video: 20 < video["progress"] < 90)
        server.process.kill()
    assert {entry.suffix for entry in folder.iterdir()} >= {".mp4", ".part"}
    assert [each.name for each in folder.glob("*.mp4")] == [f"{done}.mp4"]
    written = (folder / f"{done}.mp4").read_bytes()
    async with serving("--jobs-dir", str(folder)) as (server, http):
        videos = []
        await _until(http, waiting, lambda video: video["status"] in ("completed", "failed"))  # which comes last
        for id in (done, running, waiting):
            video = await _until(http, id, lambda video: True)
            assert (video["status"], video["error"]) == ("completed", None)
            videos.append((await http.get(f"/v1/videos/{id}/content")).content)
    assert [len(pictures_of(video)) for video in videos] == [8, 400, 8]
    assert videos[0] == written, "what was whole is not made again"
    assert not list(folder.glob("*.part"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
async def test_a_job_goes_on_with_the_next_engine_and_one_that_ends_it_again_and_again_is_given_up(
    tmp_path: Path,
) -> None:
    """Each engine paints twelve chunks and fails; three of them are the default session's."""
    options = ("--name", "dies-12", "--jobs-dir", str(tmp_path / "jobs"), "--restarts", "20")
    async with serving(*options, code=None) as (_, http):
        first, second, never = [await _ask(http, frames) for frames in (6 * 8, 6 * 8, 40 * 8)]
        for id in (first, second):
            await _until(http, id, lambda video: video["status"] == "completed")
        failed = await _until(http, never, lambda video: video["status"] == "failed")
        assert failed["error"]["message"] == "the engine failed 3 times while this was made"
        answer = await http.get(f"/v1/videos/{never}/content")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "failed")


@pytest.mark.slow
async def test_jobs_beside_one_that_ends_the_engine_are_made(tmp_path: Path) -> None:
    """Three run at once, and the engine ends with the last of them, as often as it is opened."""
    ready, opened, beside = messages.Ready(**asdict(INFO)), dict[str, str](), list[int]()
    store, loop = JobStore(tmp_path), asyncio.get_running_loop()
    for prompt in ("a", "b", "bad"):
        store.add(replace(REQUEST, prompt=prompt, frames=8), "")

    def paint(session: str) -> None:
        if beside:
            jobs.take(messages.FrameBatch(session, 0, 0, 0, 0.1, np.zeros((8, 128, 128, 3), np.uint8)))

    async def send(command: messages.Command) -> None:
        if isinstance(command, messages.Close):
            opened.pop(command.session, None)
        if not isinstance(command, messages.Open):
            return
        opened[command.session] = command.prompt
        loop.call_later(0.1, paint, command.session)
        if "bad" in opened.values() and (beside or len(opened) == 3):
            beside.append(len(opened) - 1)
            jobs.take(Restarting("it has ended", 1))
            loop.call_soon(jobs.take, ready)

    config = ServeConfig(jobs_dir=str(tmp_path))
    jobs = runner.JobRunner(store, config, send, lambda: ready, Metrics(), at_once=3)
    await jobs.start()
    async with asyncio.timeout(240):
        while not all(job.status in ENDED for job in await jobs.page(after=None, limit=3, order="asc") or ()):
            await asyncio.sleep(0.02)
    made = await jobs.page(after=None, limit=3, order="asc")
    assert made is not None and [job.status for job in made] == ["completed", "completed", "failed"]
    assert beside == [2, 0, 0]
    await jobs.stop()


@pytest.mark.slow
async def test_a_session_that_has_no_memory_gets_that_of_a_job_which_begins_again_later(tmp_path: Path) -> None:
    async with making(tmp_path, Painter(chunk_s=0.02, fits=2)) as site:
        job = await ask(site, num_frames=160)
        async with asyncio.timeout(240):
            while not (await site.http.get(f"/v1/videos/{job['id']}")).json()["progress"]:
                await asyncio.sleep(0.02)
        opened = await site.http.post("/api/sessions", json={"prompt": "green"})
        assert opened.status_code == 201, opened.text
        assert (await site.http.get(f"/v1/videos/{job['id']}")).json()["status"] in ("queued", "in_progress")
        assert (await site.http.post("/api/sessions", json={"prompt": "green"})).status_code == 503
        session = opened.json()
        await site.http.delete(f"/api/sessions/{session['id']}", headers=bearer(session["control_token"]))
        assert (await ended(site, job["id"]))["status"] == "completed"
        video = (await site.http.get(f"/v1/videos/{job['id']}/content")).content
        assert len(pictures_of(video)) == 160


def test_videos_outlive_a_clock_that_jumps_and_expire_by_the_time_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    year_s = 3e7

    def expired(wall_s: float, monotonic_s: float) -> list[str]:
        monkeypatch.setattr(clock, "wall_s", lambda: wall_s)
        monkeypatch.setattr(clock, "monotonic_s", lambda: monotonic_s)
        return store.expire()

    store = JobStore(tmp_path)
    assert expired(1000.0, 50.0) == []
    job = store.add(REQUEST, "somebody")
    store.begin()
    store.path(job.id).write_bytes(b"video")
    store.complete(job.id, None, None)
    for wall_s, monotonic_s in ((1060.0, 110.0), (year_s, 170.0), (2000.0, 230.0), (year_s, 290.0)):
        assert expired(wall_s, monotonic_s) == []
    found = store.get(job.id)
    assert found is not None and found.expires_s == year_s + KEEP_S - 240, "four minutes have passed"
    for wall_s in (2 * year_s, 1000.0):  # while no server ran
        store.close()
        store = JobStore(tmp_path)
        assert store.recover() == 0 and expired(wall_s, 50.0) == []
    assert expired(1000.0 + KEEP_S - 3841, 50.0 + KEEP_S - 3841) == []
    assert expired(1000.0 + KEEP_S - 3839, 50.0 + KEEP_S - 3839) == [job.id], "without a server it counts for an hour"
    store.close()


@pytest.mark.slow
async def test_videos_expire_with_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "KEEP_S", 0.4)
    monkeypatch.setattr(runner, "EXPIRE_S", 0.1)
    async with making(tmp_path) as site:
        job = await ask(site)
        async with asyncio.timeout(240):
            while (await site.http.get(f"/v1/videos/{job['id']}")).status_code != 404:
                await asyncio.sleep(0.05)
        assert not list(tmp_path.glob("*.mp4"))


@pytest.mark.slow
async def test_on_a_full_disk_jobs_wait_and_requests_are_told_and_then_all_goes_on(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "DISK_RETRY_S", 0.2)
    async with making(small_disk / "jobs", Snow(chunk_s=0.02)) as site:
        kept = await ended(site, (await ask(site, num_frames=8))["id"])
        running, waiting = await ask(site, num_frames=120), await ask(site, num_frames=8)
        await _until(site.http, running["id"], lambda video: video["progress"] > 20)
        filler = fill(small_disk)
        for picture in ("", yellow_png()):
            full = await site.http.post("/v1/videos", json={"prompt": "blue", "input_reference": picture})
            assert refusal(full) == (507, None, "storage") and int(full.headers["retry-after"]) > 0
        jobs = site.state.jobs
        await site.until(lambda: jobs is not None and not any(run.in_engine for run in jobs._runs.values()))
        assert not list(small_disk.rglob("*.part"))
        for job in (running, waiting):
            shown = (await site.http.get(f"/v1/videos/{job['id']}")).json()
            assert shown["status"] in ("queued", "in_progress")
        assert (await site.http.delete(f"/v1/videos/{kept['id']}")).status_code == 200, "which makes room"
        fill(small_disk)
        said = [record for record in caplog.records if "jobs_dir" in record.getMessage()]
        assert len(said) == 1 and said[0].exc_info is None
        filler.unlink()
        for job in (running, waiting):
            assert (await ended(site, job["id"]))["status"] == "completed"
        video = (await site.http.get(f"/v1/videos/{running['id']}/content")).content
        assert len(pictures_of(video)) == 120


@pytest.mark.slow
def test_one_server_at_a_time_uses_a_folder_and_none_of_a_later_version(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    with pytest.raises(ConfigError) as locked:
        JobStore(tmp_path)
    store.close()
    JobStore(tmp_path).close()
    with sqlite3.connect(tmp_path / "jobs.sqlite3") as database:
        database.execute("PRAGMA user_version = 7")
    database.close()
    with pytest.raises(ConfigError) as later:
        JobStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as no_folder:
        JobStore(tmp_path / "file")
    assert {each.value.field for each in (locked, later, no_folder)} == {"serve.jobs_dir"}


def test_a_store_recovers_what_was_running_and_what_was_taken_away(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    first, second, third = (store.add(REQUEST, "somebody") for _ in range(3))
    for job in (first, second):
        store.begin()
        if job is first:
            store.path(job.id).write_bytes(b"video")
            store.complete(job.id, None, None)
    (tmp_path / ".streamdiff-0123456789ab.part").write_bytes(b"half")
    others = {"holiday.mp4", "video_1.mp4", "large.iso.part", "notes.txt", f"video_{'0' * 32}.mp4"}
    for name in others:
        (tmp_path / name).write_text("somebody's own")
    store.close()
    store = JobStore(tmp_path)
    assert store.recover() == 2
    assert {entry.name for entry in tmp_path.iterdir() if "sqlite" not in entry.name} == {f"{first.id}.mp4", *others}
    found = store.begin()
    assert found is not None and found.id == second.id, "in its old place of the queue"
    assert asdict(found).items() >= asdict(REQUEST).items() and found.status == "in_progress"
    store.close()
    (tmp_path / f"{first.id}.mp4").unlink()
    store = JobStore(tmp_path)
    assert store.recover() == 3
    again = store.begin()
    assert again is not None and (again.id, again.ended_s) == (first.id, None)
    assert store.used_bytes() == 0
    assert third.id in {job.id for job in store.page(after=None, limit=9, order="asc") or ()}
    store.close()


def test_a_job_during_which_servers_are_killed_is_given_up_and_an_orderly_end_counts_for_none(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job = store.add(REQUEST, "somebody")
    store.begin()
    store.put_back(attempt=False)
    for waiting in (1, 1, 0):
        store.begin()
        store.close()
        store = JobStore(tmp_path)
        assert store.recover() == waiting
    failed = store.get(job.id)
    assert failed is not None and failed.status == "failed" and "3 times" in failed.error
    store.close()


def test_what_was_given_for_a_job_counts_while_it_can_be_made_and_none_is_left_where_it_cannot_be_written(
    small_disk: Path,
) -> None:
    folder = small_disk / "jobs"
    store = JobStore(folder)
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700, 0o600}
    picture = np.random.default_rng(0).integers(0, 256, (1, 128, 128, 3), dtype=np.uint8)
    given, asked = {"prompt_embeds": b"p" * 10, "video_latents": b"v" * 20}, replace(REQUEST, strength=0.25)
    with_picture, job = store.add(REQUEST, "me", {PICTURE: picture.tobytes()}), store.add(asked, "me", given)
    assert store.used_bytes() == picture.size + 30
    found, nothing = store.inputs(with_picture)
    assert found is not None and np.array_equal(found, picture) and not nothing.names
    store.fail(with_picture.id, "why")
    assert (store.recover(), store.used_bytes()) == (1, 30), "what waits keeps what it was given"
    begun = store.begin()
    assert begun is not None and begun.id == job.id
    store.path(job.id).write_bytes(b"video")
    store.complete(job.id, None, None)
    store.path(job.id).unlink()
    assert (store.recover(), store.used_bytes()) == (1, 30), "it is made again, with the features"
    assert store.inputs(job) == (None, Features(**given, strength=0.25))
    store.delete(job.id)
    with pytest.raises(sqlite3.OperationalError):
        store.add(asked, "me", given | {"video_latents": bytes(8 << 20)})
    assert (store.count(), store.used_bytes()) == (0, 0)
    store.close()
