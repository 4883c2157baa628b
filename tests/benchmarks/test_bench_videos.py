"""The videos' benchmark at our own server with a small real model, and at one of other manners."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from benchmarks import bench_videos
from benchmarks.slo import Video
from streamdiff.config import Config, PlaybackConfig, ServeConfig
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.server.conftest import open_site
from tests.small import CPU, small_model


def options(*words: str) -> argparse.Namespace:
    given = bench_videos.parser().parse_args(words)
    bench_videos.check(given)
    return given


@pytest.mark.slow
def test_our_own_server_makes_all_of_them(tmp_path: Path) -> None:
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
