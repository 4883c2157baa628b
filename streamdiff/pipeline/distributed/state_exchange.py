"""Exchange of session states between a rank and the head, by key: too large and too rare for the links' messages."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from streamdiff.pipeline.distributed.message import Outcome, SessionUpdate
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import HostCopy, Lost, SwapStore

if TYPE_CHECKING:
    from streamdiff.pipeline.runner.model_runner import ModelRunner

State = tuple[Mapping[str, Tensor], Any]
"""What `session_state.walk.save` gives."""
_PIECE = 1 << 22  # bytes of a value: torch's TCPStore takes 8 MiB at most
_LONGEST_TEXT = 2000  # characters
_LOOK_S, _LOOKS = 0.002, 150_000


def stage_key(stage: int, share: int) -> str:
    """Exchange key of rank `share` of those that share a stage."""
    return f"stage {stage}, share {share}"


class LocalExchange:
    """Passes states from one rank to another, under a name that only the two use, one state at a time; and texts. From
    any thread of one process."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._texts: dict[str, str] = {}
        self._closed = threading.Event()

    def put(self, name: str, state: State) -> None:
        self._states[name] = state

    def holds(self, name: str) -> bool:
        """Whether `take` would give a state at once."""
        return name in self._states

    def take(self, name: str) -> State:
        """Remove and return the state under a name; waits for it.

        Raises:
            RuntimeError: it does not come, or the exchange was closed.
        """
        for _ in range(_LOOKS):
            if self.holds(name):
                return self._pop(name)
            if self._closed.wait(_LOOK_S):
                raise RuntimeError(f"the exchange was closed before {name} came")
        raise RuntimeError(f"{name} did not come within {_LOOKS * _LOOK_S:g} s")

    def close(self) -> None:
        """Unblock every `take`: those that would wait raise from now on."""
        self._closed.set()

    def post_text(self, name: str, text: str) -> None:
        """Post a text under a name, replacing one that is there."""
        self._texts[name] = text

    def pop_text(self, name: str) -> str | None:
        """Remove and return the text posted under a name; None if there is none. Does not wait for one."""
        return self._texts.pop(name, None)

    def _pop(self, name: str) -> State:
        return self._states.pop(name)


class StoreExchange(LocalExchange):
    """Over the ranks' store, a key-value server in host memory, in pieces. A state passes through it whole, so that
    the machine that keeps the store has it in memory once more meanwhile."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def put(self, name: str, state: State) -> None:
        tensors, tree = state
        data = save(dict(tensors))
        pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"state/{name}/{number}", piece)  # type: ignore[arg-type]  # bytes are taken as they are
        self._store.set(f"state/{name}", json.dumps({"pieces": len(pieces), "tree": tree}))

    def holds(self, name: str) -> bool:
        there: bool = self._store.check([f"state/{name}"])
        return there

    def post_text(self, name: str, text: str) -> None:
        self._store.set(f"word/{name}", text[:_LONGEST_TEXT])

    def pop_text(self, name: str) -> str | None:
        if not self._store.check([f"word/{name}"]):
            return None
        text = self._store.get(f"word/{name}").decode()
        self._store.delete_key(f"word/{name}")
        return text

    def _pop(self, name: str) -> State:
        said = json.loads(self._store.get(f"state/{name}"))
        keys = [f"state/{name}/{number}" for number in range(said["pieces"])]
        data = b"".join(self._store.get(key) for key in keys)
        for key in (*keys, f"state/{name}"):
            self._store.delete_key(key)
        return load(data), said["tree"]


def ticket_key(prefix: str, ticket: int) -> str:
    """Exchange key of a session's state, saved by ticket `ticket`, of the rank whose own key is `prefix`."""
    return f"{prefix}, save {ticket}"


def lora_key(prefix: str, lora: int) -> str:
    """The same of its part of a LoRA, by id."""
    return f"{prefix}, LoRA {lora}"


logger = logging.getLogger(__name__)

_LEAST_BYTES = 1 << 22
"""A piece has so many bytes at least: with less, a message would cost more than the copy."""


@dataclass
class _Copying:
    """A session's state that is copied under a ticket; `copy` is None once it has been sent: another stage may not be
    done, and all are asked again."""

    ticket: int
    copy: HostCopy | None = None


class StateMover:
    """Copies what one stage has of sessions out, to the head or to its `SwapStore`, and puts it back."""

    def __init__(self, stage: ModelRunner) -> None:
        self._stage = stage
        self._copying: dict[int, _Copying] = {}  # by session, the latest
        self._thread = ThreadPoolExecutor(1, "to head")

    def copy_out(self, update: SessionUpdate) -> Outcome:
        """See `SessionUpdate`. To the head the next piece is copied with each call, the first one with a new ticket,
        and what is complete goes under `ticket_key`. NOT_YET: there are more. Mutates: self, the stage."""
        stage, session = self._stage, update.session
        if not update.saved:
            gone = stage.sessions[session]
            stage.close(session)
            stage.swaps.put(swapped(session), gone)
            return Outcome.DONE
        if self._is_new(update):
            held = stage.sessions.get(session)
            self._copying[session] = _Copying(update.epoch, HostCopy(stage.swaps.copies, held) if held else None)
            if held is None:
                self._send(update.epoch, partial(stage.swaps.read, swapped(session)))
        copying = self._copying[session]
        if (copy := copying.copy) is None:
            return Outcome.DONE
        caches = stage.sessions[session].state
        chunk_bytes = sum(each[:, :, :1].nbytes for each in (caches.key, caches.value))
        done = copy.go_on(max(_LEAST_BYTES, chunk_bytes))
        stage.follow_copies(session)
        if not done:
            return Outcome.NOT_YET
        copying.copy = None
        self._thread.submit(self._send, copying.ticket, copy.result)
        return Outcome.DONE

    def put_back(self, update: SessionUpdate) -> Outcome:
        """See `SessionUpdate`. From the store a session gets caches again, unless its part is LOST; NOT_YET: ask again.
        Mutates: the stage."""
        stage, session, name = self._stage, update.session, swapped(update.session)
        if update.saved:
            key = ticket_key(stage.exchange_key, update.epoch)
            walk.load(stage.sessions[session], *stage.exchange.take(key), stage.device)
            return Outcome.DONE
        if session in stage.sessions:
            return Outcome.DONE
        outcome = readiness(stage.swaps, name)
        if stage.group is not None:  # a part that one of them cannot give is of no use to the others
            outcome = Outcome(stage.group.highest(outcome))
        if outcome is Outcome.DONE:
            stage.open(session, steps=update.steps, kv_context=update.kv_context)
            stage.swaps.take(name, stage.sessions[session])
            stage.follow_copies(session)
        return outcome

    def forget(self, session: int) -> None:
        """The stage has the session's caches no longer. Mutates: self, the stage's store."""
        self.spoil(session, "it has ended meanwhile, or was swapped out")
        self._stage.swaps.drop(swapped(session))

    def spoil(self, session: int, why: str) -> None:
        """Give up a session's running copy, as its state changes; the head gets `why`. Mutates: self."""
        copying = self._copying.get(session)
        if copying is not None and copying.copy is not None:
            copying.copy = None
            self._refuse(copying.ticket, why)

    def refuse(self, update: SessionUpdate, why: str) -> None:
        """Send the head, once, the reason why a session cannot be saved. Mutates: self."""
        self.spoil(update.session, why)
        if self._is_new(update):
            self._copying[update.session] = _Copying(update.epoch)
            self._refuse(update.epoch, why)

    def _is_new(self, update: SessionUpdate) -> bool:
        copying = self._copying.get(update.session)
        return copying is None or copying.ticket != update.epoch

    def _send(self, ticket: int, made: Callable[[], State]) -> None:
        """Send the head what `made` returns, with digests of the stage's weights."""
        stage = self._stage

        def with_weights() -> State:
            tensors, tree = made()
            return tensors, {"state": tree, "weights": stage.weights}

        send_state(stage.exchange, ticket_key(stage.exchange_key, ticket), with_weights)

    def _refuse(self, ticket: int, why: str) -> None:
        self._stage.exchange.put(ticket_key(self._stage.exchange_key, ticket), ({}, {"broken": why}))


def send_state(exchange: LocalExchange, key: str, made: Callable[[], State]) -> None:
    """Put the state that `made` returns for the head; if that raises, the reason as `broken`, since the head waits."""
    try:
        exchange.put(key, made())
    except Lost as error:
        exchange.put(key, ({}, {"broken": f"what it was is lost: {error}"}))
    except Exception as error:
        why = f"a rank's part of the session could not be sent: {type(error).__name__}: {error}"
        logger.exception("%s: %s", key, why)
        exchange.put(key, ({}, {"broken": why}))
        raise


def swapped(session: int) -> str:
    """Name of a stage's part of a session in a swap store."""
    return f"stage {session}"


def readiness(swaps: SwapStore, name: str) -> Outcome:
    """Whether what this rank has of a session that is away can come back; says in the log what is lost. Mutates:
    swaps."""
    try:
        return Outcome.DONE if swaps.ready(name) else Outcome.NOT_YET
    except Lost as error:
        logger.warning("%s cannot be swapped in, and its session restarts: %s", name, error)
        return Outcome.LOST
