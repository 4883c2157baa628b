"""Saving sessions of a pipeline and loading them again."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate
from streamdiff.pipeline.output import Frames
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.snapshot.ring import collect, occupied, place, resume
from streamdiff.pipeline.snapshot.swapping import SwapsSessions

_REST_WAIT_S = 0.1
"""How long a step waits for frames while a session comes to rest."""


class SavesSessions(SwapsSessions):
    """What `StreamingPipeline` inherits to save its sessions and to go on from snapshots."""

    model: Model
    _failed: set[int]
    _came: list[Frames]

    @abstractmethod
    def open(
        self, session: int, conditioning: Tensor, *, seed: int, epoch: int, steps: int, kv_context: str,
        background: bool = False, start: Tensor | None = None, video: GivenVideo | None = None,
    ) -> None:  # fmt: skip
        """Start a stream."""

    @abstractmethod
    def close_session(self, session: int) -> None:
        """End a stream."""

    def save(self, session: int) -> tuple[Snapshot, list[Frames]]:
        """A session as it is now. What it has in flight comes back first, and it goes on afterwards as if nothing had
        been; with frames that came meanwhile, after which the snapshot is taken.

        Raises:
            ConfigError: its noise was given as tensors.
            EngineFailure: as `step`.
        """
        frames = self._come_back(session) + self._ask(MessageKind.SAVE, session)
        stream = self._streams[session]
        try:
            snapshot = collect(self.ring, self.model, stream, self._decoding.save(stream.number))
            return snapshot.with_video(self.ring.sampler.sessions[session].video), frames
        except ConfigError:
            self._came += frames
            raise
        finally:
            self.ring.scheduler.hold(session, self.is_away(session))

    def read_snapshot(self, data: bytes | memoryview) -> Snapshot:
        """The snapshot in a file's content. Raises ConfigError for what is none."""
        return Snapshot.from_bytes(data)

    def load(self, session: int, snapshot: Snapshot) -> list[Frames]:
        """Open a session that goes on, to the bit, where a snapshot was taken, on any number of stages. Returns
        frames of other sessions that came meanwhile.

        Raises:
            RequestError: it is of another model, other weights or sizes, or does not fit in; nothing is open then.
            EngineFailure: as `step`.
        """
        frames: list[Frames] = []
        try:
            snapshot.check_model(self.model.spec, self.model.denoiser.dtype)
            opened = snapshot.session
            self.open(
                session, torch.zeros(self.model.spec.text_shape), seed=opened["seed"], epoch=opened["epoch"],
                steps=opened["steps"], kv_context=opened["kv_context"],
            )  # fmt: skip
            frames += self._ask(MessageKind.SAVE, session)
            stream = self._streams[session]
            change = place(
                snapshot, self.ring, self.model, stream, self._decoding.outlines(self.model.spec.chunk_shape)
            )
            self._decoding.load(stream.number, (snapshot.tensors, snapshot.trees["decoder"]))
            frames += self._ask(MessageKind.LOAD, session)
        except (ConfigError, RequestError) as error:
            self._came += frames
            if session in self._streams:
                self.close_session(session)
            if isinstance(error, RequestError):
                raise
            raise RequestError("snapshot", str(error)) from error
        self.ring.sampler.sessions[session].video = snapshot.video()
        resume(self.ring, session, change)
        return frames

    def _ask(self, kind: MessageKind, session: int) -> list[Frames]:
        """Hold a session, have all stages save or load it, and go on until nothing of it is in the ring or decoding.
        Returns frames that came meanwhile. Raises RequestError where it fails on the way."""
        frames: list[Frames] = []
        self.ring.scheduler.hold(session, True)
        self.ring.tell(kind, SessionUpdate(session))
        while occupied(self.ring, session) or self._streams[session].decoding:
            frames += self.step(_REST_WAIT_S)
        if session in self._failed:
            self._came += frames
            raise RequestError("session", "the session has failed meanwhile")
        return frames
