"""Wan's text encoder: UMT5 and its tokenizer, with embeddings as diffusers' WanPipeline has them: a fixed number of
rows, zero beyond the text; and caches of these embeddings, in memory and in files of the user's cache folder, so that a
text is encoded once.

Its files are in diffusers' layout or original Wan's, whose file holds the encoder alone, under names of its own
(`umt5_xxl.yaml`).
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import logging
import os
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import ftfy
import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.models.umt5.configuration_umt5 import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.atomic_write import temporary_sibling
from streamdiff.device import pick_dtype, side_stream
from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import Checkpoint, check_fit, checked, open_checkpoint
from streamdiff.models.spec import ParsedPrompt, TextEncoder
from streamdiff.models.weight_files import GGUF, read_object, some, what_it_holds

TEXT_TOKENS = 512
_UMT5: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "umt5_xxl.yaml").read_text(encoding="utf-8"))
_LAST_WORDS = 8  # tokens of a cut prompt's end that a notice shows
_TEXTS_IN_MEMORY = 64
"""Each has 4 MB, with 512 x 4096 numbers in bfloat16."""


class WanText(TextEncoder):
    """Wan's. Each text is encoded once, as long as it is among the last in memory or in `kept`. For several threads;
    they encode one after the other."""

    examples = tuple(_UMT5["examples"])
    vocabulary = _UMT5["vocabulary"]
    slow = True

    def __init__(
        self,
        path: Path,
        *,
        length: int = TEXT_TOKENS,
        width: int | None = None,
        device: torch.device | str | None = None,
        output: torch.device | str | None = None,
        kept: EmbeddingFolder | None = None,
    ) -> None:
        """Reads the tokenizer and the encoder's sizes; the weights come with the first text.

        Args:
            path: a model in diffusers' layout, or original Wan's: the folder, or the encoder's file.
            length: text tokens T that the model was trained with.
            width: text width that the transformer asks for; None: whatever the encoder has.
            device: where the encoder runs, in bfloat16 on a GPU, float32 on the CPU; None: on `output` where it takes a
                third of the free memory or less, else on the CPU.
            output: where embeddings are put; None: `device`, or the CPU.
            kept: where embeddings are kept on disk; None: nowhere.

        Raises:
            ConfigError: a part that is missing or cannot be read, or an encoder of another kind or width.
        """
        self.path, self.length, self._kept = path, length, kept
        self._remembered = lru_cache(_TEXTS_IN_MEMORY)(self._find)
        self._files = find_text_files(path)
        self._config = read_config(self._files, width)
        self.width: int = self._config.d_model
        self.output = torch.device(output or device or "cpu")
        self.device = choose_device(self._files, self.output) if device is None else torch.device(device)
        self.dtype = pick_dtype("auto", self.device)
        self.revision = revision(self._files)
        self._tokenizer = load_tokenizer(self._files.tokenizer, self._config.vocab_size)
        # Padding and truncation are settings of the tokenizer's own, so two threads must not use it at once.
        self._tokenizing, self._encoding = threading.Lock(), threading.Lock()
        self._encoder: UMT5EncoderModel | None = None

    @property
    def loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self._encoder is not None

    def key(self, text: str) -> str:
        """Of the embeddings of `text`: a digest of all that they depend on."""
        whole = (f"{self.path.resolve()} {self.dtype}", self.revision, self.length, text)
        return hashlib.sha256(repr(whole).encode()).hexdigest()

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        """The prompt as it is; the notice says where it is cut if it is too long."""
        with self._tokenizing:
            ids = self._tokenizer(_clean(prompt), truncation=False, padding=False, verbose=False).input_ids
            if len(ids) <= self.length:
                return ParsedPrompt(prompt)
            kept = ids[: self.length - 1]  # the last one ends the text
            end = self._tokenizer.decode(kept[-_LAST_WORDS:]).strip()
        return ParsedPrompt(
            prompt,
            f"The prompt has {len(ids):,} tokens, and the model reads {self.length:,}: it ends for it after “…{end}”.",
        )

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, D]` of one text, `dtype`, on `output`; rows beyond the text are zero. They are shared: not to
        be written to.

        Raises:
            ConfigError: see `encode_anew`.
        """
        return self._remembered(text)

    def _find(self, text: str) -> Tensor:
        if self._kept is None:
            return self.encode_anew(text)
        key = self.key(text)
        if (found := self._kept.get(key)) is not None:
            return found.to(self.output)
        embeddings = self.encode_anew(text)
        self._kept.put(key, embeddings)
        return embeddings

    def encode_anew(self, text: str) -> Tensor:
        """As `encode`, by the encoder. Loads the weights if they are not there. On the CPU all cores take part.

        Only the text's own tokens are encoded: attention is masked and positions are relative, so their rows are those
        of a text padded to T tokens, which takes ten times as long.

        Raises:
            ConfigError: weights that are not those of the encoder, or that give values that are not finite.
        """
        tokens = self.tokens(text)
        with self._encoding:
            if self._encoder is None:
                self._encoder = load_encoder(self._files, self._config, self.device, self.dtype)
            with torch.inference_mode(), side_stream(self.device), _all_cores(self.device):
                ids = tokens.to(self.device)
                hidden = self._encoder(ids, torch.ones_like(ids)).last_hidden_state[0]
        if not bool(hidden.isfinite().all()):
            raise ConfigError(f"the text encoder in {self.path} gave values that are not finite in {self.dtype}")
        embeddings = torch.zeros(self.length, self.width, dtype=self.dtype, device=self.output)
        embeddings[: len(hidden)] = hidden.to(self.output)
        return embeddings

    def tokens(self, text: str) -> Tensor:
        """The ids of the text cleaned and cut to T tokens, int64 `[1, n]`."""
        with self._tokenizing:
            found = self._tokenizer(_clean(text), max_length=self.length, truncation=True, padding=False, verbose=False)
        return torch.tensor([found.input_ids])

    def awaited_bytes(self, device: torch.device) -> int:
        """Bytes that the weights will take on `device` once loaded; 0 if they are loaded, or go to another device."""
        return 0 if self.loaded or self.device.type != device.type else self._files.values * self.dtype.itemsize


def _clean(text: str) -> str:
    """As diffusers and original Wan clean a prompt: broken encodings mended, entities resolved, white space simple."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


@contextlib.contextmanager
def _all_cores(device: torch.device) -> Iterator[None]:
    """On the CPU, let torch use every core that this process may; afterwards as many threads as before. Other threads
    of the process that use torch already keep their own number."""
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, _cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_SHARE = 3  # the rest of a GPU's free memory is for sessions
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
_INSIDE = "spiece_model"
"""The tensor that has the bytes of a `spiece.model`."""
_WEIGHTS = "models_t5*.pth"
_TOKENIZERS = ("google/umt5-xxl", "umt5-xxl", "tokenizer", ".")
_STEMS = ("model",)
_TABLE, _SAME_TABLE = "shared.weight", "encoder.embed_tokens.weight"
"""The table of words, by both of its names. A file has one of them, or both, whatever its config.json says of them."""


@dataclass(frozen=True)
class TextFiles:
    """`weights` is a folder with `config.json`, as diffusers has it, or one file; `tokenizer` is a folder, or that file
    where it is inside it, as Comfy has it."""

    weights: Path
    tokenizer: Path

    @property
    def original(self) -> bool:
        """Whether it is the original file."""
        return not self.weights.is_dir()

    @cached_property
    def values(self) -> int:
        """How many numbers the encoder's weights are. Reads headers, no weights.

        Raises:
            ConfigError: there are no weights, or they are damaged.
        """
        checkpoint = open_checkpoint(self.weights, names=_STEMS)
        return sum(checkpoint.entries[name].numel() for name in checkpoint.names)


def find_text_files(path: Path) -> TextFiles:
    """The parts at `path`: a folder with `text_encoder` and `tokenizer`; the original file, with the tokenizer in
    `google/umt5-xxl` or `tokenizer` beside it; or the folder that has these two.

    Raises:
        ConfigError: nothing of this kind, a file without a tokenizer, or several that could be meant.
    """
    if path.suffix == GGUF:
        raise ConfigError(
            f"{path}: a text encoder is not read as GGUF; as small, and read, is one in fp8 with scales: "
            "umt5_xxl_fp8_e4m3fn_scaled.safetensors of Comfy-Org/Wan_2.1_ComfyUI_repackaged"
        )
    if not path.is_dir():
        checkpoint = open_checkpoint(path)
        if (what := what_it_holds(checkpoint.names)) and "--text-encoder" not in what:
            raise ConfigError(f"{path}: not Wan's text encoder: it holds {what}")
        return TextFiles(path, _tokenizer_beside(path, inside=_INSIDE in checkpoint.entries))
    files = [] if (path / "text_encoder").is_dir() else sorted(path.glob(_WEIGHTS))
    if len(files) > 1:
        raise ConfigError(
            f"{path}: has {len(files)} text encoders ({', '.join(file.name for file in files)}); name one"
        )
    if files:
        return TextFiles(files[0], _tokenizer_beside(files[0]))
    if not (path / "text_encoder").is_dir():
        config = path / "config.json"
        if config.is_file() and read_object(config).get("model_type") == "umt5":
            raise ConfigError(
                f"{path}: is the text encoder alone; give the folder that has text_encoder and tokenizer: {path.parent}"
            )
        raise ConfigError(
            f"{path}: has no text encoder; expected text_encoder and tokenizer in it, as diffusers has them, or "
            f"{_WEIGHTS} with google/umt5-xxl; it has {some(sorted(each.name for each in path.iterdir())) or 'nothing'}"
        )
    return TextFiles(path / "text_encoder", path / "tokenizer")


def _tokenizer_beside(file: Path, inside: bool = False) -> Path:
    """The folder of the tokenizer that goes with an encoder's file; the file itself, where only `inside` it is one."""
    for place in _TOKENIZERS:
        folder = file.parent / place
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return folder
    if inside:
        return file
    raise ConfigError(
        f"{file}: there is no tokenizer beside it; the original repository has it in {file.parent / _TOKENIZERS[0]} "
        f"({' or '.join(TOKENIZER_FILES)})"
    )


def read_config(files: TextFiles, width: int | None = None) -> UMT5Config:
    """The encoder's configuration: of the folder, or of the file.

    Raises:
        ConfigError: no encoder of this kind, or not of this `width`.
    """
    config = UMT5Config(**_sizes(open_checkpoint(files.weights))) if files.original else _stored_config(files)
    if width not in (None, config.d_model):
        raise ConfigError(f"{files.weights}: d_model is {config.d_model}; the transformer's text_dim is {width}")
    return config


def _sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments of `UMT5Config` for the encoder in a file: as published, or where it has another width, by shapes."""
    shapes = {name: checkpoint.entries[source].shape for name, source in _sources(checkpoint).items()}
    known = [(keys, shapes[name]) for name, keys in _UMT5["sizes"].items() if name in shapes]
    found = {key: size for keys, shape in known for key, size in zip(keys, shape, strict=False)}
    if found.get("d_model") in (None, _UMT5["config"]["d_model"]) or not found.get("num_heads"):
        return dict(_UMT5["config"])
    blocks = {name.split(".")[2] for name in shapes if name.startswith("encoder.block.")}
    inner = found.get("d_kv", 0) // found["num_heads"]
    return {**_UMT5["config"], **found, "d_kv": inner, "num_layers": len(blocks)}


def _stored_config(files: TextFiles) -> UMT5Config:
    path = files.weights / "config.json"
    try:
        stored = read_object(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; diffusers' layout has the text encoder there") from None
    kind = stored.get("model_type")
    if kind != "umt5" or not all(isinstance(stored.get(key), int) for key in ("d_model", "vocab_size")):
        raise ConfigError(
            f"{path}: expected a UMT5 encoder (model_type umt5, with d_model and vocab_size), got model_type {kind!r}"
        )
    try:
        return UMT5Config.from_dict(stored)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a configuration of UMT5: {error}") from None


def load_encoder(files: TextFiles, config: UMT5Config, device: torch.device, dtype: torch.dtype) -> UMT5EncoderModel:
    """The encoder, for inference.

    Raises:
        ConfigError: no such encoder; or tensors that are missing, unexpected or misshapen, which are listed.
    """
    encoder, checkpoint, sources = _outlined(files, config)
    for name, source in sources.items():  # one by one: a file with scales is larger as it is read
        one = checked(files.weights, {name: checkpoint.read(source)}, device, dtype)
        encoder.load_state_dict(one, strict=False, assign=True)
    encoder.set_input_embeddings(encoder.shared)
    encoder.requires_grad_(False)
    encoder.train(False)
    return encoder


def check_text_files(path: Path, width: int) -> None:
    """Open the text encoder at `path` as `WanText` does, for a transformer that asks for texts of this `width`, without
    reading weights or words.

    Raises:
        ConfigError: as `WanText` and `load_encoder`, but for values.
    """
    files = find_text_files(path)
    _outlined(files, read_config(files, width))
    revision(files)
    _check_tokenizer(files.tokenizer)


def _outlined(files: TextFiles, config: UMT5Config) -> tuple[UMT5EncoderModel, Checkpoint, dict[str, str]]:
    """The encoder without memory, its checkpoint, and the stored name of each tensor. ConfigError as `load_encoder`,
    but for values."""
    path = files.weights
    checkpoint = open_checkpoint(path, names=_STEMS)
    try:
        with torch.device("meta"):
            encoder = UMT5EncoderModel(config)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path}: the text encoder cannot be loaded: {error}") from error
    sources = _sources(checkpoint)
    wanted = {name: tensor.shape for name, tensor in encoder.state_dict().items() if name != _SAME_TABLE}
    check_fit(path, {name: checkpoint.entries[source] for name, source in sources.items()}, wanted)
    return encoder, checkpoint, sources


def _sources(checkpoint: Checkpoint) -> dict[str, str]:
    """Stored names of tensors by those of transformers, the table of words under one of its two names."""
    found = {_name(name): name for name in checkpoint.names}
    if (table := found.pop(_SAME_TABLE, None)) is not None:
        found.setdefault(_TABLE, table)
    return found


def _name(original: str) -> str:
    """transformers' name of a tensor of the original file; an unknown name stays as it is."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", original)
    if match is None or match[2] not in _UMT5["block"]:
        return str(_UMT5["top"].get(original, original))
    return f"encoder.block.{match[1]}.{_UMT5['block'][match[2]]}.weight"


def load_tokenizer(path: Path, words: int) -> Any:
    """The tokenizer of an encoder that knows `words` words."""
    _check_tokenizer(path)
    try:
        tokenizer: Any = (
            AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side="right")
            if path.is_dir()
            else _inner_tokenizer(open_checkpoint(path).read(_INSIDE).numpy().tobytes())
        )
    except Exception as error:  # a damaged file makes the tokenizers library raise just that
        raise ConfigError(f"{path}: no tokenizer that can be read: {error}") from error
    if len(tokenizer) > words:
        raise ConfigError(
            f"{path}: the tokenizer has {len(tokenizer):,} words, but the text encoder beside it knows {words:,}; they "
            "do not belong together"
        )
    return tokenizer


def _inner_tokenizer(model: bytes) -> PreTrainedTokenizerFast:
    """The tokenizer of a SentencePiece model, a message of protocol buffers, as transformers makes T5's of it: field 1
    is a word (1: the text, 2: its score), field 2 of field 3 the table that normalises characters."""
    parts = list(_fields(model))
    words = [dict(_fields(value)) for number, value in parts if number == 1]
    vocab = [(word[1].decode(), struct.unpack("<f", word.get(2, bytes(4)))[0]) for word in words]
    names = [name for name, _ in vocab]
    tokenizer = Tokenizer(models.Unigram(vocab, names.index("<unk>"), byte_fallback=False))
    for table in (dict(_fields(value)).get(2) for number, value in parts if number == 3):
        tokenizer.normalizer = normalizers.Precompiled(table) if table else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    end = ("</s>", names.index("</s>"))
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[end])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end[0], unk_token="<unk>", pad_token="<pad>")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and content of the fields of a message of protocol buffers that hold bytes or four-byte numbers."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        if tag & 7 == 0:
            _, place = _varint(message, place)
            continue
        size, place = _varint(message, place) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], place)
        yield tag >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The number of seven bits a byte at `place`, and where it ends."""
    value = shift = 0
    while True:
        value |= (message[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if message[place - 1] < 128:
            return value, place


def _check_tokenizer(path: Path) -> None:
    if path.is_file():  # the encoder's, and it is inside
        return
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder; diffusers' layout has the tokenizer there")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers would make one without words
        raise ConfigError(f"{path}: no tokenizer that can be read: expected {' or '.join(TOKENIZER_FILES)}")


def choose_device(files: TextFiles, device: torch.device) -> torch.device:
    """Where the encoder runs beside a transformer on `device`, whose weights are there already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if files.values * torch.bfloat16.itemsize <= free // _SHARE:
            return device
    return torch.device("cpu")


def revision(files: TextFiles) -> str:
    """Of the files as they are now; weights are not read."""
    digest, weights = hashlib.sha256(), [files.weights] if files.original else files.weights.glob("*")
    for path in sorted([*weights, *files.tokenizer.glob("*")]):
        try:
            state = path.stat()
        except OSError as error:  # a link that leads nowhere
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


logger = logging.getLogger(__name__)

MAX_BYTES = 512 * 2**20
_TENSOR, _ROWS = "embeddings", "rows"


class EmbeddingFolder:
    """Embeddings `[T, text_dim]` by key, one file each; those used longest ago go first. Several processes may use a
    folder at the same time. What cannot be read counts as not there, and what cannot be written is not kept.

    Only the user can read it: the folder has mode 0700, its files 0600. They hold no text, but who can read them and
    has the encoder can tell whether a text that he thinks of was asked for.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        """`folder` is made with the first file; by default `streamdiff/embeddings` in the user's cache folder
        (`XDG_CACHE_HOME`, else `~/.cache`)."""
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.folder = folder or Path(caches) / "streamdiff" / "embeddings"
        self.max_bytes = max_bytes
        self._writable = True

    def get(self, key: str) -> Tensor | None:
        """The embeddings on the CPU, as they were put; None if they are not here. A damaged file is removed."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                kept, rows = file.get_tensor(_TENSOR), int((file.metadata() or {})[_ROWS])
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, ValueError):
            with contextlib.suppress(OSError):  # a folder that is only read
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        embeddings = torch.zeros(rows, *kept.shape[1:], dtype=kept.dtype)
        embeddings[: len(kept)] = kept
        return embeddings

    def put(self, key: str, embeddings: Tensor) -> None:
        """Keep embeddings `[T, text_dim]`, without the zero rows at their end; drops others for room. Never raises for
        a disk that is full or cannot be written: says so once on standard error."""
        used = embeddings.any(1).nonzero()
        count = int(used[-1]) + 1 if len(used) else 0
        data = save({_TENSOR: embeddings[:count].contiguous().cpu()}, {_ROWS: str(len(embeddings))})
        if len(data) > self.max_bytes or not self._writable:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary_sibling(self._path(key)) as part:
                part.touch(mode=0o600)
                part.write_bytes(data)
                part.replace(self._path(key))
            self._drop()
        except OSError as error:
            self._writable = False
            logger.warning("note: prompts' embeddings are not kept on disk: %s", error)

    def _drop(self) -> None:
        """Remove what was used longest ago, until the rest fits."""
        found = []
        for path in self.folder.iterdir():
            try:
                state = path.stat()
            except FileNotFoundError:  # another process was quicker
                continue
            found.append((state.st_mtime_ns, state.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"
