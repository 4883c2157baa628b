"""Options of the command line: those of the configuration, made of its fields, those that commands have for themselves,
and what the help of each command shows.

Kept apart from `parser`, which puts them together, and `main`, which carries commands out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from streamdiff.config import GPUS, MODEL, SERVER, STREAM, Config, Flag
from streamdiff.config_file import kind_of, section_of

SWITCH = "store_true"
GENERAL = "options"


class Option(NamedTuple):
    """One option. `key` is the dotted key of the configuration that it overrides, or the field of the command's job
    that it sets; without one it sets the field with the flag's name. Not given, it is None: configuration and jobs have
    the defaults. `flag` may be several names with spaces between.

    `action` is one of argparse; with another than "store" and "append" the option takes no value. `group` is its
    heading in the help; with `rare` it is in that of --help-all only.
    """

    flag: str
    metavar: str
    help: str
    parse: Callable[[str], object] = str
    key: str = ""
    action: str | type[argparse.Action] = "store"
    required: bool = False
    group: str = GENERAL
    rare: bool = False

    @property
    def name(self) -> str:
        """Of the attribute of the parsed arguments. With the key as the name an option of the configuration is kept
        apart from one that a command has for itself, as `plan` has its --stages."""
        return self.key or self.flag[2:].replace("-", "_")


def add(parser: argparse.ArgumentParser, options: Sequence[Option], *, everything: bool) -> None:
    """Let `options` be typed; the help lists them by group, rare ones only with `everything`. Mutates: parser."""
    groups: dict[str, argparse._ActionsContainer] = {GENERAL: parser}
    for each in options:
        shown = everything or not each.rare
        if shown and each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        about = each.help if shown else argparse.SUPPRESS
        given = {"dest": each.name, "help": about, "action": each.action, "required": each.required}
        value = {"type": each.parse, "metavar": each.metavar} if each.action in ("store", "append") else {}
        place = groups[each.group] if shown else parser
        place.add_argument(*each.flag.split(), default=None, **given, **value)  # type: ignore[arg-type]


class Named(argparse.Action):
    """Switches of one setting: each sets the value of its own name, and excludes the others."""

    def __init__(self, option_strings: Sequence[str], dest: str, **given: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **given)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        name, before = str(option_string).removeprefix("--"), getattr(namespace, self.dest)
        if before not in (None, name):
            parser.error(f"--{before} and --{name} exclude each other; give one of them")
        setattr(namespace, self.dest, name)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between them") from None


def parse_steps(text: str) -> int | tuple[float, ...]:
    """A number of steps, or timesteps with commas between them. Raises argparse.ArgumentTypeError."""
    return int(text) if text.strip().isdigit() else parse_numbers(text)


# ---- of the configuration ----------------------------------------------------------------------------------------


def fields() -> Iterator[tuple[str, FieldInfo, Flag | None]]:
    """Dotted key, field, and how it can be typed, of every setting."""
    for section in Config.model_fields:
        for name, field in section_of(section).model_fields.items():
            flag = next((each for each in field.metadata if isinstance(each, Flag)), None)
            yield f"{section}.{name}", field, flag


_REST = {"model": MODEL, "session": STREAM, "playback": STREAM, "batching": GPUS, "serve": SERVER}
"""Heading of a section's options that only --help-all lists."""


def _option(key: str, field: FieldInfo, flag: Flag) -> Option:
    """How a setting is typed: by its type, and the marker on its field."""
    name, (kind, _) = flag.name or "--" + key.split(".")[1].replace("_", "-"), kind_of(field)
    choices = "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    metavar = flag.metavar or choices or ("N" if kind in (int, float) else "NAME")
    parse: Callable[[str], object] = kind if kind in (int, float) else str
    action: str | type[argparse.Action] = "append" if get_origin(kind) is list else "store"
    if kind is bool:
        action = "store_false" if field.default else SWITCH
    elif " " in name:
        action = Named
    return Option(
        name, metavar, _help(field), parse, key, action, False, flag.group or _REST[key.split(".")[0]], not flag.group
    )


def _help(field: FieldInfo) -> str:
    """The docstring, and the default where that does not say it. argparse wants percent signs doubled."""
    about, value = " ".join((field.description or "").split()).rstrip("."), field.default
    if value is True:
        return f"do not {about[0].lower()}{about[1:]}"
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return (f"{about} (default {value})" if is_plain and "default" not in about else about).replace("%", "%%")


def _settings() -> dict[str, Option]:
    options = {key: _option(key, field, flag) for key, field, flag in fields() if flag is not None}
    options["model.steps"] = options["model.steps"]._replace(parse=parse_steps)
    return options


SETTINGS = _settings()
"""Every option that sets a value of the configuration, by its key."""


def settings(*keys: str) -> tuple[Option, ...]:
    """Options by key, or of a whole section by its name."""
    sections = {key.split(".")[0] for key in SETTINGS}
    assert set(keys) <= SETTINGS.keys() | sections, f"no such setting: {sorted(set(keys) - SETTINGS.keys() - sections)}"
    return tuple(option for key, option in SETTINGS.items() if key in keys or key.split(".")[0] in keys)


# fmt: off
# ---- of the commands ----------------------------------------------------------------------------------------------

JSON = Option("--json", "", "print as JSON", key="as_json", action=SWITCH)
OVERWRITE = Option("--overwrite", "", "replace what exists (default: refuse)", action=SWITCH)
CONFIG = Option("--config", "FILE", "a YAML file with settings, see configs/ and docs/settings.md", Path)
SERVE = (
    CONFIG,
    *settings(*Config.model_fields),
    Option("--gpus", "N", "use so many GPUs as the planner finds best: stages, and ranks that share them", int,
           group=GPUS),
    Option("--for", "GOAL", "of --gpus: one stream (default), or many: as many as fit", key="goal", group=GPUS,
           rare=True),
)
GENERATE = (
    CONFIG,
    Option("--output", "FILE", ".mp4, .webm, or a folder for PNG frames", Path),
    OVERWRITE,
    Option("--seconds", "S", "length (default 10)", float),
    Option("--prompt-at", "SECONDS:TEXT", "change the prompt at this time; may be given several times",
           action="append"),
    Option("--prompts", "FILE", "many videos by one engine, into the folder --output: a prompt a line, or .jsonl with "
           "prompt, seed, seconds, size, output (below the folder)", Path),
    Option("--resume", "", "with --prompts: skip the videos that are there", action=SWITCH),
    *settings("model", "session.prompt", "session.seed", "session.image", "playback.fps"),
)
PLAN = (
    CONFIG,
    *settings("model.name", "model.steps", "model.kv_context", "model.quantize", "model.offload", "model.vae",
              "model.size", "model.window", "model.sink"),
    Option("--gpu", "NAME", "h100, h200, b200, 4090 or 5090: what to expect of it, estimated"),
    Option("--gpus", "N", "so many of --gpu: every P stages x C ranks that share each, and which is best", int),
    Option("--link", "KIND", "what GPUs are linked by: nvlink or pcie (default: the fastest that --gpu has)"),
    Option("--fps", "N", "frames per second of each session that --gpu shall reach (default: the model's own)", float),
    Option("--stages", "N", "stages of the ring, one device each (default 4; 1 with --gpu)", int),
    Option("--sessions", "N", "sessions at the same time (default 1)", int),
    Option("--max-rows", "N", "micro-steps that may share a forward, at most (default 1)", int),
    Option("--decode-rank", "PLACE", "where chunks are decoded: head, last, dedicated, own-stream (default auto: head "
           "or last)"),
    Option("--dtype", "TYPE", "float32 or bfloat16 (default float32; bfloat16 with --gpu)"),
    Option("--chunks", "N", "chunks to simulate per session (default 100)", int, rare=True),
    Option("--stage-times", "S,S,...", "seconds of each stage, for a forward of one row", rare=True),
    Option("--profile", "FILE", "measured times as JSON, see below", Path),
    Option("--tflops", "N", "10^12 operations per second that a device reaches (default 400)", float, rare=True),
    Option("--gbps", "N", "GB/s of memory that a device reaches (default 2,500)", float, rare=True),
    Option("--link-gbps", "N", "GB/s of a link between devices (default 25)", float, rare=True),
    Option("--link-time", "SECONDS", "of a message between stages, in place of what the times' source says", float,
           rare=True),
    Option("--decode-time", "SECONDS", "of a chunk's decode, in place of what the times' source says", float,
           rare=True),
    Option("--trace", "FILE", "write a Chrome/Perfetto trace", Path),
    Option("--plot", "FILE", "draw the first chunks as .png, .svg or .pdf", Path),
    JSON,
)
DOCTOR = (CONFIG, *settings("model", "session.seed", "playback.fps", "serve.host", "serve.port"))
# fmt: on

EXAMPLES = """examples:
  streamdiff serve                              live video in the browser
  streamdiff generate --prompt "a blue star moving up in the desert" --output star.mp4
  streamdiff plan --stages 4                    what several devices would make of it
  streamdiff decode --vae tiny --latents latents.safetensors --out video.mp4
  streamdiff doctor                             what was found here, and what will be used
  streamdiff models                             published models: files, licences, memory

streamdiff COMMAND --help tells more.
"""
SERVE_EXAMPLES = """examples:
  streamdiff serve
  streamdiff serve --prompt "a yellow star moving left at night" --port 9000
  streamdiff serve --host 0.0.0.0 --control-token-file token.txt    let others watch; steering takes the token
  streamdiff serve --host 0.0.0.0 --insecure    let others on the network watch, and steer
  streamdiff serve --stages 4 --kv-context staircase    four ranks, started here, work on one stream
  streamdiff serve --model longlive-1.3b --gpus 4      one stream, four GPUs, used as the planner finds best
  streamdiff serve --config configs/lan.yaml
  streamdiff serve --profile costs              costs/trace.json.gz shows where the time goes, once somebody watches

An option given here wins over the file given with --config.
"""
GENERATE_EXAMPLES = """examples:
  streamdiff generate --prompt "a red circle moving left over a meadow" --output circle.mp4
  streamdiff generate --prompt "a red circle" --prompt-at "4:a blue circle" --prompt-at "8:a white star" \\
      --seconds 12 --output changes.webm
  streamdiff generate --prompt "a purple square" --seconds 1 --output frames/    one PNG per frame
  streamdiff generate --prompts prompts.txt --output videos/     a video for each line; --resume goes on where it ended
  streamdiff generate --stages 2 --kv-context staircase --output ring.mp4        two ranks, started here, work on it

With options that say everything by numbers and files, stages take turns in one process, or with --processes have one
each.
"""
PLAN_EXAMPLES = """examples:
  streamdiff plan --gpu 4090 --model self-forcing --vae taew2_1 --sessions 2    what to expect of a card, and what fits
  streamdiff plan --gpus 4 --gpu h100 --model longlive-1.3b --sessions 4    stages x ranks that share them: the best
  streamdiff plan --stages 4 --kv-context staircase --trace ring.json
  streamdiff plan --stages 4 --kv-context same_step --stage-times 0.1,0.1,0.1,0.1 --decode-time 0.02
  streamdiff plan --stages 2 --sessions 2 --profile measured.json --plot ring.png

Times come from --stage-times, else from --profile, else from an estimate for --gpu, or at --tflops and --gbps. A
profile is JSON:
  {"block_s": [0.01, 0.01, 0.01, 0.01], "embed_s": 0.001, "head_s": 0.001, "decode_s": 0.02, "link_s": 0.0005}
all in seconds: one entry per block, embedding, output layer, a chunk's decode, a message between stages. An entry of
block_s, embed_s and head_s may be a list: the time of a forward with 1 row, 2 rows, and so on.
Open a trace in ui.perfetto.dev.
"""
DOCTOR_EXAMPLES = """examples:
  streamdiff doctor
  streamdiff doctor --config configs/lan.yaml   judge this machine for that configuration
"""
MODELS_EXAMPLES = """examples:
  streamdiff models                     all of them, what is on disk, memory per stage
  streamdiff models longlive-1.3b       one, with what to download, licence and source
  streamdiff models --json
"""
