"""A job on the real pipeline, beside a live session that is watched: it gives what `generate` gives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamdiff import api
from streamdiff.config import Config, PlaybackConfig, ServeConfig
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.server.jobs import runner
from streamdiff.video.files import Frame, write_video
from tests.server.conftest import open_site
from tests.server.jobs.test_videos import ended, pictures_of
from tests.small import BLUE, CPU, small_model

MODEL = small_model(4)
FRAMES = 3 * MODEL.spec.chunk_frames + 1


@pytest.mark.slow
async def test_a_job_beside_a_live_session_is_the_video_that_generate_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api.StreamSession(StreamingPipeline(MODEL, CPU), BLUE, seed=5) as session:
        alone = [frame for _, frame in zip(range(FRAMES), session, strict=False)]

    # Frames are compared before they are encoded: x264 does not give the same bits twice for pictures this small.
    encoded: list[Frame] = []

    def noted(path: Path, frames: Iterable[Frame], fps: float, **options: Any) -> None:
        encoded.extend(frames)
        write_video(path, encoded, fps, **options)

    monkeypatch.setattr(runner, "write_video", noted)

    pipeline = StreamingPipeline(MODEL, CPU)
    config = Config(
        serve=ServeConfig(jobs_dir=str(tmp_path / "jobs"), upscale=4),
        playback=PlaybackConfig(fps=MODEL.spec.native_fps),
    )
    try:
        async with open_site(config, pipeline) as site:  # type: ignore[arg-type]
            viewer = await site.watch()
            await viewer.frame()
            body = {"prompt": BLUE, "seed": 5, "num_frames": FRAMES}
            job = (await site.http.post("/v1/videos", json=body)).json()
            video = await ended(site, job["id"])
            assert (video["status"], video["model"]) == ("completed", MODEL.spec.name)
            assert video["inference_time_s"] > 0 and video["peak_memory_mb"] > 10
            await viewer.frame()
            content = (await site.http.get(f"/v1/videos/{job['id']}/content")).content
    finally:
        pipeline.close()
    assert len(pictures_of(content)) == len(encoded) == FRAMES
    assert np.array_equal(np.stack(encoded), np.stack(alone)) and np.stack(encoded).std() > 1
