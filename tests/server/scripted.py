"""A pipeline that paints instead of computing, behind the real engine process: what the serve tests and the browser
test run against. `python -m tests.server.scripted serve ...` is `streamdiff serve` with this pipeline.

The background is the prompt's last known colour word. A white bar, one frame wide per frame, marks time, and a square
in the upper right corner what the last prompt did to the past, unless it kept it. With fewer steps than usual a chunk
takes less time, and the upper left corner is white; while a control is held the middle is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from streamdiff.config import Config, ModelConfig, ServeConfig
from streamdiff.core import Control, Frames, ModelInfo
from streamdiff.engine.messages import Data
from streamdiff.engine.process import ipc
from streamdiff.engine.process import main as engine_main
from streamdiff.errors import RequestError
from streamdiff.models import catalogue
from streamdiff.models.spec import ParsedPrompt
from streamdiff.pipeline.scheduler.row_limit import ForwardCounts
from streamdiff.snapshot_header import FORMAT, KIND, OpenedWith, read_header
from tests.fake_pipeline import FakePipeline, FakeStream

COLOURS = {
    "red": (214, 48, 49),
    "green": (39, 160, 80),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 60),
    "purple": (140, 60, 190),
    "orange": (235, 130, 40),
}
RENAMED = {"restarts": "max_restarts", "load": "max_utilization", "server_name": "name", "output": "outputs"}
"""Options of `main` that are settings of `serve` by another name."""
BLACK = (0, 0, 0)
"""What a stream of this colour ends by: there is no such paint."""
MARKS = {"recache": (255, 255, 255), "flush": (0, 0, 0), "reset": (240, 60, 240)}
SIZE = 128
CHUNK_FRAMES = 8


TEXT_SHAPE, CHUNK_SHAPE = (4, 3), (3, 2, 2, 2)
"""Of features: rows of a colour's red, green and blue, of which the first counts, and latents of whose channels the
first number does."""
INFO = ModelInfo(
    "scripted", "cpu", SIZE, SIZE, 40.0, CHUNK_FRAMES, 4, "clean", (4, 2),
    text_shape=TEXT_SHAPE, chunk_shape=CHUNK_SHAPE, has_camera=True,
)  # fmt: skip

CONTROLS = (Control("move_x", keys=("ArrowLeft", "ArrowRight", "MouseX")), Control("jump", "button", ("Space",)))
"""Of the painters `steered` and `world`, which begins with a picture."""


@dataclass
class Text:
    examples: tuple[str, ...] = ("a red circle moving right", "a blue star on grass", "a yellow square moving up")
    suggestions: tuple[tuple[str, ...], ...] = (tuple(COLOURS), ("a yellow circle", "a green square"))
    vocabulary: str = "colours: " + ", ".join(COLOURS)
    slow: bool = False

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        known = [word for word in prompt.lower().replace(",", " ").split() if word in (*COLOURS, "black")]
        if known:
            return ParsedPrompt(prompt)
        text = previous or "a red circle"
        return ParsedPrompt(text, f"None of these words is known here, so the picture stays. Try {', '.join(COLOURS)}.")

    def encode(self, text: str) -> Any:
        known = [word for word in text.lower().replace(",", " ").split() if word in COLOURS]
        return COLOURS[known[-1]] if known else BLACK if "black" in text else COLOURS["red"]


@dataclass(frozen=True)
class Painting:
    """A painted stream at rest; its file is that of a snapshot, without tensors."""

    session: OpenedWith
    trees: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: {"name": INFO.model, "size": SIZE})

    @property
    def tensors(self) -> dict[str, None]:
        """A painter begins with a prompt alone."""
        return {}

    def with_loose(self, **tensors: None) -> Painting:
        return self

    def to_bytes(self) -> bytes:
        parts = {"model": self.model, "session": asdict(self.session), "trees": self.trees, "about": self.about}
        metadata = {"kind": KIND, "format": str(FORMAT), "header": json.dumps(parts)}
        header = json.dumps({"__metadata__": metadata}).encode()
        return len(header).to_bytes(8, "little") + header


class Painter(FakePipeline):
    """Makes a chunk of every stream that has room, `chunk_s` seconds apart."""

    def __init__(
        self,
        chunk_s: float = 0.05,
        die_after_chunks: int | None = None,
        fits: int | None = None,
        shares: tuple[float, ...] = (),
        info: ModelInfo = INFO,
        text: Text | None = None,
    ) -> None:
        super().__init__()
        self.chunk_s, self.die_after_chunks, self.fits, self.shares = chunk_s, die_after_chunks, fits, shares
        self.info, self.text = info, text or Text()
        self.switches: list[str] = []
        self._saved: list[tuple[int, Any]] = []
        self._tickets = count()
        self._made = 0

    def open(self, session: int, conditioning: Any, **given: Any) -> None:
        if self.fits is not None and len(self.streams) >= self.fits:
            raise RequestError("session", f"only {self.fits} paintings fit", "memory")
        super().open(session, conditioning, **given)

    def set_conditioning(self, session: int, conditioning: Any, *, epoch: int, **how: Any) -> None:
        super().set_conditioning(session, conditioning, epoch=epoch, **how)
        self.switches.append(how["switch"])

    def features_of(self, rows: Any, latents: Any, video: Any, strength: float, motion: Any) -> tuple[Any, Any, Any]:
        colour = None if rows is None else tuple(int(each) for each in rows[0])
        shape = 1, SIZE, SIZE, 3
        start = None if latents is None else np.broadcast_to(latents[0, :, 0, 0, 0].astype(np.uint8), shape)
        chunks = None if video is None else [tuple(int(each) for each in chunk[:, 0, 0, 0]) for chunk in video]
        return colour, start, chunks

    def comes_to_rest(self, session: int) -> bool:
        return True

    def save(self, session: int, finish: Callable[[Painting], Any]) -> int:
        stream = self.streams[session]
        opened = OpenedWith(stream.seed, stream.steps, stream.epoch, stream.kv_context)  # type: ignore[arg-type]
        painting = Painting(opened, {"chunk": stream.chunk, "colour": stream.paint, "paused": stream.paused})
        self._saved = [(next(self._tickets), finish(painting))]
        return self._saved[0][0]

    def take_done(self) -> list[tuple[int, Any]]:
        saved, self._saved = self._saved, []
        return saved

    def read_snapshot(self, data: Data) -> Painting:
        header, _ = read_header(data)
        return Painting(header.session, header.trees, header.about, header.model)

    def load(self, session: int, snapshot: Painting) -> list[Frames]:
        if snapshot.model != Painting(snapshot.session, {}).model or "REFUSES" in os.environ:
            raise RequestError("snapshot", "the painter does not know this hand")
        opened, trees = snapshot.session, snapshot.trees
        self.open(
            session, tuple(trees["colour"]), seed=opened.seed, epoch=opened.epoch, steps=opened.steps,
            kv_context=opened.kv_context,
        )  # fmt: skip
        self.streams[session].chunk, self.streams[session].paused = trees["chunk"], trees["paused"]
        return []

    def progress(self, session: int) -> tuple[int, int, int, bool]:
        stream = self.streams[session]
        return stream.chunk - 1, stream.epoch, stream.epoch, stream.paused

    def _ready(self) -> deque[int]:
        return deque(
            slot
            for slot, each in self.streams.items()
            if not each.paused and not each.waits and each.credit >= self.info.chunk_frames
        )

    def collect(self, wait_s: float) -> list[Frames]:
        made = []
        for slot in self._ready():
            stream = self.streams[slot]
            if stream.paint == BLACK:
                self.on_fault(slot, f"chunk {stream.chunk}: the painter has no black")
                continue
            chunk_s = self.chunk_s * (stream.steps + 1) / (self.info.steps + 1)
            time.sleep(chunk_s)
            pictures = np.stack([self._paint(stream, number) for number in range(self.info.chunk_frames)])
            made.append(Frames(slot, stream.chunk, stream.epoch, pictures, True, chunk_s, stream.changes))
            stream.chunk += 1
            self._made += 1
            if self._made == self.die_after_chunks:
                raise RuntimeError("the painter ran out of paint")
        return made

    def _paint(self, stream: FakeStream, number: int) -> NDArray[np.uint8]:
        picture = np.empty((SIZE, SIZE, 3), np.uint8)
        picture[:] = stream.paint if stream.chunk or stream.start is None else stream.start
        if stream.chunk < len(stream.video):
            picture[:] = stream.video[stream.chunk]
        at = (stream.chunk * self.info.chunk_frames + number + stream.seed) * 2 % SIZE
        picture[SIZE - 24 : SIZE - 8, at : at + 8] = 255
        if stream.steps < self.info.steps:
            picture[:24, :24] = 255
        if any(stream.held.values()):
            picture[48:80, 48:80] = 255
        if stream.switch in MARKS:
            picture[:24, -24:] = MARKS[stream.switch]
        return picture

    @property
    def busy(self) -> bool:
        return bool(self._ready())

    def occupancy(self) -> list[float]:
        return list(self.shares)

    def forwards(self) -> ForwardCounts:
        """As if each chunk took a forward alone and two with another session's rows."""
        return ForwardCounts(Counter({1: self._made, 2: 2 * self._made}), Counter({"ring": self._made}))

    def busy_s(self) -> list[float]:
        return [self._made * self.chunk_s]

    def chunk_compute_s(self) -> float | None:
        return self.chunk_s

    def max_sessions(self) -> int | None:
        return self.fits


def load(config: ModelConfig, painter: Painter) -> Any:
    """The painter as the pipeline of an engine that is asked to save, swap or feed nothing."""
    if "GATE" in os.environ:  # a FIFO: the engine starts when somebody writes to it
        Path(os.environ["GATE"]).read_bytes()
    return painter


def paint(painter: Painter) -> int:
    """Be an engine process that paints. Mutates: what a spare imports beforehand, as a painter needs nothing."""
    engine_main._HEAVY = "tests.server.scripted"
    return engine_main.main(load=partial(load, painter=painter))


def main() -> int:
    """`serve`: a whole server. Anything else: the engine process of one."""
    if sys.argv[1] != "serve":
        name = _model_config().name
        dies = int(name.split("-")[1]) if name.startswith("dies-") else None
        steered = replace(INFO, controls=CONTROLS)
        info = {"steered": steered, "world": replace(steered, begins_with_picture=True)}.get(name, INFO)
        return paint(Painter(die_after_chunks=dies, info=info))
    # The web server's half is for its own process, engines start without.
    from streamdiff.engine.process.engine_process import EngineProcess
    from streamdiff.server import main as server

    model, serve = "scripted", dict[str, Any](port=0)
    words = deque(sys.argv[2:])
    while words:
        option = words.popleft().removeprefix("--").replace("-", "_")
        setting = RENAMED.get(option, option)
        if option == "name":
            model = words.popleft()
        elif option == "no_browser":
            serve["open_browser"] = False
        elif option == "insecure":
            serve["insecure"] = True
        elif setting in ("outputs", "cors_origins"):
            while words and not words[0].startswith("--"):
                serve.setdefault(setting, []).append(words.popleft())
        else:
            word = words.popleft()
            serve[setting] = word if setting in ("name", "host") else yaml.safe_load(word)
    proxies = ["127.0.0.1"] if "name" in serve else []
    config = Config(serve=ServeConfig(**serve, trusted_proxies=proxies), model=ModelConfig(name=model))
    published = {} if model in catalogue.entries() else {"fetch": _nothing}
    return server.run(config, supervise=partial(EngineProcess, module="tests.server.scripted"), **published)


async def _nothing(config: ModelConfig, tell: object) -> None:
    """A painter needs no files."""


def _model_config() -> ModelConfig:
    return ipc.read_config(Path(sys.argv[sys.argv.index("--address") + 1])).model


if __name__ == "__main__":
    sys.exit(main())
