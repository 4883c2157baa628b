"""`streamdiff models` as a user meets it: the list, one model, JSON, what is on disk, a name that is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamdiff.cli import main
from streamdiff.models import catalogue
from tests.hub_cache import lay

ROOT = Path(__file__).resolve().parents[2]
BASES = {"wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-ti2v-5b"}
# A whole command in a fresh interpreter that cannot reach a network; says afterwards what was imported on its way.
ALONE = """
import socket, sys
def refuse(*given): raise AssertionError("the network was asked")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from streamdiff.cli import main as cli
status = cli.main(sys.argv[1:])
print(status, sorted({"torch", "diffusers", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


def alone(home: Path, *arguments: str) -> str:
    """What the command prints where `HF_HOME` is `home`; it succeeds, without torch and without a network."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    environment |= {"HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALONE, "models", *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stderr == "0 []\n"
    return process.stdout


def rows(text: str) -> dict[str, dict[str, str]]:
    """The list's cells by model."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.split("\n\n")[0].splitlines()]
    assert lines[0][:3] == ["name", "base", "steps"]
    assert {len(line) for line in lines} == {len(lines[0])}
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}


@pytest.mark.slow
def test_the_list_has_every_model_that_streams_and_what_is_on_disk(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").touch()
    lay(tmp_path / "hub", "krea/krea-realtime-video", {"krea-realtime-video-14b.safetensors": empty})
    lay(tmp_path / "hub", "Efficient-Large-Model/LongLive-1.3B", {"models/longlive_base.pt": empty})
    found = rows(alone(tmp_path))
    assert set(found) == set(catalogue.entries()) - BASES
    states = {name: row["on disk"] for name, row in found.items()}
    assert states.pop("tiny") == "yes, embedded"
    assert states.pop("krea-realtime-14b") == "yes"
    assert states.pop("longlive-1.3b") == "1 of 2 files"
    assert set(states.values()) == {"no"}


@pytest.mark.slow
def test_json_has_the_same_for_programs(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").touch()
    lay(tmp_path / "hub", "gdhe17/Self-Forcing", {"checkpoints/self_forcing_dmd.pt": empty})
    tree = json.loads(alone(tmp_path, "self-forcing", "--json"))
    [path] = tmp_path.rglob("self_forcing_dmd.pt")
    assert tree["on_disk"]["weights"] == {"checkpoints/self_forcing_dmd.pt": str(path)}
    assert tree["on_disk"]["autoencoder"] == {"Wan2.1_VAE.pth": None}
    assert tree["schedule"]["timesteps"] == pytest.approx([1000, 937.5, 833.3333, 625], abs=1e-4)
    assert tree["weights"]["container"] == "generator_ema"
    sizes = tree["memory"]["bytes_per_stage"]
    assert [len(sizes[stages]) for stages in ("1", "2", "4")] == [1, 2, 4]
    whole = sizes["1"][0]
    assert whole["weights"] == pytest.approx(2 * (1.419e9 + 73e6), rel=1e-3)
    assert whole["caches"] == pytest.approx(21 * 0.288e9, rel=0.02)
    assert whole["decoder_state"] == pytest.approx(3.777e9 / 2, rel=1e-3)
    (small,) = tree["memory"]["bytes_per_stage_quantized"]["1"]
    assert whole["weights"] / 2 < small["weights"] < whole["weights"] * 0.54, "the blocks, not what stands around them"
    assert {**small, "weights": 0, "total": 0} == {**whole, "weights": 0, "total": 0}
    assert "an estimate" in tree["memory"]["note"]


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.entries())
def test_every_model_can_be_shown(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """What is not known is said to be unknown, never None."""
    assert main.main(["models", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: ")
    assert "None" not in text
    entry = catalogue.find(name)
    assert all(source in text for source in entry.sources)
    assert ("licence unknown" in text.split("how it runs")[0]) == (entry.weights is not None)  # the tiny decoder's
    if entry.weights and entry.weights.container is None:
        assert "container     unknown" in text
