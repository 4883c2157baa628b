"""The most memory that a piece of work holds at once, as torch's profiler sees every allocation."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@torch.inference_mode()
def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that `work` allocates on the CPU and has not freed yet, at its widest moment; its result counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    del result
    held = most = 0
    for event in sorted((each for each in events if each.get("name") == "[memory]"), key=lambda each: each["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most
