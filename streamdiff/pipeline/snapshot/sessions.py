"""Saving sessions of a pipeline and loading them again."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate
from streamdiff.pipeline.output import Frames
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.snapshot.ring import check_unshared, collect, occupied, place, resume
from streamdiff.pipeline.snapshot.swapping import SwapsSessions

_REST_WAIT_S = 0.1
"""How long a step waits for frames while a session comes to rest."""


class SavesSessions(SwapsSessions):
    """What `StreamingPipeline` inherits to save its sessions and to go on from snapshots."""

    model: Model

    @abstractmethod
    def open(
        self, session: int, conditioning: Tensor, *, seed: int, epoch: int, steps: int, kv_context: str,
        background: bool = False, start: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start a stream."""

    @abstractmethod
    def close_session(self, session: int) -> None:
        """End a stream."""

    def save(self, session: int) -> tuple[Snapshot, list[Frames]]:
        """A session as it is now. What it has in flight comes back first, and it goes on afterwards as if nothing had
        been; with frames that came meanwhile, after which the snapshot is taken.

        Raises:
            ConfigError: its noise was given as tensors, or ranks share a stage.
            EngineFailure: as `step`.
        """
        check_unshared(self.ring)
        frames = self._come_back(session) + self._ask(MessageKind.SAVE, session)
        stream = self._streams[session]
        try:
            return collect(self.ring, self.model, stream, self._decoding.save(stream.number)), frames
        finally:
            self.ring.scheduler.hold(session, self.is_away(session))

    def load(self, session: int, snapshot: Snapshot) -> list[Frames]:
        """Open a session that goes on, to the bit, where a snapshot was taken, on any number of stages. Returns
        frames of other sessions that came meanwhile.

        Raises:
            RequestError: it is of another model, other weights or sizes, or does not fit in; nothing is open then.
            EngineFailure: as `step`.
        """
        try:
            check_unshared(self.ring)
            snapshot.check_model(self.model.spec, self.model.denoiser.dtype)
            opened = snapshot.session
            self.open(
                session, torch.zeros(self.model.spec.text_shape), seed=opened["seed"], epoch=opened["epoch"],
                steps=opened["steps"], kv_context=opened["kv_context"],
            )  # fmt: skip
            frames, stream = self._ask(MessageKind.SAVE, session), self._streams[session]
            change = place(snapshot, self.ring, stream)
            self._decoding.load(stream.number, (snapshot.tensors, snapshot.trees["decoder"]))
        except ConfigError as error:
            if session in self._streams:
                self.close_session(session)
            raise RequestError("snapshot", str(error)) from error
        frames += self._ask(MessageKind.LOAD, session)
        resume(self.ring, session, change)
        return frames

    def _ask(self, kind: MessageKind, session: int) -> list[Frames]:
        """Hold a session, have all stages save or load it, and go on until nothing of it is in the ring or decoding.
        Returns frames that came meanwhile."""
        frames: list[Frames] = []
        self.ring.scheduler.hold(session, True)
        self.ring.tell(kind, SessionUpdate(session))
        while occupied(self.ring, session) or self._streams[session].decoding:
            frames += self.step(_REST_WAIT_S)
        return frames
