"""The command line as a user meets it: real processes where a process is the point, `main` elsewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import av
import pytest
import yaml

from streamdiff.cli import main, parser
from streamdiff.commands import generate, reference
from streamdiff.commands.jobs import ReferenceJob
from streamdiff.config import Config
from streamdiff.errors import ConfigError
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.version import __version__

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(("text", "change"), [("4:a blue star", (4.0, "a blue star")), ("0.5: b:c ", (0.5, "b:c"))])
def test_a_change_of_prompt_is_read(text: str, change: tuple[float, str]) -> None:
    assert generate.parse_change(text) == change


@pytest.mark.parametrize("text", ["", ":", "4", "4:", "4: ", "x:a", "-1:a", "nan:a", "inf:a"])
def test_a_change_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        generate.parse_change(text)
    assert error.value.field == "prompt_at"


@pytest.mark.parametrize("command", ["serve", "generate", "plan"])
def test_the_help_shows_what_people_use_and_help_all_the_rest(capsys: pytest.CaptureFixture[str], command: str) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            main.main([command, flag])
        assert caught.value.code == 0
        shown.append(set(re.findall(r"^ +(?:-h, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)))
    few, every = shown
    assert few < every and {"--model", "--config", "--help-all"} <= few and "--window" in every - few


@pytest.mark.slow
def test_every_example_in_the_help_parses() -> None:
    pages = parser.texts()
    texts = [pages["streamdiff"], *(page["text"] for page in pages.values() if isinstance(page, dict))]
    for text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("  streamdiff ") and "COMMAND" not in line:
                words = shlex.split(line[2:].split("   ")[0])
                assert parser.parse(words[1:]).command in parser.parsers()


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys; from streamdiff.cli import main as cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'av', 'fastapi'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [f"streamdiff {__version__}", "[]"]


@pytest.mark.slow
def test_plan_answers_without_torch(tmp_path: Path) -> None:
    """The whole command in a fresh interpreter: JSON on stdout, a trace in its file, and nothing heavy imported."""
    path = tmp_path / "trace.json"
    words = ["plan", "--stages", "2", "--kv-context", "same_step", "--chunks", "8", "--json", "--trace", str(path)]
    script = (
        "import sys; from streamdiff.cli import main as cli\n"
        f"status = cli.main({words!r})\n"
        "print(status, sorted({'torch', 'diffusers', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stderr.strip() == "0 []"
    tree = json.loads(process.stdout)
    assert (tree["model"], tree["workload"]["stages"], tree["workload"]["kv_context"]) == ("tiny", 2, "same_step")
    assert len(tree["ranks"]) == 2
    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.slow
def test_doctor_tries_the_attention_kernels_and_says_what_can_be_quantised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["doctor", "--port", "0", "--device", "cpu", "--attention", "sage", "--quantize", "fp8"]
    find = importlib.util.find_spec
    absent = ("sageattention", "flash_attn_interface")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in absent else find(name, *more))
    assert main.main(asked) == main.FAILED
    text = capsys.readouterr().out
    assert re.search(r"ok +attention +auto, sdpa, flash:.*right here \(cpu, float32\)", text)
    assert re.search(r"FAIL +attention +sage is not installed \(no module sageattention; pip install", text)
    assert re.search(r"note +attention +not installed: .*fa3", text)
    assert re.search(r"FAIL +quantize +fp8 takes an NVIDIA GPU of compute capability 8\.9", text)
    assert "Missing: attention, quantize." in text


@pytest.mark.slow
def test_doctor_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main.main(["doctor", "--port", port, "--model", "/nowhere"]) == main.FAILED
    text = capsys.readouterr().out
    assert re.search(rf"FAIL +port +127\.0\.0\.1:{port} cannot be listened on", text)
    assert "no weights (.safetensors, .safetensors.index.json, .pt, .pth, .bin, .gguf) at /nowhere" in text
    assert "Missing: model, port." in text


@pytest.mark.parametrize("option", ["--prompt", "--prompt-at=0:"])
def test_bytes_that_are_no_utf_8_are_told_as_such(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    said = ["--prompt", "a star \udcff"] if option == "--prompt" else [option + "a star \udcff"]
    assert main.main(["generate", "--output", str(tmp_path / "x.mp4"), *said]) == 2
    assert "UTF-8" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_full_standard_output_is_told_as_such() -> None:
    command = [sys.executable, "-m", "streamdiff", "models"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 1
    assert "standard output" in process.stderr and process.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_port_in_use_is_told_in_one_line(streamdiff_command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = streamdiff_command("serve", "--no-browser", "--port", port)
    assert process.returncode == 2
    assert f"port {port} is in use" in process.stderr
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_generate_makes_the_video_that_was_asked_for(streamdiff_command: Command, tmp_path: Path) -> None:
    """Length, rate, and the change of prompt: the picture's mean colour goes from red to blue."""
    process = streamdiff_command(
        *("generate", "--output", "out.mp4", "--seconds", "2", "--fps", "18", "--seed", "3"),
        *("--prompt", "a red circle at night", "--prompt-at", "0.5:a blue circle in the desert"),
    )
    assert process.returncode == 0, process.stderr
    assert "out.mp4: 36 frames, 2 s at 18 per second" in process.stdout
    assert "36/36" in process.stderr, "a progress bar"
    with av.open(str(tmp_path / "out.mp4")) as video:
        means = [frame.to_ndarray(format="rgb24").mean(axis=(0, 1)) for frame in video.decode(video=0)]
    assert len(means) == 36
    assert means[-1].sum() > 1.5 * means[0].sum(), "the desert is brighter than night"
    assert [path.name for path in tmp_path.iterdir()] == ["out.mp4"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_generate_over_several_ranks_makes_the_same_frames(
    streamdiff_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts a process per rank, here of two stages and one that decodes; the picture changes on the way."""
    (tmp_path / "ring.yaml").write_text("model: {decode_rank: dedicated}")
    monkeypatch.chdir(tmp_path)
    words = ["generate", "--seconds", "0.5", "--seed", "3", "--device", "cpu"]
    words += ["--prompt", "a red circle at night", "--prompt-at", "0.2:a blue circle in the desert"]
    assert main.main([*words, "--output", "one"]) == 0
    process = streamdiff_command(*words, "--output", "three", "--stages", "2", "--config", "ring.yaml")
    assert process.returncode == 0, process.stderr
    assert "three: 20 frames, 0.5 s at 40 per second" in process.stdout
    one, three = (sorted((tmp_path / folder).iterdir()) for folder in ("one", "three"))
    assert [path.name for path in one] == [path.name for path in three] and len(one) == 20
    assert all(mine.read_bytes() == theirs.read_bytes() for mine, theirs in zip(one, three, strict=True))
    assert one[0].read_bytes() != one[-1].read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_is_wrong_with_a_ring_is_told_once(streamdiff_command: Command, tmp_path: Path) -> None:
    """Though every rank finds it."""
    process = streamdiff_command("generate", "--output", "out.mp4", "--stages", "2", "--steps", "3", "--device", "cpu")
    assert process.returncode == 2
    assert process.stderr.count("streamdiff: error: --steps is 3; model tiny has 4 or 2") == 1
    assert process.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "stages"),
    [(signal.SIGINT, 130, "2"), pytest.param(signal.SIGTERM, 143, "1", marks=pytest.mark.soak)],
)
def test_an_interrupted_video_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int, stages: str) -> None:
    """By an interpreter for each of its processes: other tests fork their launchers and ranks."""
    root = Path(main.__file__).parents[2]
    command = [sys.executable, "-m", "streamdiff", "generate", "--output", str(tmp_path / "o.mp4"), "--seconds", "999"]
    command += ["--stages", stages]
    # A shell's background job ignores SIGINT, and so would what these tests start when they run in one.
    defaults = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True, preexec_fn=defaults) as process:
        assert process.stderr is not None
        seen = ""
        while not re.search(r" [1-9]\d*/", seen):  # the bar has begun to move
            part = process.stderr.read(1)
            assert part, f"ended before the first frame: {seen}"
            seen += part
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == status
    assert "Traceback" not in rest and "elastic" not in rest
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "fps"),
    [
        ("serve", 40.0),
        ("serve --model self-forcing", 16.0),
        ("serve --model self-forcing --fps 24", 24.0),
        (f"serve --model {EMBEDDED_WEIGHTS}", 40.0),
    ],
)
def test_a_model_is_served_at_its_own_rate(words: str, fps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("streamdiff.server.main.run", lambda config: seen.append(config) or 0)
    assert main.main(words.split()) == 0
    assert seen[0].playback.fps == fps


@pytest.mark.parametrize(
    ("line", "preset", "vae"),
    [
        ("", "default", None),
        ("--plain", "plain", None),
        ("--fast", "fast", "taew2_1"),
    ],
)
def test_presets_are_switches(line: str, preset: str, vae: str | None) -> None:
    """The small autoencoder is known before anything is fetched, and what is named by itself stays."""
    model = main._config(parser.parse(["serve", "--model", "self-forcing", *line.split()])).model
    assert (model.preset, model.vae) == (preset, vae)
    named = main._config(parser.parse(["serve", "--model", "self-forcing", "--vae", "wan2.1", *line.split()])).model
    assert named.vae == "wan2.1"


BY_CHUNKS = "generate --chunks 2 --latents-out x.safetensors --no-decode"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[ReferenceJob]:
    """The runs by chunks that would have begun."""
    begun: list[ReferenceJob] = []

    def run(job: ReferenceJob) -> int:
        begun.append(job)
        return 0

    monkeypatch.setattr(reference, "run", run)
    return begun


@pytest.mark.parametrize(
    ("line", "settings", "words"),
    [
        (BY_CHUNKS, "session: {image: p.png}", "session.image does not go with the options that say everything by"),
        (BY_CHUNKS, "model: {trace: costs}", "model.trace does not go with the options that say everything by chunks"),
        (BY_CHUNKS, "session: {input: v.mp4}", "session.input is 'v.mp4', but is for `serve`"),
        ("generate --output x.mp4", "session: {snapshot: s.sds}", "session.snapshot is 's.sds', but is for `serve`"),
        ("generate --prompts p.txt --output x", "session: {input: v.mp4}", "session.input is 'v.mp4', but is for"),
    ],
)
def test_settings_of_a_file_that_would_be_ignored_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[ReferenceJob],
    line: str, settings: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("streamdiff.api.load_model", lambda model: pytest.fail("loaded"))
    Path("c.yaml").write_text(settings)
    Path("p.txt").write_text("x")
    assert main.main([*line.split(" "), "--config", "c.yaml"]) == 2
    assert words in capsys.readouterr().err
    assert not jobs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "p.txt"]


def test_a_file_that_lists_the_defaults_may_be_used_by_chunks(tmp_path: Path, jobs: list[ReferenceJob]) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(Config().model_dump()))
    assert main.main([*BY_CHUNKS.split(" "), "--config", str(tmp_path / "c.yaml")]) == 0
    assert [job.chunks for job in jobs] == [2]
