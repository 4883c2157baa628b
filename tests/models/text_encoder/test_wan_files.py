"""The text encoder's file of the original repository: the embeddings of the same weights in diffusers' layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.umt5.configuration_umt5 import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.models import text_encoder as wan_text
from streamdiff.models.checkpoint import open_checkpoint
from streamdiff.models.text_encoder import WanText
from tests.models.text_encoder import umt5

LENGTH = 24
PROMPT = "a red fox trots through fresh snow"
PUBLISHED = dict(wan_text._UMT5["config"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """diffusers' and the original one, which are as large as the file of the original repository is taken to be."""
    ours, theirs = tmp_path_factory.mktemp("diffusers"), tmp_path_factory.mktemp("original")
    encoder = umt5.write(ours, max_distance=128)
    umt5.write_original(theirs, ours, encoder)
    with pytest.MonkeyPatch.context() as patch:
        umt5.take_for_the_published_one(encoder, patch)
        yield ours, theirs


def file_of(folder: Path) -> Path:
    (file,) = folder.glob("*.pth")
    return file


@pytest.mark.slow
def test_embeddings_are_those_of_the_folder(folders: tuple[Path, Path]) -> None:
    ours, theirs = folders
    expected = WanText(ours, length=LENGTH, width=umt5.WIDTH).encode(PROMPT)
    for path in (theirs, file_of(theirs)):
        text = WanText(path, length=LENGTH, width=umt5.WIDTH)
        assert torch.equal(text.encode(PROMPT), expected)
        assert text.revision == WanText(theirs).revision


def test_a_file_of_another_width_is_as_large_as_its_shapes_say(tmp_path: Path) -> None:
    encoder = umt5.write(tmp_path, width=24, max_distance=PUBLISHED["relative_attention_max_distance"])
    text = WanText(umt5.write_original(tmp_path / "original", tmp_path, encoder), length=LENGTH, width=24)
    assert torch.equal(text.encode(PROMPT), WanText(tmp_path, length=LENGTH).encode(PROMPT))


def changed(theirs: Path, folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = torch.load(file_of(theirs), weights_only=True)
    edit(tensors)
    (folder / "google").mkdir()
    (folder / "google" / "umt5-xxl").symlink_to(theirs / "google" / "umt5-xxl")
    torch.save(tensors, folder / "models_t5_small.pth")
    return folder / "models_t5_small.pth"


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.pop("norm.weight"),
        lambda t: t.update({"blocks.0.odd.weight": torch.ones(2)}),
        lambda t: t.update({"blocks.1.attn.o.weight": torch.ones(2, 3)}),
        lambda t: t.pop("token_embedding.weight"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, edit: Callable[[dict[str, Tensor]], object]
) -> None:
    path = changed(folders[1], tmp_path, edit)
    with pytest.raises(ConfigError):
        WanText(path, length=LENGTH).encode(PROMPT)


def test_the_published_file_is_umt5_xxl() -> None:
    """As large as the catalogue says: 5.7 billion numbers, 11.4 GB in bfloat16. Another one is as its shapes say."""
    with torch.device("meta"):
        encoder = UMT5EncoderModel(UMT5Config(**PUBLISHED))
    encoder.set_input_embeddings(encoder.shared)
    known = catalogue.parts().text_encoders["umt5-xxl"]
    assert encoder.config.d_model == known.width and known.gigabytes is not None
    assert 2e-9 * sum(each.numel() for each in encoder.parameters()) == pytest.approx(known.gigabytes, rel=0.01)


def test_without_a_tokenizer_it_says_where_one_is_expected(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "alone.pth").write_bytes(file_of(folders[1]).read_bytes())
    with pytest.raises(ConfigError):
        WanText(tmp_path / "alone.pth")


@pytest.mark.parametrize(
    "prompt",
    [
        "caf\u00c3\u00a9 by the sea",  # UTF-8 read as Latin-1
        "\u201ccurly\u201d \u2018quotes\u2019",
        "\uff26\uff35\uff2c\uff2c width, \ufb01ligature",
        "&lt;b&gt; &amp;amp; \u00a0 space\r\n\x1b[31mred",
        "plain words",
    ],
)
def test_prompts_are_cleaned_as_diffusers_cleans_them(prompt: str) -> None:
    assert wan_text._clean(prompt) == prompt_clean(prompt)


@pytest.mark.parametrize("scaled", [False, True])
def test_one_file_in_hugging_faces_names(folders: tuple[Path, Path], tmp_path: Path, scaled: bool) -> None:
    """As ComfyUI has it: a tokenizer inside, and 8 bits with a scale for each matrix."""
    ours, _ = folders
    inside = torch.frombuffer(bytearray(umt5.sentence_piece(ours)), dtype=torch.uint8)
    checkpoint = open_checkpoint(ours / "text_encoder", names=("model",))
    stored, marks = {name: checkpoint.read(name).clone() for name in checkpoint.names}, {}
    meant = dict(stored)
    for name in [name for name in stored if scaled and "SelfAttention.q" in name]:
        scale = stored[name].abs().max() / 448
        stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        meant[name] = stored[name].float() * scale
        marks[name.replace("weight", "scale_weight")] = scale
    marks |= {"scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)} if scaled else {}
    found = []
    for name, state in (("umt5.safetensors", stored | marks), ("plain.safetensors", meant)):
        save_file({**state, "spiece_model": inside}, tmp_path / name)
        found.append(WanText(tmp_path / name, length=LENGTH, width=umt5.WIDTH).encode(PROMPT))
    assert torch.equal(*found)
    assert torch.equal(found[0], WanText(ours, length=LENGTH).encode(PROMPT)) is not scaled
    one, folder = WanText(tmp_path / "umt5.safetensors", length=LENGTH), WanText(ours, length=LENGTH)
    for words in (*umt5.WORDS, "a  fox, \u4e2d & snow " * 9, ""):
        assert torch.equal(one.tokens(words), folder.tokens(words))
        assert one.read(words, None) == folder.read(words, None)


@pytest.mark.parametrize("inside", [b"", b"\x0a\xff", b"\x0f", bytes(9)])
def test_a_damaged_tokenizer_inside_is_refused(inside: bytes, folders: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folders[0] / "text_encoder", names=("model",))
    state = {name: checkpoint.read(name).clone() for name in checkpoint.names}
    save_file(state | {"spiece_model": torch.tensor(list(inside), dtype=torch.uint8)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="no tokenizer that can be read"):
        WanText(tmp_path / "a.safetensors")
