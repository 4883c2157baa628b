"""A pipeline that paints instead of computing: what the engine calls of `StreamingPipeline`, deterministic, no torch.

A stream that begins with a picture shows it for a chunk; otherwise the top left pixel of a picture is (frame
number in the stream mod 256, seed mod 256, checksum of the text mod 256).
Run as a module it is an engine process like the real one. Texts that begin with `fail` make it raise, as named there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from zlib import crc32

import numpy as np

from streamdiff.config import ModelConfig
from streamdiff.core import Frames, ModelInfo
from streamdiff.engine.messages import Pictures
from streamdiff.engine.process.main import main
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.spec import ParsedPrompt
from tests.fake_pipeline import FakePipeline, FakeStream

SIZE = 16
CHUNK_FRAMES = 6
PIECE_FRAMES = 2
WORDS = ("red", "green", "blue", "circle", "star", "left", "right")


def checksum(text: str) -> int:
    return crc32(text.encode()) % 256


INFO = ModelInfo("painted", "cpu", SIZE, SIZE, 20.0, CHUNK_FRAMES, 2, "clean", (2, 4))


class PaintedText:
    examples: tuple[str, ...] = ("red circle left", "blue star")
    suggestions = (("red", "blue"),)
    vocabulary = "colours, shapes, ways"
    slow = False

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        if prompt == "refuse me":
            raise RequestError("prompt", "the painter refuses this prompt")
        unknown = [word for word in prompt.split() if word not in WORDS]
        return ParsedPrompt(prompt.strip(), f"I do not know {', '.join(unknown)}" if unknown else "")

    def encode(self, text: str) -> str:
        return text


class PaintedPipeline(FakePipeline):
    info = INFO

    def __init__(self) -> None:
        super().__init__()
        self.text = PaintedText()

    def encode_picture(self, picture: Pictures) -> Pictures:
        if (picture == 13).all():
            raise ConfigError("the painter cannot look at this")
        return picture

    @property
    def busy(self) -> bool:
        return any(_ready(stream) or stream.decoded for stream in self.streams.values())

    def collect(self, wait_s: float) -> list[Frames]:
        for slot, stream in self.streams.items():
            if not _ready(stream):
                continue
            if stream.in_flight is None:
                stream.in_flight = (stream.chunk, stream.epoch, stream.paint)
                stream.steps_left = stream.steps
                stream.chunk += 1
            stream.steps_left -= 1
            if stream.steps_left == 0:
                self._fail_if_asked(stream.in_flight[2])
                stream.decoded.extend(self._paint(slot, stream))
                stream.in_flight = None
            self.streams[slot] = self.streams.pop(slot)  # the others are next
            break
        pieces = []
        for stream in self.streams.values():
            if stream.decoded:
                piece = stream.decoded.popleft()
                stream.credit -= len(piece.pictures)
                pieces.append(piece)
        return pieces

    def _paint(self, slot: int, stream: FakeStream) -> list[Frames]:
        assert stream.in_flight is not None
        chunk, epoch, text = stream.in_flight
        pieces = []
        for start in range(0, CHUNK_FRAMES, PIECE_FRAMES):
            numbers = chunk * CHUNK_FRAMES + start + np.arange(PIECE_FRAMES)
            pictures = np.zeros((PIECE_FRAMES, SIZE, SIZE, 3), np.uint8)
            pictures[..., 0] = (numbers % 256)[:, None, None]
            pictures[..., 1] = stream.seed % 256
            pictures[..., 2] = checksum(text)
            if chunk == 0 and stream.start is not None:
                pictures[:] = stream.start
            last = start + PIECE_FRAMES == CHUNK_FRAMES
            pieces.append(Frames(slot, chunk, epoch, pictures, last, 0.01 if last else None))
        return pieces

    def _fail_if_asked(self, text: str) -> None:
        if text == "fail raise":
            raise ArithmeticError("the paint ran out")
        if text == "fail exit":
            print("about to leave without a word", file=sys.stderr)
            os._exit(7)
        if text == "fail hang":
            print("hanging", file=sys.stderr, flush=True)
            time.sleep(3600)


def _ready(stream: FakeStream) -> bool:
    waiting = sum(len(piece.pictures) for piece in stream.decoded)
    admits = not stream.paused and not stream.waits and stream.credit - waiting >= CHUNK_FRAMES
    return stream.in_flight is not None or admits


def load(config: ModelConfig) -> PaintedPipeline:
    if config.name == "unknown":
        raise ConfigError("there is no model 'unknown'; use 'tiny' or a folder")
    if config.name == "broken":
        raise ArithmeticError("the weights are sour")
    if config.name == "slow":
        print("compiling: 0/2\rcompiling: 1/2\nstill loading", file=sys.stderr)
        time.sleep(3600)
    if config.name.startswith("patient "):  # loads until the file of this name is there, and says so all the time
        while not os.path.exists(config.name.removeprefix("patient ")):
            print("still loading", file=sys.stderr)
            time.sleep(0.02)
    logging.getLogger("streamdiff.painted").info("settings of the start")
    return PaintedPipeline()


if __name__ == "__main__":
    sys.exit(main(load=load))
