"""A third-party load tool, NVIDIA AIPerf, has videos made. `tools/interop.sh` installs it, in its own environment."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from statistics import fmean

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.rules.source import ROOT
from tests.server.jobs.test_videos import making

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.aiperf]

AIPERF = ROOT / ".venv-aiperf" / "bin" / "aiperf"
PROMPTS = ["a red circle", "a blue star"]


def words(folder: Path) -> str:
    """A tokenizer without a download: AIPerf counts a prompt's tokens, also where nobody asks for them."""
    Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(folder)


async def test_aiperf_reports_latency_inference_time_and_peak_memory_of_all_videos(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    options = {
        "model": "scripted", "endpoint-type": "video-generation", "request-count": "4", "concurrency": "2",
        "input-file": "prompts.jsonl", "custom-dataset-type": "single_turn", "extra-inputs": "num_frames:8",
        "output-artifact-dir": "out", "tokenizer": words(tmp_path), "ui": "none", "record-processors": "1",
    }  # fmt: skip
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    async with making(tmp_path / "jobs") as site:
        process = await asyncio.create_subprocess_exec(
            str(AIPERF), "profile", "--url", site.base, "--download-video-content", "--no-gpu-telemetry", *given,
            cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path), "HF_HOME": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        made = (await site.http.get("/v1/videos")).json()["data"]
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 4 and report["error_summary"] == []
    assert sorted(each["prompt"] for each in made) == sorted(PROMPTS * 2)
    assert report["video_inference_time"]["avg"] == pytest.approx(
        1000 * fmean(each["inference_time_s"] for each in made)
    )
    assert report["video_peak_memory"]["avg"] == pytest.approx(fmean(each["peak_memory_mb"] for each in made))
    assert "streamdiff_jobs_ended" in (tmp_path / "out" / "server_metrics_export.json").read_text()
    assert report["request_latency"]["min"] > report["video_inference_time"]["min"]
