"""Copies a stage's part of a session for a snapshot, a chunk's worth with each message, and sends it to the head by the
state exchange: forwards of other sessions wait for no more than a piece.

The session is held meanwhile, so that its caches do not change; an update that changes them all the same spoils the
copy, and the head gets the reason instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from streamdiff.pipeline.distributed.message import Outcome, SessionUpdate
from streamdiff.pipeline.distributed.state_exchange import State, StateExchange, ticket_key
from streamdiff.pipeline.kv_cache.cache import KVCache
from streamdiff.session_state.host_copies import HostCopy
from streamdiff.session_state.swap_store import Lost, SwapStore

logger = logging.getLogger(__name__)

_LEAST_BYTES = 1 << 22
"""A piece has so many bytes at least: with less, a message would cost more than the copy."""


class _StageSession(Protocol):
    @property
    def state(self) -> KVCache: ...


class SavedStage(Protocol):
    """`ModelRunner`, as it is seen here."""

    exchange_key: str
    exchange: StateExchange
    swaps: SwapStore

    @property
    def sessions(self) -> Mapping[int, _StageSession]: ...

    @property
    def weights(self) -> list[str]: ...

    def follow_copies(self, session: int) -> None: ...


@dataclass
class _Saving:
    ticket: int
    copy: HostCopy | None
    spoilt: str = ""


class StageSaving:
    """The copies that one stage is making."""

    def __init__(self, stage: SavedStage) -> None:
        self._stage = stage
        self._under_way: dict[int, _Saving] = {}
        self._done: dict[int, int] = {}  # tickets, by session: another stage may not be done, and all are asked again
        self._thread = ThreadPoolExecutor(1, "to head")

    def go_on(self, update: SessionUpdate) -> Outcome:
        """Copy the next piece of a session, the first one with a new ticket; what is complete goes to the head under
        `ticket_key`. NOT_YET: there are more. Mutates: self."""
        stage, session, ticket = self._stage, update.session, update.epoch
        if self._done.get(session) == ticket:
            return Outcome.DONE
        saving = self._under_way.get(session)
        if saving is None or saving.ticket != ticket:
            if (held := stage.sessions.get(session)) is None:
                self._done[session] = ticket
                return self._put(ticket, self._away(session))
            saving = self._under_way[session] = _Saving(ticket, HostCopy(stage.swaps.copies, held))
        if (copy := saving.copy) is not None:
            caches = stage.sessions[session].state
            done = copy.go_on(max(_LEAST_BYTES, chunk_bytes(caches)))
            stage.follow_copies(session)
            if not done:
                return Outcome.NOT_YET
        del self._under_way[session]
        self._done[session] = ticket
        if copy is None:
            return self._put(ticket, ({}, {"broken": saving.spoilt}))
        key, result = ticket_key(stage.exchange_key, ticket), copy.result
        self._thread.submit(send_state, stage.exchange, key, lambda: self._with_weights(*result()))
        return Outcome.DONE

    def spoil(self, session: int, why: str) -> None:
        """Invalidate a session's running copy: its state changes. Mutates: self."""
        if session in self._under_way:
            saving = self._under_way[session]
            saving.copy, saving.spoilt = None, why

    def refuse(self, update: SessionUpdate, why: str) -> None:
        """Send the head, once, the reason why a session cannot be saved. Mutates: self."""
        self._under_way.pop(update.session, None)
        if self._done.get(update.session) != update.epoch:
            self._done[update.session] = update.epoch
            self._put(update.epoch, ({}, {"broken": why}))

    def _away(self, session: int) -> State:
        """The part of a session that is swapped out, or why there is none."""
        if swapped(session) not in self._stage.swaps:
            return {}, {"broken": "the session has ended meanwhile"}
        try:
            return self._with_weights(*self._stage.swaps.read(swapped(session)))
        except Lost as error:
            return {}, {"broken": f"what it was is lost: {error}"}

    def _with_weights(self, tensors: Mapping[str, object], tree: object) -> State:
        return tensors, {"state": tree, "weights": self._stage.weights}  # type: ignore[return-value]

    def _put(self, ticket: int, state: State) -> Outcome:
        self._stage.exchange.put(ticket_key(self._stage.exchange_key, ticket), state)
        return Outcome.DONE


def send_state(exchange: StateExchange, key: str, made: Callable[[], State]) -> None:
    """Put the state that `made` returns for the head; if that raises, the reason as `broken`, since the head waits."""
    try:
        exchange.put(key, made())
    except Exception as error:
        why = f"a rank's part of the session could not be sent: {type(error).__name__}: {error}"
        logger.exception("%s: %s", key, why)
        exchange.put(key, ({}, {"broken": why}))
        raise


def chunk_bytes(caches: KVCache) -> int:
    """Bytes that a chunk has in caches."""
    return sum(each[:, :, :1].nbytes for each in (caches.key, caches.value))


def swapped(session: int) -> str:
    """Name of a stage's part of a session in a swap store."""
    return f"stage {session}"


def readiness(swaps: SwapStore, name: str) -> Outcome:
    """Whether what this rank has of a session that is away can come back; says in the log what is lost. Mutates:
    swaps."""
    try:
        return Outcome.DONE if swaps.ready(name) else Outcome.NOT_YET
    except Lost as error:
        logger.warning("%s cannot come back, and its session begins afresh: %s", name, error)
        return Outcome.LOST
