"""Exchange of session states between a rank and the head, by key: too large and too rare for the links' messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import Store

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
