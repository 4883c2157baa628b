"""What settings that are left open become, by device and preset, and that each choice says why."""

from __future__ import annotations

from typing import Any

import pytest

from streamdiff.config import ModelConfig
from streamdiff.models import resolve
from streamdiff.models.resolve import Defaults, settle


def settled(device: str, fault: str | None = None, **given: Any) -> Defaults:
    return settle(resolve.completed(ModelConfig.model_validate(given)), device, (4, 2), lambda: fault)


def paths(found: Defaults) -> tuple[str, str, bool | None, bool]:
    config = found.config
    return config.attention, config.compile, found.channels_last, found.cudnn_benchmark


FAST = ("auto", "on", True, True)
PLAIN = ("sdpa", "off", False, False)


@pytest.mark.parametrize(
    ("device", "preset", "expected"),
    [
        ("cuda", "default", FAST),
        ("cuda", "fast", FAST),
        ("cuda", "plain", PLAIN),
        ("cpu", "default", ("sdpa", "off", None, False)),
        ("cpu", "plain", PLAIN),
    ],
)
def test_a_gpu_is_fast_by_default_and_plain_where_asked(device: str, preset: str, expected: object) -> None:
    assert paths(settled(device, preset=preset)) == expected


@pytest.mark.parametrize("preset", ["default", "plain", "fast"])
def test_what_is_said_by_itself_is_taken(preset: str) -> None:
    said = {"attention": "flash", "compile": "on"}
    found = settled("cuda", preset=preset, steps=4, vae="wan2.1", quantize="int8", **said)
    assert {name: getattr(found.config, name) for name in said} == said
    assert (found.config.steps, found.config.vae, found.config.quantize) == (4, "wan2.1", "int8")
    asked = {choice.setting for choice in found.choices if choice.reason == "as asked"}
    assert asked == {*said, "steps", "vae", "quantize"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", ["default", "plain", "fast"])
def test_every_choice_is_told_once_with_a_reason(device: str, preset: str) -> None:
    found = settled(device, preset=preset)
    told = {choice.setting: choice for choice in found.choices}
    assert len(told) == len(found.choices) and all(choice.reason for choice in found.choices)
    for setting in ("attention", "compile", "quantize"):
        assert told[setting].value == getattr(found.config, setting)
    assert {"device", "dtype", "steps", "vae", "cudnn.benchmark"} < set(told)


@pytest.mark.parametrize(
    ("given", "fault", "reason"),
    [
        ({}, "Triton is not installed", "Triton is not installed; --compile on asks for it"),
        ({"attention": "sage"}, None, "attention sage is not torch's; --compile on asks for it"),
        ({"attention": "cudnn"}, None, "CUDA; --plain switches it off"),
    ],
)
def test_a_gpu_that_cannot_compile_starts_without_graphs(given: Any, fault: str | None, reason: str) -> None:
    found = settled("cuda", fault, **given)
    (choice,) = (choice for choice in found.choices if choice.setting == "compile")
    assert choice.reason == reason and found.config.compile == ("on" if "CUDA" in reason else "off")


@pytest.mark.parametrize(
    ("name", "vae"),
    [("self-forcing", "taew2_1"), ("random:wan2.1-1.3b", "random:taew2_1"), ("tiny", None), ("some/repository", None)],
)
def test_fast_takes_the_small_autoencoder_and_the_fewest_steps(name: str, vae: str | None) -> None:
    found = settled("cpu", name=name, preset="fast")
    assert (found.config.vae, found.config.steps) == (vae, 2)
    told = {choice.setting: str(choice) for choice in found.choices}
    assert told["steps"] == "steps: 2 (--fast: of 4 or 2)"
    assert told["vae"].startswith(f"vae: {vae} (--fast" if vae else "vae: the model's own (no smaller one is known")
    assert settled("cpu", name=name).config.vae is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"compile": "on", "device": "cpu"}, True),
        ({"compile": "off", "device": "cuda"}, False),
        ({"device": "cuda"}, True),
        ({"device": "cuda", "preset": "plain"}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_who_waits_for_an_engine_knows_whether_it_may_compile(given: Any, expected: bool) -> None:
    assert resolve.may_compile(ModelConfig.model_validate(given)) is expected
