"""The engine writes nothing while it works. Ten thousand chunks of the ring alone: tests/pipeline/test_no_growth.py."""

from __future__ import annotations

import logging

import pytest

from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Event, FrameBatch, Open, SetPrompt, Shown
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.small import BLUE, CPU, RED, small_model

pytestmark = pytest.mark.slow

MICRO_STEPS = 600


def test_micro_steps_prompts_and_decoding_print_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = small_model(6, layers=1)
    runtime = StreamingPipeline(model, CPU, steps=4)
    engine = Engine(runtime, 3 * model.spec.chunk_frames)

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, FrameBatch):
                engine.handle(Shown("one", event.first + len(event.pictures)))

    take(engine.handle(Open("one", RED)))
    changed = 0
    while runtime.worker.done < MICRO_STEPS:
        take(engine.step(5.0))
        if runtime.worker.done // 100 > changed:
            changed += 1
            take(engine.handle(SetPrompt("one", (RED, BLUE)[changed % 2])))
    engine.close()
    assert changed > 4
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
