"""The wheel works by itself: weights and page inside, the command runs away from the repository.

The quick variant takes the dependencies from the environment that runs the tests (a .pth file points there), so that
nothing is downloaded; the package itself comes from the wheel alone. `test_from_nothing`, of `make soak`, installs
everything anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import av
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("streamdiff", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither a stale build/ of the repository leaks in nor a new one is left there."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in SOURCES), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True)
    (path,) = target.glob("*.whl")
    return path


class Installed:
    """An environment with the wheel in it."""

    def __init__(self, folder: Path, wheel: Path, *, borrow: bool) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.command = folder / "bin" / "streamdiff"
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", *(["--no-deps"] if borrow else []), str(wheel)], check=True)
        if borrow:
            (site,) = folder.glob("lib/python*/site-packages")
            # Read after the environment's own packages: what the wheel brought comes first.
            (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(self, *arguments: str, cwd: Path) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.run(
            [str(self.command), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("venv"), wheel, borrow=True)


def make_a_video(installed: Installed, folder: Path) -> int:
    """Frames of a video made by the installed command in `folder`."""
    installed.run("generate", "--seconds", "0.5", "--fps", "40", "--output", "x.mp4", cwd=folder)
    with av.open(str(folder / "x.mp4")) as video:
        return sum(1 for _ in video.decode(video=0))


def test_weights_and_page_are_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    weights = {name: size for name, size in sizes.items() if name.startswith("streamdiff/models/tiny/weights/")}
    source = ROOT / "streamdiff" / "models" / "tiny" / "weights"
    expected = {str(path.relative_to(ROOT)): path.stat().st_size for path in source.rglob("*") if path.is_file()}
    assert weights == expected
    assert any(name.endswith(".safetensors") for name in weights)
    assert sum(weights.values()) <= 12e6
    catalogue = {name for name in sizes if name.startswith("streamdiff/models/published/")}
    entries = ROOT / "streamdiff" / "models" / "published"
    assert catalogue == {str(path.relative_to(ROOT)) for path in entries.glob("*.yaml")} and len(catalogue) > 15
    for page in ("index.html", "app.js", "style.css"):
        assert sizes[f"streamdiff/server/static/{page}"] > 0
    assert "streamdiff/py.typed" in sizes
    assert not [name for name in sizes if name.startswith(("tests", "benchmarks", "training")) or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") for name in sizes)


def test_the_command_runs_away_from_the_repository(installed: Installed, tmp_path: Path) -> None:
    from streamdiff.version import __version__

    assert installed.run("--version", cwd=tmp_path) == f"streamdiff {__version__}\n"
    assert "longlive-1.3b" in installed.run("models", cwd=tmp_path)
    assert make_a_video(installed, tmp_path) == 20


@pytest.mark.soak
def test_doctor_finds_the_installed_package_ready(installed: Installed, tmp_path: Path) -> None:
    """`tests/cli/test_main.py` has what it says; that torch and the model are there, a video shows too."""
    assert "Ready: streamdiff serve" in installed.run("doctor", "--port", "0", cwd=tmp_path)


@pytest.mark.soak
def test_from_nothing(wheel: Path, tmp_path: Path) -> None:
    """As `pip install streamdiff` does it: every dependency by the wheel's own word."""
    installed = Installed(tmp_path / "venv", wheel, borrow=False)
    (tmp_path / "elsewhere").mkdir()
    assert make_a_video(installed, tmp_path / "elsewhere") == 20
