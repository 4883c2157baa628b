"""Options that `fps_ttff` and `throughput_model` share, and the cases that they name."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks import stream_case
from benchmarks.stream_case import PRESETS, Amount, Case
from streamdiff.config import ModelConfig
from streamdiff.config_file import load
from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import is_random

QUICK = Amount(openings=2, chunks=12, margin=1, prompts=2, rounds=2)
"""With CUDA graphs the engine runs ahead of the device for five chunks: fewer would count the filling of its queue."""


def add(made: argparse.ArgumentParser) -> None:
    """The options that say which cases."""
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    made.add_argument("--preset", choices=PRESETS, default="tiny", metavar="NAME", help=f"{presets} (default tiny)")
    lists = made.add_argument_group("lists, in place of the preset's")
    lists.add_argument(
        "--stages", type=whole_numbers, metavar="N,N", help="ranks of the ring, a process and a device each"
    )
    lists.add_argument(
        "--parallel",
        type=words,
        metavar="PxC,PxC",
        help="in place of --stages: P stages that C ranks share each, as 1x2",
    )
    lists.add_argument(
        "--steps", type=whole_numbers, metavar="N,N", help="denoise steps, as 4,2,1 (with --model: its own)"
    )
    lists.add_argument("--kv-context", type=words, metavar="C,C", help="clean, staircase, same_step")
    lists.add_argument("--size", type=words, metavar="WxH,WxH", help="of the picture, for Wan: 832x480, 512x512")
    lists.add_argument("--decoder", type=words, metavar="D,D", help="for Wan without a checkpoint: tiny, full")
    model = made.add_argument_group("model and machine, as in `streamdiff serve`")
    for field in (
        *("device", "dtype", "attention", "compile"),
        *("weights", "vae", "text_encoder", "decode_rank"),
    ):
        about = ModelConfig.model_fields[field].description
        model.add_argument(f"--{field.replace('_', '-')}", dest=f"model.{field}", metavar="VALUE", help=about)
    model.add_argument("--model", dest="model.name", metavar="NAME", help="another model than the preset's")
    model.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other value of `model:`")
    made.add_argument("--quick", action="store_true", help="as little as gives every figure; for a first look")
    made.add_argument(
        "--rounds", type=int, metavar="N", help=f"chunks that give the parts' times (default {Amount().rounds})"
    )
    made.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON, raw times included")
    made.add_argument("--list", action="store_true", help="only say what would be measured")


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases that were asked for.

    Raises:
        ConfigError: a value that cannot be; names the option.
    """
    preset = PRESETS[options.preset]
    if options.stages and options.parallel:
        raise ConfigError("--stages and --parallel are both given; --parallel says the stages too")
    given = {key: value for key, value in vars(options).items() if key.startswith("model.") and value is not None}
    names = {key: f"--{key.removeprefix('model.').replace('_', '-')}" for key in given}
    for word in options.set:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set is {word!r}, but must be KEY=VALUE, for example --set attention=cudnn")
        if key == "trace":
            raise ConfigError(f"--set {key} is for one stream; every case is traced with --profile DIR")
        given[f"model.{key}"], names[f"model.{key}"] = value, f"--set {key}"
    base = {"model.name": preset.model, **{key: _typed(value) for key, value in given.items()}}
    lists: dict[str, Any] = {
        "steps": options.steps,
        "kv_contexts": options.kv_context,
        "stages": options.stages,
        "parallel": options.parallel,
        "sizes": options.size,
        "decoders": _decoders(options.decoder),
    }
    other = "model.name" in given and not is_random(str(base["model.name"]))
    if other or "model.steps" in given:
        lists["steps"] = lists["steps"] or (None,)
    if "model.vae" in base or ("model.name" in base and not is_random(str(base["model.name"]))):
        lists["decoders"] = lists["decoders"] or (None,)
    preset = replace(preset, **{name: values for name, values in lists.items() if values})
    least = {field.name: getattr(options, field.name, None) for field in fields(Amount)}
    amount = replace(QUICK if options.quick else Amount(), **{k: v for k, v in least.items() if v is not None})
    playback_fps = getattr(options, "playback_fps", None)
    _check(amount, playback_fps)
    found = []
    for each in stream_case.combinations(preset, every=bool(options.kv_context)):
        config = load(None, {**base, **each}, names | stream_case.FLAGS).model
        found.append(Case(config, amount, playback_fps))
    return found


def _check(amount: Amount, playback_fps: float | None) -> None:
    for field in fields(Amount):
        least = 0 if field.name in ("margin", "prompts") else 1
        if getattr(amount, field.name) < least:
            raise ConfigError(f"--{field.name} is {getattr(amount, field.name)}, but must be at least {least}")
    if playback_fps is not None and not 1 <= playback_fps <= 1000:
        raise ConfigError(f"--playback-fps is {playback_fps:g}, but must be from 1 to 1,000")


def _decoders(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for name in names or ():
        if name not in stream_case.DECODERS:
            raise ConfigError(f"--decoder is {name}, but must be {' or '.join(stream_case.DECODERS)}")
    return names


def _typed(value: str) -> object:
    """A number where it is one: the configuration is strict."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
