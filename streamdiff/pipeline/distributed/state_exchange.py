"""Exchange of session states between a rank and the head, by key: too large and too rare for the links' messages."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from streamdiff.pipeline.distributed.message import Outcome, SessionUpdate
from streamdiff.pipeline.kv_cache.cache import KVCache
from streamdiff.session_state.swap_store import HostCopy, Lost, SwapStore

State = tuple[Mapping[str, Tensor], Any]
"""What `session_state.walk.save` gives."""
_PIECE = 1 << 22  # bytes of a value: torch's TCPStore takes 8 MiB at most
_LONGEST_TEXT = 2000  # characters
_LOOK_S, _LOOKS = 0.002, 150_000


def stage_key(stage: int, share: int) -> str:
    """Exchange key of rank `share` of those that share a stage."""
    return f"stage {stage}, share {share}"


class StateExchange(Protocol):
    """Passes states from one rank to another, under a name that only the two use, one state at a time."""

    _closed: threading.Event

    def put(self, name: str, state: State) -> None: ...

    def take(self, name: str) -> State:
        """Remove and return the state under a name; waits for it. From any thread, as all methods.

        Raises:
            RuntimeError: it does not come, or the exchange was closed.
        """

    def holds(self, name: str) -> bool:
        """Whether `take` would give it at once."""

    def close(self) -> None:
        """Unblock every `take`: those that would wait raise from now on."""
        self._closed.set()

    def _await(self, name: str) -> None:
        """Wait for the state under a name. Raises RuntimeError as `take`."""
        for _ in range(_LOOKS):
            if self.holds(name):
                return
            if self._closed.wait(_LOOK_S):
                raise RuntimeError(f"the exchange was closed before {name} came")
        raise RuntimeError(f"{name} did not come within {_LOOKS * _LOOK_S:g} s")

    def post_text(self, name: str, text: str) -> None:
        """Post a text under a name, replacing one that is there."""

    def pop_text(self, name: str) -> str | None:
        """Remove and return the text posted under a name; None if there is none. Does not wait for one."""


class LocalExchange(StateExchange):
    """Within a process."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._texts: dict[str, str] = {}
        self._closed = threading.Event()

    def put(self, name: str, state: State) -> None:
        self._states[name] = state

    def take(self, name: str) -> State:
        self._await(name)
        return self._states.pop(name)

    def holds(self, name: str) -> bool:
        return name in self._states

    def post_text(self, name: str, text: str) -> None:
        self._texts[name] = text

    def pop_text(self, name: str) -> str | None:
        return self._texts.pop(name, None)


class StoreExchange(StateExchange):
    """Over the ranks' store, a key-value server in host memory, in pieces. A state passes through it whole, so that
    the machine that keeps the store has it in memory once more meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store, self._closed = store, threading.Event()

    def put(self, name: str, state: State) -> None:
        tensors, tree = state
        data = save(dict(tensors))
        pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(_key(name, number), piece)  # type: ignore[arg-type]  # bytes are taken as they are
        self._store.set(_key(name), json.dumps({"pieces": len(pieces), "tree": tree}))

    def take(self, name: str) -> State:
        self._await(name)  # `get` would keep heartbeats from the store while it waits
        said = json.loads(self._store.get(_key(name)))
        keys = [_key(name, number) for number in range(said["pieces"])]
        data = b"".join(self._store.get(key) for key in keys)
        for key in (*keys, _key(name)):
            self._store.delete_key(key)
        return load(data), said["tree"]

    def holds(self, name: str) -> bool:
        there: bool = self._store.check([_key(name)])
        return there

    def post_text(self, name: str, text: str) -> None:
        self._store.set(_text_key(name), text[:_LONGEST_TEXT])

    def pop_text(self, name: str) -> str | None:
        if not self._store.check([_text_key(name)]):
            return None
        text = self._store.get(_text_key(name)).decode()
        self._store.delete_key(_text_key(name))
        return text


def ticket_key(prefix: str, ticket: int) -> str:
    """Exchange key of a session's state, saved by ticket `ticket`, of the rank whose own key is `prefix`."""
    return f"{prefix}, save {ticket}"


def _key(name: str, piece: int | None = None) -> str:
    return f"state/{name}" if piece is None else f"state/{name}/{piece}"


def _text_key(name: str) -> str:
    return f"word/{name}"


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
