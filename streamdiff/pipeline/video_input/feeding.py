"""Sessions of a pipeline that are fed with video: frames in, latents for the head out, on a thread of its own.

A chunk of a fed session is admitted when its input is there. Newest wins: of frames that come faster than they are used
the oldest are dropped, before they are encoded (`MAX_UNENCODED` chunks of frames may wait) and after (`LiveLatents`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.core import InputFigures
from streamdiff.device import side_stream
from streamdiff.errors import RequestError, StreamdiffError
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.models.autoencoder.picture_decoder import VideoAutoencoder
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.runner.init_latents import MAX_WAITING, LiveLatents
from streamdiff.pipeline.runner.sampler import SamplerState

MAX_UNENCODED = 2
_FAULTS = (StreamdiffError, OSError, RuntimeError, ValueError, MemoryError)
"""What can go wrong with one session's video, and ends its input alone."""


@dataclass
class _Input:
    """The video of one session. `frames` are guarded by `lock`; the last four belong to the encoder's thread."""

    latents: LiveLatents
    ended: bool = False
    fault: str = ""
    dropped: int = 0
    calls: int = 0
    """Of the encoder, that are not done."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    frames: deque[NDArray[np.uint8]] = field(default_factory=deque)
    memory: Any = None
    parts: list[Tensor] = field(default_factory=list)
    """Latent frames of the chunk that is being put together."""
    motion: float = 0.0
    last: Tensor | None = None


class VideoInputs:
    """The live video of a pipeline's sessions, by session."""

    def __init__(self, pictures: ImageEncoder | None, spec: ModelSpec, wake: Callable[[], None]) -> None:
        """`pictures` has the encoder, None: the model encodes no video. `wake` is called, from the encoder's thread,
        when `poll` has something to do."""
        self._pictures, self._spec, self._wake = pictures, spec, wake
        self.inputs: dict[int, _Input] = {}
        """By session; while there are any, `poll` has work."""
        self._encoded: queue.SimpleQueue[tuple[_Input, list[tuple[Tensor, float]], str]] = queue.SimpleQueue()
        """What each call of the encoder's thread has made: chunks, with how much they move; and why it failed."""
        self._encoding = ThreadPoolExecutor(1, "video-encoder")
        self.encodings = 0
        """Pieces of video that were encoded."""

    def check_input(self, strength: float | None) -> None:
        """Raises what `set_input` would."""
        if strength is not None and not 0 < strength <= 1:
            raise RequestError("strength", f"strength is {strength}; it must be above 0 and at most 1")
        if self._pictures is None:
            raise RequestError("input", f"model {self._spec.name} encodes no video; steer it by its prompt alone")

    def set_input(self, session: int, state: SamplerState, strength: float | None) -> None:
        """From the next admitted chunk on, start from the video that `feed` brings, with noise of level `strength`
        mixed in, less where it moves; or change the strength (see `LiveLatents`). With None the input ends: what was
        fed is used, as far as it fills chunks, then the session continues from its text. Mutates: self, state.

        Raises:
            RequestError: `strength` is not above 0 and at most 1, or the model encodes no video.
        """
        self.check_input(strength)
        entry = self.inputs.get(session)
        if strength is None:
            if entry is not None:
                entry.ended = True
            return
        state.video = None  # which it was opened with
        if state.live is None:
            state.live = LiveLatents(strength, max(MAX_WAITING, self._spec.first_chunks))
        if entry is None or entry.ended:
            self.inputs[session] = _Input(state.live)
            state.live.begin_video()
        state.live.strength = strength

    def feed(self, session: int, frames: NDArray[np.uint8]) -> None:
        """The next frames of a session's input, RGB `[n, H, W, 3]` of the model's size, at the rate at which it is
        shown. Does nothing where its input has ended."""
        entry = self.inputs.get(session)
        if entry is None or entry.ended:
            return
        with entry.lock:
            entry.frames.extend(frames)
            over = max(0, len(entry.frames) - MAX_UNENCODED * self._spec.chunk_frames)
            for _ in range(over):
                entry.frames.popleft()
        entry.dropped += over
        entry.calls += 1
        self._encoding.submit(self._encode_waiting, entry)

    def input_figures(self, session: int) -> InputFigures | None:
        """How a session's input does; None: it has none."""
        entry = self.inputs.get(session)
        if entry is None:
            return None
        live, frames = entry.latents, self._spec.chunk_frames
        return InputFigures(live.level, live.used * frames, entry.dropped + live.dropped * frames, entry.fault)

    @property
    def encoding(self) -> bool:
        """Whether frames are being encoded."""
        return any(entry.calls for entry in self.inputs.values())

    def poll(self) -> None:
        """Give the sampler what was encoded. Mutates: self, the sampler's sessions."""
        while not self._encoded.empty():
            entry, chunks, fault = self._encoded.get_nowait()
            entry.calls -= 1
            if fault:
                entry.fault, entry.ended = fault, True
            if any(entry is each for each in self.inputs.values()):  # not of one that another has followed
                for latents, motion in chunks:
                    entry.latents.add(latents, motion)

    def frames_ready(self, session: int) -> int | None:
        """Frames for which a session has input; None: it needs none."""
        entry = self.inputs.get(session)
        if entry is None or (entry.ended and not entry.calls):
            return None
        return len(entry.latents.waiting) * self._spec.chunk_frames

    def begin_again(self, session: int, state: SamplerState) -> None:
        """The session's stream begins, or restarts, and continues to be fed if it was. Mutates: self, state."""
        if (entry := self.inputs.get(session)) is not None:
            entry.latents.begin_again()
            state.live = entry.latents

    def forget(self, session: int) -> None:
        """The session ends. Mutates: self."""
        if (entry := self.inputs.pop(session, None)) is not None:
            entry.ended = True

    def close(self, abandon: bool) -> None:
        """End the encoder's thread, or `abandon` it, as a device that hangs never lets it end. Mutates: self."""
        for session in list(self.inputs):
            self.forget(session)
        self._encoding.shutdown(wait=not abandon, cancel_futures=True)

    # ---- on the encoder's thread --------------------------------------------------------------------------------

    def _encode_waiting(self, entry: _Input) -> None:
        """Encode what waits of a session's frames, latent frame by latent frame. Mutates: entry."""
        assert self._pictures is not None
        chunks, fault = list[tuple[Tensor, float]](), ""
        try:
            encoder = self._pictures.encoder
            while (piece := _next_piece(entry, encoder)) is not None:
                if (chunk := self._encode(entry, encoder, piece)) is not None:
                    chunks.append(chunk)
        except _FAULTS as error:
            chunks, fault = [], str(error) or type(error).__name__
        self._encoded.put((entry, chunks, fault))
        self._wake()

    @torch.inference_mode()
    def _encode(
        self, entry: _Input, encoder: VideoAutoencoder, piece: NDArray[np.uint8]
    ) -> tuple[Tensor, float] | None:
        """One piece of video; a chunk when that has made it whole. Mutates: entry."""
        if entry.memory is None:
            entry.memory = encoder.new_encode_memory()
        self.encodings += 1
        cuda = encoder.device.type == "cuda"
        with side_stream(encoder.device, after_current=True):
            video = torch.from_numpy(piece).to(encoder.device).permute(0, 3, 1, 2).float() / 127.5 - 1
            latents = encoder.encode(video.movedim(0, 1)[None], entry.memory)[0].float().cpu()
            entry.motion = max(entry.motion, _largest_step(video, entry.last))
            entry.last = video[-1]
        entry.parts.append(latents)
        if sum(each.shape[1] for each in entry.parts) < self._spec.chunk_latents:
            return None
        whole, motion = torch.cat(entry.parts, 1), entry.motion
        entry.parts, entry.motion = [], 0.0
        return whole.pin_memory() if cuda else whole, motion


def _next_piece(entry: _Input, encoder: VideoAutoencoder) -> NDArray[np.uint8] | None:
    """The frames `[n, H, W, 3]` of the next latent frame, where they are there: so the encoder's calls are the same
    whatever pieces the frames come in. Mutates: entry."""
    frames = encoder.first_frames if entry.memory is None else encoder.temporal
    with entry.lock:
        if len(entry.frames) < frames:
            return None
        return np.stack([entry.frames.popleft() for _ in range(frames)])


def _largest_step(video: Tensor, before: Tensor | None) -> float:
    """The largest root mean square difference of neighbouring frames of `video` `[n, 3, H, W]`, and of its first one to
    `before`. Waits for the device."""
    line = video if before is None else torch.cat([before[None], video])
    if len(line) < 2:
        return 0.0
    return float((line[1:] - line[:-1]).square().flatten(1).mean(1).sqrt().max())
