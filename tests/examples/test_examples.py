"""Every example runs as its first lines say, and every file in examples/ is covered here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COVERED = {
    "hello.py",
    "generate_file.py",
    "prompt_switch.py",
    "start_picture.py",
    "restyle.py",
    "animated_picture.py",
    "custom_viewer.py",
    "custom_viewer.html",
}
COVERED |= {"torchrun_stream.py"}  # in test_torchrun_stream.py; hello.py is README's code, see test_documents.py


def run(name: str, *arguments: str, cwd: Path) -> str:
    """What it prints, run as `sys.executable` runs it."""
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_every_example_is_covered() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files == COVERED


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_generate_file(tmp_path: Path) -> None:
    assert "wrote a.mp4" in run("generate_file.py", "a purple circle", "a.mp4", cwd=tmp_path)
    with av.open(str(tmp_path / "a.mp4")) as video:
        frames = sum(1 for _ in video.decode(video=0))
        rate = video.streams.video[0].average_rate
    assert rate is not None
    assert frames == round(2 * rate)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_prompt_switch(tmp_path: Path) -> None:
    lines = run("prompt_switch.py", cwd=tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines if "prompt is now" in line] == ["frame 36", "frame 72"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_start_picture(tmp_path: Path) -> None:
    """The star is white and the sky dark from the first frame on, as in the frame that it begins with."""
    assert "begins with the last frame of another stream" in run("start_picture.py", cwd=tmp_path)
    with av.open(tmp_path / "moving.mp4") as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(pictures) == 72
    assert all(picture.mean() < 90 for picture in pictures)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_animated_picture(tmp_path: Path) -> None:
    assert "wrote a.webp: " in run("animated_picture.py", "a.webp", "1.2", cwd=tmp_path)
    with Image.open(tmp_path / "a.webp") as picture:
        assert picture.format == "WEBP" and getattr(picture, "n_frames", 0) == 16
    assert (tmp_path / "a.webp").stat().st_size <= 2_000_000


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_restyle(tmp_path: Path) -> None:
    """The meadow's circle on the left, a star at night on the right; both begin in the middle and move alike."""
    assert "a red circle, and beside it the blue star of the prompt" in run("restyle.py", cwd=tmp_path)
    with av.open(tmp_path / "restyled.mp4") as container:
        pictures = [frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(video=0)]
    assert len(pictures) == 96
    near = 0
    for picture in pictures:
        before, after = np.split(picture, 2, axis=1)
        red = (before[..., 0] - before[..., 1:].max(-1) > 60).any(0)
        blue = (after[..., 2] - after[..., :2].max(-1) > 90).any(0)
        near += blue.any() and red.any() and _apart(_middle(red), _middle(blue)) < 12
    assert near > 86, "the star is where the circle is"


def _middle(columns: np.ndarray) -> float:
    """The middle of marked columns, which may go on at the other edge."""
    turns = np.exp(2j * np.pi * np.flatnonzero(columns) / len(columns)).mean()
    return float(np.angle(turns) / (2 * np.pi) * len(columns))


def _apart(one: float, other: float, width: int = 256) -> float:
    return min((one - other) % width, (other - one) % width)


class _Whep(BaseHTTPRequestHandler):
    """The least that answers like streamdiff's /whep."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = 201 if body == b"an offer" else 400
        self.send_response(status)
        self.send_header("Content-Type", str(self.headers["Content-Type"]))
        self.send_header("Location", "/whep/7")
        self.send_header("Retry-After", f"{self.headers['Host']} {self.headers['Origin']}")
        self.end_headers()
        self.wfile.write(b"an answer")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.mark.slow
def test_custom_viewer_hands_out_its_page_and_passes_offers_on() -> None:
    spec = importlib.util.spec_from_file_location("custom_viewer", EXAMPLES / "custom_viewer.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    with ThreadingHTTPServer(("127.0.0.1", 0), _Whep) as behind:
        front = example.make_server(0, f"http://127.0.0.1:{behind.server_port}")
        for server in (behind, front):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        with front, httpx.Client(base_url=f"http://127.0.0.1:{front.server_port}") as client:
            assert 'fetch("whep"' in client.get("/").text
            sdp = {"Content-Type": "application/sdp"}
            answer = client.post("/whep", content=b"an offer", headers=sdp)
            assert (answer.status_code, answer.text) == (201, "an answer")
            assert answer.headers["Location"] == "/whep/7"
            page = {"Host": "evil.example", "Origin": "http://evil.example"}
            answer = client.post("/whep", content=b"an offer", headers=sdp | page)
            assert answer.headers["Retry-After"] == "evil.example http://evil.example", "streamdiff sees who asks"
            assert client.post("/whep", content=b"nonsense", headers=sdp).status_code == 400
            assert client.post("/metrics", content=b"", headers=sdp).status_code == 404
            behind.shutdown()
            behind.server_close()
            assert client.post("/whep", content=b"an offer", headers=sdp).status_code == 502
            front.shutdown()
