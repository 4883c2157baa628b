"""Wan's text encoder: the numbers of diffusers' own pipeline, from a folder in diffusers' layout. Also UMT5 in one
file."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.wan.pipeline_wan import WanPipeline, prompt_clean
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.umt5.configuration_umt5 import UMT5Config
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, text_encoder
from streamdiff.models import text_encoder as wan_text
from streamdiff.models.checkpoint import open_checkpoint
from streamdiff.models.text_encoder import WanText
from tests.models.text_encoder import umt5

LENGTH = 24
FOX = "a red fox trots"
PROMPTS = [
    FOX,
    "  a red\tfox \n\n trots ",
    "snow &amp;amp; stars &lt;far&gt;",
    "a fox \u96ea\u7684\u72d0\u72f8 \U0001f98a",
    "",
    " ".join(umt5.WORDS),
]
Names = dict[str, Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, UMT5EncoderModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, umt5.write(folder)


@pytest.fixture(scope="module")
def folder(original: tuple[Path, UMT5EncoderModel]) -> Path:
    return original[0]


@pytest.fixture(scope="module")
def text(folder: Path) -> WanText:
    return WanText(folder, length=LENGTH, width=umt5.WIDTH)


@pytest.fixture(scope="module")
def reference(original: tuple[Path, UMT5EncoderModel]) -> WanPipeline:
    """diffusers' pipeline on the encoder as it was before it was written."""
    folder, encoder = original
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return WanPipeline(tokenizer, encoder, None, FlowMatchEulerDiscreteScheduler())


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[[Callable[[Names], object]], Path]:
    """A copy of the folder whose weights are in one file and have been changed by a function."""

    def change(edit: Callable[[Names], object]) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(folder / "tokenizer", copy / "tokenizer")
        (copy / "text_encoder").mkdir()
        shutil.copy(folder / "text_encoder" / "config.json", copy / "text_encoder")
        tensors: Names = {}
        for path in (folder / "text_encoder").glob("*.safetensors"):
            tensors |= load_file(path)
        edit(tensors)
        save_file(tensors, copy / "text_encoder" / "model.safetensors", {"format": "pt"})
        return copy

    return change


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_embeddings_are_those_of_diffusers(text: WanText, reference: WanPipeline, prompt: str) -> None:
    with torch.no_grad():
        expected = reference._get_t5_prompt_embeds(prompt, max_sequence_length=LENGTH, device=torch.device("cpu"))
    embeddings = text.encode(prompt)
    assert embeddings.shape == (LENGTH, umt5.WIDTH) and embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings, expected[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(embeddings.any(1), expected[0].any(1)), "zero beyond the text"
    assert embeddings.any(1).sum() == text.tokens(prompt).shape[1]


def test_only_the_texts_own_tokens_are_encoded_on_all_cores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 that the model reads; the thread has its own number of cores again afterwards."""
    text, seen = WanText(folder), list[tuple[tuple[int, ...], int]]()
    text.encode(FOX)
    assert text._encoder is not None
    text._encoder.register_forward_pre_hook(
        lambda _, given: seen.append((tuple(given[0].shape), torch.get_num_threads()))
    )
    monkeypatch.setattr(text_encoder, "_cores", lambda: 3)
    before = torch.get_num_threads()
    count = text.tokens(FOX).shape[1]
    text.encode_anew(FOX)
    assert seen == [((1, count), 3)] and count < 20
    assert torch.get_num_threads() == before


def test_what_the_weights_will_take_is_known_before_they_are_read(folder: Path) -> None:
    text, cuda, cpu = WanText(folder, device="cuda"), torch.device("cuda"), torch.device("cpu")
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder")
    values = sum(parameter.numel() for parameter in encoder.parameters())
    assert text.awaited_bytes(cuda) == 2 * values
    assert text.awaited_bytes(cpu) == 0, "they go elsewhere"
    here = WanText(folder)
    assert here.awaited_bytes(cpu) == 4 * values
    here.encode(FOX)
    assert here.awaited_bytes(cpu) == 0, "they are there"


def test_a_prompt_is_read_as_it_is_and_a_long_one_gets_a_notice(text: WanText, folder: Path) -> None:
    assert text.read("  A &amp; b ", "before") == text_encoder.ParsedPrompt("  A &amp; b ")
    count = WanText(folder, length=200).tokens(PROMPTS[-1]).shape[1]
    assert WanText(folder, length=count).read(PROMPTS[-1], None).notice == ""
    cut = WanText(folder, length=count - 1).read(PROMPTS[-1], None)
    assert cut.text == PROMPTS[-1]
    assert f"has {count} tokens, and the model reads {count - 1}" in cut.notice
    assert "far awa”" in cut.notice, "it says where the prompt ends for the model"
    assert text.encode(cut.text).shape == (LENGTH, umt5.WIDTH), "reading with another length changed no setting"


@pytest.mark.parametrize(("value", "words"), [(3e38, "not finite in torch.float32"), (torch.nan, "1 tensors hold NaN")])
def test_values_that_are_not_finite_are_refused(
    value: float, words: str, changed: Callable[[Callable[[Names], object]], Path]
) -> None:
    text = WanText(changed(lambda t: t["encoder.final_layer_norm.weight"].fill_(value)), length=LENGTH)
    with pytest.raises(ConfigError, match=words):
        text.encode(FOX)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("encoder.embed_tokens",), ("shared", "encoder.embed_tokens")])
def test_the_table_of_words_may_have_either_name(
    text: WanText, changed: Callable[[Callable[[Names], object]], Path], names: tuple[str, ...]
) -> None:
    def rename(tensors: Names) -> None:
        table = tensors.pop("shared.weight")
        tensors.update({f"{name}.weight": table.clone() for name in names})

    assert torch.equal(WanText(changed(rename), length=LENGTH).encode(FOX), text.encode(FOX))


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.pop("encoder.final_layer_norm.weight"),
        lambda t: t.pop("shared.weight"),
        lambda t: t.update(odd=torch.ones(2)),
        lambda t: t.update({"encoder.final_layer_norm.weight": torch.ones(3)}),
    ],
)
def test_weights_that_do_not_fit_are_named(
    changed: Callable[[Callable[[Names], object]], Path], edit: Callable[[Names], object]
) -> None:
    text = WanText(changed(edit), length=LENGTH)
    with pytest.raises(ConfigError):
        text.encode(FOX)
    assert not text.loaded


def _remove(path: str) -> Callable[[Path], object]:
    return lambda folder: shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()


def _write(path: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_text(content)


@pytest.mark.parametrize(
    "edit",
    [
        _remove("text_encoder/config.json"),
        _write("text_encoder/config.json", "{"),
        _write("text_encoder/config.json", json.dumps({"model_type": "t5", "d_model": 32})),
        _remove("tokenizer"),
        _write("tokenizer/tokenizer.json", '{"added_tokens": []}'),
        _remove("tokenizer/tokenizer.json"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_at_once(
    folder: Path, tmp_path: Path, edit: Callable[[Path], object]
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    edit(tmp_path / "copy")
    with pytest.raises(ConfigError):
        WanText(tmp_path / "copy")


def test_another_width_than_the_transformer_asks_for_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError):
        WanText(folder, width=4096)


def test_the_revision_follows_the_files(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    before = WanText(tmp_path / "copy").revision
    assert WanText(tmp_path / "copy").revision == before
    with (tmp_path / "copy" / "tokenizer" / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    assert WanText(tmp_path / "copy").revision != before


@pytest.mark.slow
def test_reading_and_encoding_at_once_do_not_disturb_each_other(folder: Path) -> None:
    """One tokenizer, whose padding and cutting are settings of its own; one encoder."""
    text = WanText(folder, length=LENGTH)
    expected = {prompt: (text.encode(prompt), text.read(prompt, None)) for prompt in PROMPTS}
    start, wrong = threading.Barrier(3), []

    def encode() -> None:
        start.wait()
        wrong.extend(prompt for prompt in PROMPTS if not torch.equal(text.encode_anew(prompt), expected[prompt][0]))

    def read() -> None:
        start.wait()
        for _ in range(50):
            wrong.extend(prompt for prompt in PROMPTS if text.read(prompt, None) != expected[prompt][1])

    threads = [threading.Thread(target=work) for work in (encode, encode, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FILE_LENGTH = 24
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
    expected = WanText(ours, length=FILE_LENGTH, width=umt5.WIDTH).encode(PROMPT)
    for path in (theirs, file_of(theirs)):
        text = WanText(path, length=FILE_LENGTH, width=umt5.WIDTH)
        assert torch.equal(text.encode(PROMPT), expected)
        assert text.revision == WanText(theirs).revision


def test_a_file_of_another_width_is_as_large_as_its_shapes_say(tmp_path: Path) -> None:
    encoder = umt5.write(tmp_path, width=24, max_distance=PUBLISHED["relative_attention_max_distance"])
    text = WanText(umt5.write_original(tmp_path / "original", tmp_path, encoder), length=FILE_LENGTH, width=24)
    assert torch.equal(text.encode(PROMPT), WanText(tmp_path, length=FILE_LENGTH).encode(PROMPT))


def changed_file(theirs: Path, folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
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
    path = changed_file(folders[1], tmp_path, edit)
    with pytest.raises(ConfigError):
        WanText(path, length=FILE_LENGTH).encode(PROMPT)


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
        found.append(WanText(tmp_path / name, length=FILE_LENGTH, width=umt5.WIDTH).encode(PROMPT))
    assert torch.equal(*found)
    assert torch.equal(found[0], WanText(ours, length=FILE_LENGTH).encode(PROMPT)) is not scaled
    one, folder = WanText(tmp_path / "umt5.safetensors", length=FILE_LENGTH), WanText(ours, length=FILE_LENGTH)
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
