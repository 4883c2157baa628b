"""`generate --prompts`: one engine, each video as it is alone, faults named at the end, and going on where it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from streamdiff import api
from streamdiff.cli import main
from streamdiff.commands.generate import read_lines
from streamdiff.config import ModelConfig
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.video import files
from tests.small import BLUE, CPU, RED, WHITE, small_model

MODEL = small_model(4)
SIZE = f"{MODEL.spec.width}x{MODEL.spec.height}"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModelConfig]]:
    """Each time a model was loaded: a very small one."""
    loaded: list[ModelConfig] = []

    def load(config: ModelConfig) -> StreamingPipeline:
        loaded.append(config)
        return StreamingPipeline(MODEL, CPU)

    monkeypatch.setattr(api, "load_model", load)
    yield loaded


def generate(*arguments: str | Path) -> int:
    return main.main(["generate", *map(str, arguments)])


def pictures(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])


def write_jsonl(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.slow
def test_every_video_is_what_its_prompt_and_seed_give_alone(tmp_path: Path, loads: list[ModelConfig]) -> None:
    """Also the one after a video that was longer, and one with the prompt of another."""
    prompts = write_jsonl(
        tmp_path / "prompts.jsonl",
        {"prompt": RED, "seed": 3, "seconds": 1.0, "output": "red"},
        {"prompt": BLUE, "output": "deep/blue", "size": SIZE},
        {"prompt": RED, "seed": 4, "output": "again"},
        {"prompt": WHITE, "seed": 3, "output": "white"},
    )
    assert generate("--prompts", prompts, "--output", tmp_path / "out", "--seconds", "0.5", "--seed", "9") == 0
    assert len(loads) == 1, "one engine"
    for name, prompt, seed, seconds in (
        ("red", RED, 3, 1.0), ("deep/blue", BLUE, 9, 0.5), ("again", RED, 4, 0.5), ("white", WHITE, 3, 0.5)
    ):  # fmt: skip
        alone = tmp_path / "alone" / name.replace("/", "-")
        alone.parent.mkdir(exist_ok=True)
        assert generate("--prompt", prompt, "--seed", seed, "--seconds", seconds, "--output", alone) == 0
        got = pictures(tmp_path / "out" / name)
        assert len(got) == seconds * MODEL.spec.native_fps and got.std() > 1
        assert np.array_equal(got, pictures(alone)), name


def test_a_text_file_has_a_prompt_a_line_and_videos_have_its_numbers(tmp_path: Path, loads: list[ModelConfig]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"\ufeff{RED}\n\n  {BLUE}  \n")
    prompt_lines = [line.prompt for _, line in read_lines(prompts)]
    assert prompt_lines == [RED, BLUE], "as Windows' editors write it, with a byte order mark"
    assert generate("--prompts", prompts, "--output", tmp_path / "out", "--seconds", "0.1") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00001.mp4", "00003.mp4"]


def test_lines_that_fail_are_named_at_the_end_and_the_others_are_made(
    tmp_path: Path, loads: list[ModelConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_jsonl(
        tmp_path / "prompts.jsonl",
        {"prompt": " "},
        {"prompt": RED, "seed": -1},
        {"prompt": RED, "size": "1280x720"},
        {"prompt": RED},
    )
    assert generate("--prompts", prompts, "--output", tmp_path / "out", "--seconds", "0.1") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["00004.mp4"]
    said = capsys.readouterr()
    assert "1 of 4 videos made" in said.out
    failed = [line for line in said.err.splitlines() if "failed" in line]
    for number, why in enumerate(("the prompt is empty", "the seed is -1", f"this engine makes {SIZE}"), start=1):
        assert f"prompts.jsonl:{number}: " in failed[number - 1] and why in failed[number - 1]


def test_resume_makes_what_is_not_there(
    tmp_path: Path, loads: list[ModelConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends in the middle of its second video; the next makes the second and third."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text(f"{RED}\n{BLUE}\n{WHITE}\n")
    every = files._checked

    def interrupted(frames: Iterator[files.Frame]) -> Iterator[files.Frame]:
        for number, frame in enumerate(every(frames)):
            if number == 2 and (out / "00001.mp4").exists():
                raise KeyboardInterrupt
            yield frame

    monkeypatch.setattr(files, "_checked", interrupted)
    assert generate("--prompts", prompts, "--output", out, "--seconds", "0.2") == 130
    assert [path.name for path in out.iterdir()] == ["00001.mp4"]
    monkeypatch.setattr(files, "_checked", every)
    first = (out / "00001.mp4").stat().st_mtime_ns
    assert generate("--prompts", prompts, "--output", out, "--seconds", "0.2", "--resume") == 0
    assert "2 videos to make" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["00001.mp4", "00002.mp4", "00003.mp4"]
    assert (out / "00001.mp4").stat().st_mtime_ns == first
    assert generate("--prompts", prompts, "--output", out, "--resume") == 0
    assert len(loads) == 2, "with nothing to make no model is loaded"


@pytest.mark.parametrize(
    "output",
    [
        "../victim/keep.mp4", "a/../../victim/keep.mp4", "../victim", "../victim/frames/", "new.mp4/../../new.mp4",
        "{tmp}/victim/keep.mp4", "{tmp}/new", ".", "a/..", "../out", "~/a.mp4", "~", "a\0.mp4", "a\n.mp4", "\ud800.mp4",
        300 * "a", "new/" + 300 * "a" + ".mp4", "folder_link/keep.mp4", "folder_link/new.mp4", "file_link.mp4",
        "nowhere.mp4", "nowhere", "folder_link", "loop/a.mp4", "text_link.mp4", "made.mp4/a.mp4", "x.avi",
    ],
)  # fmt: skip
def test_an_output_is_below_the_folder_or_no_video_is_made(
    tmp_path: Path, loads: list[ModelConfig], capsys: pytest.CaptureFixture[str], output: str
) -> None:
    """Names, and links, also to what is not there."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    for path in (victim / "keep.mp4", victim / "frames" / "00000.png", out / "made.mp4"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for link, to in (("folder_link", "victim"), ("file_link.mp4", "victim/keep.mp4"), ("nowhere.mp4", "new.mp4"),
                     ("nowhere", "new"), ("loop", "out/loop"), ("text_link.mp4", "out/notes.txt")):  # fmt: skip
        (out / link).symlink_to(tmp_path / to)
    prompts = write_jsonl(
        tmp_path / "p.jsonl",
        {"prompt": RED, "output": "first.mp4"},
        {"prompt": RED, "output": output.replace("{tmp}", str(tmp_path))},
    )
    before = tree(tmp_path)
    for more in ((), ("--overwrite",), ("--resume",)):
        assert generate("--prompts", prompts, "--output", out, "--seconds", "0.1", *more) == 2
        said = capsys.readouterr().err
        assert f"{prompts}:2: " in said
        assert not loads and tree(tmp_path) == before


@pytest.mark.slow
def test_what_appears_in_an_outputs_place_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to elsewhere, a folder's place taken by one, and another run's video."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.mkdir()

    def load(config: ModelConfig) -> StreamingPipeline:
        (out / "a.mp4").symlink_to(victim / "new.mp4")
        (out / "b").rmdir()
        (out / "b").symlink_to(victim)
        (out / "c.mp4").write_text("mine")
        return StreamingPipeline(MODEL, CPU)

    monkeypatch.setattr(api, "load_model", load)
    names = ("a.mp4", "b/new.mp4", "c.mp4", "d.mp4")
    prompts = write_jsonl(tmp_path / "p.jsonl", *({"prompt": RED, "output": name} for name in names))
    assert generate("--prompts", prompts, "--output", out, "--seconds", "0.1") == 1
    assert not list(victim.iterdir()) and (out / "c.mp4").read_text() == "mine" and (out / "d.mp4").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["made.mp4", "made", "link.mp4"])
def test_a_video_that_exists_is_replaced_only_with_overwrite(
    tmp_path: Path, loads: list[ModelConfig], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out, prompts = tmp_path / "out", write_jsonl(tmp_path / "p.jsonl", {"prompt": RED}, {"prompt": RED, "output": name})
    (out / "made").mkdir(parents=True)
    (out / "link.mp4").symlink_to("made.mp4")
    for old in ("made.mp4", "made/00000.png", "made/00999.png"):
        (out / old).write_text("mine")
    options = ("--prompts", prompts, "--output", out, "--seconds", "0.1")
    before = tree(out)
    assert generate(*options) == 2 and f"{prompts}:2: output" in capsys.readouterr().err and tree(out) == before
    assert generate(*options, "--resume") == 0
    assert (after := tree(out)).pop("00001.mp4") and after == before
    assert generate(*options, "--overwrite") == 0
    after = tree(out)
    changed = {each for each in before if after.get(each) != before[each]}
    assert changed == ({"made/00000.png", "made/00999.png"} if name == "made" else {"made.mp4"})
    assert ("made/00999.png" in after) == (name != "made") and (out / "link.mp4").is_symlink()
    single = out / name
    assert generate("--prompt", BLUE, "--seconds", "0.1", "--output", single) == 2
    assert tree(out) == after
    assert generate("--prompt", BLUE, "--seconds", "0.1", "--output", single, "--overwrite") == 0
    assert tree(out) != after


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", "b/../a"), ("a.mp4", "A.mp4"), ("a", "a/b.mp4"), ("a.webm/b", "a.webm"), ("deep/A/b.mp4", "deep/a"),
        ("\u00e9.mp4", "e\u0301.mp4"), ("link/a.mp4", "real/a.mp4"), ("a", "./a/"),
    ],
)  # fmt: skip
def test_no_output_is_in_the_way_of_another(
    tmp_path: Path, loads: list[ModelConfig], capsys: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    out = tmp_path / "out"
    (out / "real").mkdir(parents=True)
    (out / "link").symlink_to("real")
    prompts = write_jsonl(tmp_path / "p.jsonl", *({"prompt": RED, "output": each} for each in (first, second)))
    assert generate("--prompts", prompts, "--output", out) == 2
    assert f"{prompts}:2: output" in capsys.readouterr().err
    assert not loads and tree(out) == {}


def tree(folder: Path) -> dict[str, str]:
    """The files below `folder`, and what they hold."""
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
