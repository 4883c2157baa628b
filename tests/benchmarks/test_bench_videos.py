"""The videos' benchmark at our own server with a small real model, and at one of other manners."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from benchmarks import bench_videos
from benchmarks.slo import Video
from streamdiff.config import Config, PlaybackConfig, ServeConfig
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.server.conftest import open_site
from tests.small import CPU, small_model


def options(*words: str) -> bench_videos.argparse.Namespace:
    given = bench_videos.parser().parse_args(words)
    bench_videos.check(given)
    return given


def drive(*words: str) -> list[Video]:
    return asyncio.run(bench_videos.drive(options(*words), ["a red circle"]))[0]


@pytest.mark.slow
def test_our_own_server_makes_all_of_them(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = small_model(4)
    pipeline = StreamingPipeline(model, CPU)
    serve = ServeConfig(jobs_dir=str(tmp_path), address_share=1.0, upscale=4)
    config = Config(serve=serve, playback=PlaybackConfig(fps=model.spec.native_fps))

    async def main() -> list[Video]:
        async with open_site(config, pipeline) as site:  # type: ignore[arg-type]
            size = f"{model.spec.width}x{model.spec.height}"
            words = ["--num-prompts", "4", "--max-concurrency", "2", "--seconds", "0.5", "--size", size]
            given = options("--base-url", f"{site.base}/v1/", *words, "--poll", "0.05")
            videos, seconds = await bench_videos.drive(given, ["a blue star"])
            assert seconds > 0
            listed = (await site.http.get("/v1/videos")).json()["data"]
            assert sorted(each["seed"] for each in listed) == [0, 1, 2, 3, 4]  # the last one is the warm-up's
            return videos

    try:
        videos = asyncio.run(main())
    finally:
        pipeline.close()
    for video in videos:
        assert not video.error and video.bytes > 100
        assert None not in (video.submit_s, video.wait_s, video.download_s)
    # Two at a time: the last ones waited for the first ones.
    assert max(video.submit_s or 0 for video in videos) > min(video.total_s or 0 for video in videos) / 2


class OtherManners(BaseHTTPRequestHandler):
    """`seed` says what becomes of a request: 0 queued for long and its content late, 1 fails, 2 refused with 429 once
    (warm-up only waits for that), 3 answers no JSON, 4 is never done, 5 has an empty file, 6 is gone."""

    protocol_version = "HTTP/1.1"
    server: Stand

    def log_message(self, *_: object) -> None: ...

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def told(self, status: int, **headers: str) -> None:
        self.answer(status, json.dumps({"id": self.path.split("/")[-1], **self.state()}).encode(), **headers)

    def state(self) -> dict[str, object]:
        seed, looks = self.path.split("-")[-1], self.server.looks
        looks[seed] = looks.get(seed, 0) + 1
        if seed == "1" and looks[seed] > 2:
            return {"status": "failed", "error": "out of memory"}
        done = seed in ("0", "5", "6") and looks[seed] > 3
        return {"status": "succeeded" if done else "preprocessing" if looks[seed] > 1 else "queued"}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        seed = body["seed"]
        if seed == 2 and len([each for each in self.server.bodies if each["seed"] == 2]) == 1:
            self.answer(429, b"{}", Retry_After="0")
        elif seed == 3:
            self.answer(200, b"<html>")
        else:
            seen = 0 if seed == 2 else seed
            self.answer(202, json.dumps({"id": f"v-{seen}", "status": "queued", "seconds": 4}).encode())

    def do_GET(self) -> None:
        if not self.path.endswith("/content"):
            self.told(200, Retry_After="0")
            return
        seed = self.path.split("/")[-2].split("-")[-1]
        late = self.server.looks.get("content", 0)
        self.server.looks["content"] = late + 1
        if seed == "6":
            self.answer(404, b"{}")
        elif late == 0:
            self.answer(404, b"{}", Retry_After="0")
        else:
            self.answer(200, b"" if seed == "5" else b"mp4" * 100)

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)
        self.answer(200, b"{}")


class Stand(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), OtherManners)
        self.looks: dict[str, int] = {}
        self.bodies: list[dict[str, object]] = []
        self.deleted: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def standing() -> Iterator[Stand]:
    stand = Stand()
    thread = threading.Thread(target=stand.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield stand
    finally:
        stand.shutdown()
        thread.join()
        stand.server_close()


def one(stand: Stand, seed: int, *words: str) -> Video:
    [video] = drive(
        "--base-url", stand.url, "--num-prompts", "1", "--warmup", "0", "--seed", str(seed), "--poll", "0.01", *words
    )  # fmt: skip
    return video


def test_a_video_that_is_queued_for_long_and_whose_content_comes_late_is_waited_for() -> None:
    with standing() as stand:
        video = one(stand, 0, "--model", "theirs", "--size", "64x64", "--seconds", "2")
        assert (video.error, video.bytes) == ("", 300) and video.total_s is not None
        assert stand.looks["0"] == 4 and stand.looks["content"] == 2
        expected = {"prompt": "a red circle", "seed": 0, "model": "theirs", "size": "64x64", "seconds": "2"}
        assert stand.bodies == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "error"), [(1, "failed"), (2, "http 429"), (3, "answer"), (5, "empty"), (6, "http 404")]
)
def test_what_goes_wrong_has_a_name(seed: int, error: str) -> None:
    with standing() as stand:
        video = one(stand, seed)
        assert (video.error, video.total_s) == (error, None)


def test_a_video_that_is_never_done_is_given_up_and_deleted() -> None:
    with standing() as stand:
        assert one(stand, 4, "--timeout", "0.3").error == "timeout"
        assert stand.deleted == ["/v1/videos/v-4"]


@pytest.mark.slow
def test_the_warm_up_waits_for_a_place_and_one_that_fails_ends_all() -> None:
    with standing() as stand:
        words = ["--base-url", stand.url, "--num-prompts", "1", "--poll", "0.01"]
        assert [each.error for each in drive(*words, "--seed", "1", "--warmup", "1")] == ["failed"]
        assert [body["seed"] for body in stand.bodies] == [2, 2, 1]
        with pytest.raises(ValueError, match="warm-up"):
            drive(*words, "--seed", "0")  # whose warm-up has seed 1


def test_errors_are_counted_by_kind_in_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, prompts = tmp_path / "videos.json", tmp_path / "prompts.txt"
    prompts.write_text("a blue star\n\na white heart\n")
    with standing() as stand:
        code = bench_videos.main(
            ["--base-url", stand.url, "--num-prompts", "4", "--warmup", "0", "--poll", "0.01", "--slo", "total=60",
             "--request-rate", "50", "--prompts", str(prompts), "--out", str(out)]
        )  # fmt: skip
        assert code == bench_videos.WRONG
        assert {body["prompt"] for body in stand.bodies} == {"a blue star", "a white heart"}
    stored = json.loads(out.read_text())
    figures = stored["results"]["figures"]
    assert figures["errors"] == {"failed": 1, "http 429": 1, "answer": 1}
    assert (figures["videos"], figures["completed"], figures["served_well"]) == (4, 1, 1)
    assert len(stored["results"]["requests"]) == 4 and "bench_videos" in stored["header"]["command"]
    assert "answer: 1" in capsys.readouterr().out


def test_nobody_there_is_an_error_by_name() -> None:
    assert [each.error for each in drive("--base-url", "http://127.0.0.1:9/v1", "--warmup", "0")] == ["connection"] * 10


def test_times_are_the_seed_s_and_come_at_the_rate() -> None:
    assert bench_videos.times_s(3, float("inf"), 0) == [0.0] * 3
    assert bench_videos.times_s(50, 2.0, 1) == bench_videos.times_s(50, 2.0, 1) != bench_videos.times_s(50, 2.0, 2)
    assert bench_videos.times_s(2001, 2.0, 1)[-1] == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    "words",
    [
        ["--num-prompts", "0"], ["--max-concurrency", "0"], ["--warmup", "-1"], ["--request-rate", "0"],
        ["--base-url", "ftp://x/v1"], ["--slo", "speed=1"], ["--prompts", "no-such-file"], ["--poll", "nan"],
    ],
)  # fmt: skip
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_videos.main(words) == bench_videos.USAGE
    assert words[0] in capsys.readouterr().err
