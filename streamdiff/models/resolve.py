"""A model by name, path or hub id: where each of its parts lies, which have to be fetched first, and which model of the
catalogue a file is; and the settings that are left at their default, resolved by device and by the presets
`plain` and `fast`, with the reason for each.

Needs no torch, and opens no file of weights: a model is recognised by its file's name.
`models.loader.ModelLoader` loads the parts of what is found here.
"""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from streamdiff.config import EMBEDDED, ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, hub, weight_files
from streamdiff.models.catalogue import Architecture, CatalogueEntry, Files, PublishedLora, small_autoencoder
from streamdiff.models.headers import parse_header
from streamdiff.models.spec import Lora, parse_lora
from streamdiff.models.transformer.tensor_names import bare, block_count

EMBEDDED_WEIGHTS = Path(__file__).parent / "tiny" / "weights"
_ACTING = re.compile(r"blocks\.(\d+)\.action_model\.keyboard_embed\.0\.weight")
NO_LORA = "none"
"""Among the LoRAs: the one that belongs to the model is left out."""
_FILES = (*weight_files.ENDINGS, ".json")
_BASE = re.compile(
    r"wan[-_. ]?2[-_.]?[12][-_. ]?ti?2v[-_. ]?(1[._]3b|14b|5b)([-_.](b?f\w+|q\d\w*|e\dm\w+|scaled))*\.\w+",
    re.IGNORECASE,
)
"""Wan's own files as others publish them again: `wan2.1_t2v_1.3B_bf16.safetensors`, `Wan2.2-TI2V-5B-Q8_0.gguf`."""
_FOLDERS = ("transformer", "vae", "text_encoder")


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model's parts lie, those that a configuration names in place of the model's own included. `weights` (None
    where they are drawn: `catalogue.RANDOM`), `container` (`usual_container`: that of the published file),
    `architecture` (what shapes do not tell) and `loras` are the transformer's. `folder` is one in diffusers' layout,
    `index` its `model_index.json` where it is of the embedded model's kind and says everything about itself. `vae` and
    `text_encoder` are published files where they are those that `entry`, what the catalogue knows, names: the loader
    fetches them; None where there is none.
    `kv_context` is what it is to run with."""

    name: str
    weights: Path | None
    container: str | None = None
    usual_container: str | None = None
    architecture: Mapping[str, Any] | None = None
    loras: tuple[Lora, ...] = ()
    folder: Path | None = None
    index: Mapping[str, Any] | None = None
    vae: str | Files | None = None
    text_encoder: Path | Files | None = None
    entry: CatalogueEntry | None = None
    kv_context: str = "clean"

    @property
    def embedded(self) -> bool:
        """Whether it is of the embedded model's kind."""
        return self.index is not None

    @property
    def reads_pictures(self) -> bool:
        """Whether what CLIP sees in a picture stands in a prompt's place."""
        return self.entry is not None and catalogue.parts_of(self.entry)[0].image_dim is not None

    def autoencoder(self, channels: int) -> str:
        """The catalogue's name of the model's autoencoder; Wan's, for so many latent channels, for a model that the
        catalogue does not have."""
        known = catalogue.autoencoder_of(channels) or "wan2.1"
        return known if self.entry is None else self.entry.autoencoder

    @property
    def found_vae(self) -> str | Files:
        """`vae`, required.

        Raises:
            ConfigError: there is none.
        """
        if self.vae is None:
            raise ConfigError(f"{self.name} comes without an autoencoder; give --vae PATH, or make latents only")
        return self.vae

    @property
    def note(self) -> str:
        """Warning for a KV context that the model is not known to work with; else `noise_note`."""
        if self.entry is None and not self.embedded:
            return f"nobody says in which KV context {self.name} keeps its quality; it runs with {self.kv_context}"
        context = self.entry.context if self.entry is not None else None
        if context is None or self.kv_context == context.trained or self.kv_context in context.works:
            return self.noise_note
        trained = f"was trained for {context.trained}" if context.trained else "was trained for nobody says what"
        return f"{self.name} {trained}; whether it keeps its quality with KV context {self.kv_context} is not known"

    @property
    def noise_note(self) -> str:
        """Warning for a model that needs a video and would start from noise; else empty."""
        if self.entry is None or self.entry.begins_with == "noise":
            return ""
        return (
            f"{self.name} was made to change a video, and noise alone is nothing that it knows; a camera, `serve "
            "--input` and `generate --video-latents` give it one"
        )


def resolve_model(config: ModelConfig, architecture: Mapping[str, Any] | None = None) -> ResolvedModel:
    """The model that a configuration names, its parts those that it names instead: `tiny`, a name of the catalogue, a
    folder in diffusers' layout or with weights, a file, or a repository of the hub in diffusers' layout; or one without
    a file (`catalogue.RANDOM`). Its transformer is fetched if it is published, not there, and no part takes its
    place; of a repository everything that is needed is. `architecture`: see `ResolvedModel`.

    Raises:
        ConfigError: no such model, one with two experts, or a file that can neither be found nor fetched.
    """
    name, known = config.name, _find_known(config)
    loras = tuple(parse_lora(text) for text in config.lora if text != NO_LORA)
    if isinstance(known, CatalogueEntry) and name.startswith(catalogue.RANDOM):
        found = ResolvedModel(name, None, vae=f"{catalogue.RANDOM}{known.autoencoder}", entry=known)
    elif isinstance(known, CatalogueEntry):  # its container and its LoRA are those of weights that are given too
        assert known.weights is not None, "the embedded model is a folder"
        if known.lora is not None and NO_LORA not in config.lora:  # without it a model is not itself
            loras = (_own_lora(known.lora, loras), *loras)
        weights = None if config.weights is not None else hub.fetch(known.weights)[0]
        published = known.weights.container if known.weights.container != "flat" else None
        files = catalogue.files_of(known)
        vae, text = files.get("vae"), files.get("text_encoder")
        found = ResolvedModel(name, weights, usual_container=published, vae=vae, text_encoder=text, entry=known)
    else:
        if isinstance(known, Files):
            check_repository(config)
        path = known if isinstance(known, Path) else hub.fetch_folder(known)
        there = {part: path / part for part in _FOLDERS if (path / part).is_dir()}
        found = ResolvedModel(
            name,
            there.get("transformer", path),
            folder=path if path.is_dir() else None,
            index=_embedded_index(path),
            vae=str(there["vae"]) if "vae" in there else None,
            text_encoder=path if "text_encoder" in there else None,
        )
    if (transformer := config.weights or found.weights) is not None:
        weight_files.check_one_expert(Path(transformer))
    if found.embedded and config.text_encoder is not None:
        raise ConfigError(f"the text encoder of {name} is fixed; leave --text-encoder out")
    return replace(
        found,
        weights=found.weights if config.weights is None else Path(config.weights),
        container=config.container,
        architecture=architecture,
        kv_context=config.kv_context,
        loras=loras,
        vae=config.vae or found.vae,
        text_encoder=found.text_encoder if config.text_encoder is None else Path(config.text_encoder),
    )


def to_fetch(config: ModelConfig) -> list[Files]:
    """Published files that the model of `config` needs to make pictures from a text, on disk already or not. Uses no
    network.

    Raises:
        ConfigError: as `resolve_model`.
    """
    small = None if Path(config.vae or "").exists() else catalogue.autoencoders().get(config.vae or "")
    autoencoder = [] if small is None else [small]
    entry = _find_known(config)
    if isinstance(entry, Path) or catalogue.is_random(config.name):
        return autoencoder
    if isinstance(entry, Files):
        return [entry, *autoencoder]
    needed, own = catalogue.files_of(entry), NO_LORA not in config.lora
    given = {name: not own if name == "lora" else getattr(config, name) is not None for name in needed}
    return [files for name, files in needed.items() if not given[name]] + autoencoder


def check_repository(config: ModelConfig) -> None:
    """Raises ConfigError for a model that is a repository of the hub and has two experts: its small files are fetched
    and read before any weights are."""
    if isinstance(known := _find_known(config), Files) and config.weights is None:
        weight_files.check_one_expert(hub.fetch_folder(known, ["*.json"]))


def _own_lora(published: PublishedLora, given: Sequence[Lora]) -> Lora:
    """The LoRA that belongs to a model, fetched if it is not there.

    Raises:
        ConfigError: it can neither be found nor fetched, or is among the `given` ones too.
    """
    leave = f"`--lora {NO_LORA} --lora PATH` takes another one in its place"
    try:
        (path,) = hub.fetch(published)
    except ConfigError as error:
        raise ConfigError(f"the LoRA that belongs to the model: {error}; {leave}") from error
    for lora in given:
        if lora.path.is_file() and filecmp.cmp(path, lora.path, shallow=False):
            raise ConfigError(f"--lora {lora.path} is the model's own LoRA, which counts anyway; {leave}")
    return Lora(path, published.scale)


def check_parts(config: ModelConfig) -> None:
    """Raises ConfigError for a given part that is neither there nor published. Uses no network."""
    published = (EMBEDDED, *catalogue.autoencoders())
    for option, path, name in (
        ("--weights", config.weights, config.weights),
        *(("--lora", text, text.rpartition(":")[0]) for text in config.lora if text != NO_LORA),
        ("--vae", config.vae, config.vae),
        ("--text-encoder", config.text_encoder, config.text_encoder),
    ):
        is_name = option == "--vae" and (path in published or catalogue.is_random(path))
        there = [each for each in (path, name) if each and os.path.exists(each)]
        if path and not is_name and not any(os.access(each, os.R_OK) for each in there):
            raise ConfigError(f"{option} is {path}: {'it may not be read' if there else 'no such file or folder'}")


def completed(config: ModelConfig) -> ModelConfig:
    """`config` with unset values filled in: the model that its weights belong to, the KV context that this was trained
    for, and the small autoencoder of preset `fast`.

    Raises:
        ConfigError: the weights do not tell whose they are, or are not there.
    """
    if config.weights is not None and "name" not in config.model_fields_set:
        check_parts(config)
        config = config.model_copy(update={"name": entry_of(Path(config.weights)).name})
    entry = catalogue.entries().get(config.name)
    if "kv_context" not in config.model_fields_set and entry is not None and entry.context is not None:
        config = config.model_copy(update={"kv_context": entry.context.default})
    small = catalogue.small_autoencoder(config.name) if config.preset == "fast" and config.vae is None else None
    return config if small is None else config.model_copy(update={"vae": small})


def is_embedded(name: str | Path) -> bool:
    """Whether this is the embedded model's name, or a folder of its kind."""
    return name == EMBEDDED or _embedded_index(Path(name)) is not None


def _embedded_index(folder: Path) -> dict[str, Any] | None:
    """The `model_index.json` of a folder of the embedded model's kind; None of anything else."""
    path = folder / "model_index.json"
    index = weight_files.read_object(path) if path.is_file() else {}
    return index if "stream" in index else None


def is_repository(name: str) -> bool:
    """Whether this can be the name of a repository of the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and Path(name).suffix not in _FILES


def _find_known(config: ModelConfig) -> Path | Files | CatalogueEntry:
    """The folder or file that the configured name means, the files of a repository of the hub in diffusers' layout that
    are needed, or the catalogue's entry."""
    name = config.name
    path = EMBEDDED_WEIGHTS if name == EMBEDDED else Path(name)
    if not name.startswith(catalogue.RANDOM):
        if path.is_dir() or path.is_file():
            return path
        if is_repository(name):
            given = {"transformer": config.weights, "vae": config.vae, "text_encoder": config.text_encoder}
            needed = [f"{part}/*" for part in _FOLDERS if given[part] is None]
            tokenizer = ["tokenizer/*"] if config.text_encoder is None else []
            return Files(repo=name, files=("*.json", *needed, *tokenizer), licence=None)
        if "/" in name or path.suffix in _FILES:
            raise ConfigError(
                f"--model is {name}: there is no such file or folder, and it is no repository of the hub (OWNER/NAME); "
                "`streamdiff models` lists names"
            )
    return catalogue.find(name)


def entry_of(weights: Path) -> CatalogueEntry:
    """The model whose published file is called as `weights`, or as the file in the folder `weights`; else the only one
    with such tensors.

    Raises:
        ConfigError: its name and tensors are those of none or of several models, which are named; or which file of a
            folder is meant cannot be told.
    """
    if _embedded_index(weights) is not None:
        return catalogue.find(EMBEDDED)
    weight_files.check_one_expert(weights)
    file = weight_files.weights_file(weights) if weights.is_dir() else weights
    alike: dict[int, list[CatalogueEntry]] = {}
    for entry in catalogue.entries().values():
        alike.setdefault(_likeness(entry, file), []).append(entry)
    found = alike[max(alike)] if max(alike) else [each for each in catalogue.listed() if each.weights is not None]
    if len(found) == 1:
        return found[0]
    weight_files.check_file(file)  # what it cannot be is said before what it could be
    if file.name.endswith((weight_files.SAFETENSORS, weight_files.INDEX)):
        found = _of_its_tensors(file, found)
        if len(found) == 1:
            return found[0]
    names = ", ".join(entry.name for entry in found)
    if file.name.split(".")[0] in weight_files.USUAL_STEMS or _BASE.fullmatch(file.name):
        raise ConfigError(
            f"{weights}: is called as Wan's own base is. That is bidirectional, each frame sees all of a clip, in 50 "
            "steps with guidance, so it cannot stream: by a causal model's recipe it makes a blur. If it is a causal "
            f"model all the same, say which with --model NAME: {names}"
        )
    raise ConfigError(
        f"{weights}: its name does not tell which model it is: it could be {names}. Say which with --model NAME; "
        "Wan2.1 itself, which these grew from, cannot stream"
    )


def _of_its_tensors(file: Path, entries: Sequence[CatalogueEntry]) -> list[CatalogueEntry]:
    """Those of `entries` whose number of blocks, camera and action modules are those of a safetensors file, or of an
    index of several; all, where none's are.

    Raises:
        ConfigError: it holds no transformer.
    """
    if file.name.endswith(weight_files.INDEX):
        names = weight_files.read_object(file).get("weight_map")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(map(bare, names if isinstance(names, dict) else ()), ())
    else:
        shapes = {bare(name): each.shape for name, each in parse_header(file).entries.items()}
    if (what := weight_files.what_it_holds(shapes)) and "--weights" not in what:
        raise ConfigError(f"{file}: holds {what}")
    count, camera = block_count(shapes), any(name.startswith("patch_embedding_wancamctrl.") for name in shapes)
    acting = {int(match[1]): shape[1:] for name, shape in shapes.items() if (match := _ACTING.fullmatch(name))}

    def fits(own: Architecture) -> bool:
        steered = {} if own.actions is None else dict.fromkeys(own.actions.blocks, (own.actions.keyboard,))
        return (own.blocks, own.camera_channels is not None, steered) == (count, camera, acting)

    return [each for each in entries if fits(catalogue.parts().architectures[each.architecture])] or list(entries)


def _likeness(entry: CatalogueEntry, file: Path) -> int:
    """How many parts at the end of a file's path are as the entry's repository has them; 0 for a name that any model's
    file may have. In a folder that is called as the repository, or where the hub's client puts it, it is that one's."""
    if entry.weights is None:
        return 0
    repo, published = entry.weights.repo, (*entry.weights.files, *entry.weights.others)
    own = {repo.split("/")[-1], f"models--{repo.replace('/', '--')}"}
    in_own = any(part.removesuffix("-Diffusers") in own for part in file.parts)
    found = max(_parts_alike(Path(each), file) for each in published)
    usual = found <= 1 and file.name.split(".")[0] in weight_files.USUAL_STEMS
    return (0 if usual and not in_own else found) + in_own * len(file.parts)


def _parts_alike(one: Path, other: Path) -> int:
    """How many parts at the end of two paths are the same, but for the file's ending."""
    pairs = zip(reversed(one.with_suffix("").parts), reversed(other.with_suffix("").parts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# ---- settings that are left open ------------------------------------------------------------------------------------

_TABLE: dict[str, list[tuple[str, str, str]]] = yaml.safe_load(
    Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8")
)


class Choice(NamedTuple):
    """A setting's value, and the reason for it."""

    setting: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.value} ({self.reason})"


@dataclass(frozen=True)
class Defaults:
    """`config` with all defaults resolved that device or preset decide (`auto` of attention and quantize stays: a trial
    on the device decides it); torch's process-wide cuDNN flag; whether pictures lie in the decoder with the channels
    last (None: as its network has it); and every choice with its reason, for the log."""

    config: ModelConfig
    cudnn_benchmark: bool
    channels_last: bool | None
    choices: tuple[Choice, ...]


def settle(
    config: ModelConfig, device: str, steps: Sequence[int], compile_fault: Callable[[], str | None] = lambda: None
) -> Defaults:
    """The defaults of `config`, which `models.resolve.completed` gave, on a `device`, `cpu` or `cuda`.

    Args:
        steps: the numbers of denoise steps that the model has, the one it was made for first.
        compile_fault: says why nothing can be compiled here, None if it can.
    """
    cuda, plain = device == "cuda", config.preset == "plain"
    own = {name: getattr(config, name) for name in ("device", "dtype", "vae", "attention", "compile", "quantize")}
    own["steps"] = None if config.steps is None else config.step_count or len(config.timesteps or ())
    may_ask = cuda and not plain and config.compile == "auto" and config.attention != "sage"
    fault, usual, fewest = compile_fault() if may_ask else None, max(steps[:1], default=0), min(steps, default=0)
    holds = {
        "small": config.vae == small_autoencoder(config.name),  # the autoencoder of preset `fast`
        "unknown": not steps,  # the model has no steps of its own
        "fewer": fewest < usual,  # it has fewer than it was made for, too
        "fault": fault is not None,  # nothing can be compiled here
    }
    facts = {device, config.preset} | {name for name, true in holds.items() if true}
    facts |= {f"{name}:{value}" for name, value in own.items()}
    words = {"fault": fault, "usual": usual, "fewest": fewest, "all": " or ".join(map(str, steps))}
    found = dict[str, Choice]()
    for setting, rows in _TABLE.items():
        known = facts if own.get(setting) in (None, "auto", "none") else {*facts, "given"}
        row = next((row for row in rows if known.issuperset(row[0].split())), None)
        if row is not None:
            value, reason = (text.format(own=own.get(setting), **words) for text in row[1:])
            found[setting] = Choice(setting, value, reason)
            facts.add(f"{setting}:{value}")
    settled: dict[str, object] = {name: found[name].value for name in ("attention", "compile")}
    if config.preset == "fast" and config.steps is None and steps:
        settled["steps"] = fewest
    channels_last = False if plain else cuda or None
    return Defaults(config.model_copy(update=settled), cuda and not plain, channels_last, tuple(found.values()))


def may_compile(config: ModelConfig) -> bool:
    """Whether an engine with this configuration may compile graphs at its start, determined without importing torch."""
    if config.compile != "auto":
        return config.compile == "on"
    found = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))
    return config.preset != "plain" and (config.device == "cuda" or (config.device == "auto" and found))
