"""What `fps_ttff` can measure: cases, presets of cases, and how much of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from benchmarks.report import public_path
from streamdiff.config import ModelConfig

PROMPT = "a red circle moving right over a meadow"
WAN_SIZES = ("832x480", "512x512")
CONTEXTS = ("clean", "staircase", "same_step")


@dataclass(frozen=True)
class Amount:
    """How much is measured of a case. `openings` streams are opened to see their beginning; `chunks` count as steady
    after the window is full and `margin` more; `prompts` are changed on the way; `rounds` chunks give the parts' times.
    """

    openings: int = 3
    chunks: int = 16
    margin: int = 2
    prompts: int = 4
    rounds: int = 5


@dataclass(frozen=True)
class Case:
    """One configuration that is measured, in processes of its own."""

    config: ModelConfig
    amount: Amount
    playback_fps: float | None = None
    prompt: str = PROMPT
    profile: str | None = None

    @property
    def label(self) -> str:
        """What tells it from the other cases of a run."""
        config = self.config
        size = f" {config.size}" if config.size else ""
        vae = f", {'full' if decoder_of(config) == 'full' else 'tiny'} decoder" if config.vae else ""
        count = config.step_count
        steps = "own steps" if count is None else f"{count} step{'s' if count > 1 else ''}"
        stages = f"{config.stages} stage{'s' if config.stages > 1 else ''}"
        stages = stages if config.shares == 1 else f"{config.parallel} ranks"
        fast = ", compiled" if config.compile == "on" else ""
        return f"{config.name}{size}, {steps}, {config.kv_context}{vae}, {stages}{fast}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.model_dump(), "amount": asdict(self.amount)}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Case:
        return cls(**{**tree, "config": ModelConfig.model_validate(tree["config"]), "amount": Amount(**tree["amount"])})


@dataclass(frozen=True)
class Preset:
    """Lists whose product is a run's cases. `decoders` are `tiny` and `full`, None where the model has its own; of
    `steps` None is what the model was made for. `parallel` (PxC) stands in the place of `stages` where it is given."""

    about: str
    model: str
    steps: tuple[int | None, ...] = (4,)
    kv_contexts: tuple[str, ...] = ("clean",)
    stages: tuple[int, ...] = (1,)
    sizes: tuple[str | None, ...] = (None,)
    decoders: tuple[str | None, ...] = (None,)
    parallel: tuple[str, ...] = ()


_13, _14 = "random:wan2.1-1.3b", "random:wan2.1-14b"
_BOTH = ("tiny", "full")
PRESETS = {
    "tiny": Preset("the embedded model, at 1, 2 and 4 stages", "tiny", (4,), ("clean", "staircase"), (1, 2, 4)),
    "wan-1.3b": Preset(
        "Wan 1.3B at 832x480 in 4 steps, as published figures are", _13, sizes=WAN_SIZES[:1], decoders=_BOTH
    ),
    "wan-14b": Preset("Wan 14B, the same", _14, sizes=WAN_SIZES[:1], decoders=_BOTH),
    "wan-1.3b-all": Preset(
        "Wan 1.3B: both sizes, 4, 2 and 1 steps, all KV contexts", _13, (4, 2, 1), CONTEXTS, (1,), WAN_SIZES, _BOTH
    ),
    "wan-14b-all": Preset("Wan 14B, the same", _14, (4, 2, 1), CONTEXTS, (1,), WAN_SIZES, _BOTH),
}
DECODERS = {"tiny": "random:taew2_1", "full": "random:wan2.1"}


def decoder_of(config: ModelConfig) -> str | None:
    """`tiny` or `full` where one of those is drawn, else what was given."""
    return next((name for name, vae in DECODERS.items() if vae == config.vae), config.vae)


FLAGS = {
    "model.steps": "--steps",
    "model.kv_context": "--kv-context",
    "model.stages": "--stages",
    "model.parallel": "--parallel",
    "model.size": "--size",
    "model.vae": "--decoder",
}
"""How the command line calls the lists' values, for messages."""


def combinations(preset: Preset, *, every: bool = False) -> list[dict[str, object]]:
    """The product of the preset's lists, as values of a configuration by dotted key.

    One session with KV context `clean` has one chunk in flight, which no second stage makes faster: that is left out
    unless `every` is set, or ranks are to share stages.
    """
    found = []
    splits: list[tuple[str, int | str]] = [("model.parallel", each) for each in preset.parallel]
    splits = splits or [("model.stages", each) for each in preset.stages]
    lists = (preset.sizes, preset.decoders, preset.steps, preset.kv_contexts)
    for size, decoder, steps, context, (key, split) in product(*lists, splits):
        if context == "clean" and isinstance(split, int) and split > 1 and not every:
            continue
        values: dict[str, object] = {"model.kv_context": context, key: split}
        if steps is not None:
            values["model.steps"] = steps
        if size is not None:
            values["model.size"] = size
        if decoder is not None:
            values["model.vae"] = DECODERS[decoder]
        found.append(values)
    return found


def settings(all_cases: Sequence[Case], device: str) -> dict[str, Any]:
    """What two runs must have alike to be compared, by case; paths without the machine's folders. `device` is the kind
    that was used."""
    found = {}
    for case in all_cases:
        config = {
            key: public_path(value) if isinstance(value, str) else value
            for key, value in {**case.config.model_dump(), "device": device}.items()
        }
        found[case.label] = {**replace(case, profile=None).to_json(), "config": config}
    return found
