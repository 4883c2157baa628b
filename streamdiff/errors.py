"""Errors that a user of streamdiff can meet. Each message names the thing, the value, what is allowed, the way out."""

from __future__ import annotations

NOT_FINITE = "no numbers (NaN or infinite)"
"""In the reason of a session that ends as what its model computes has run over."""


class StreamdiffError(Exception):
    """Base class: catch this to catch everything streamdiff raises on purpose.

    `field` names the setting, field or part of a file that is wrong ("prompt", "model.steps"), `code` is a short word
    for programs that act on it ("memory"); both are "" where there is none. The sentence is for people, and may change.
    """

    def __init__(self, message: str = "", *, field: str = "", code: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class ConfigError(StreamdiffError, ValueError):
    """A configuration file, option or argument that cannot be used."""


class RequestError(StreamdiffError, ValueError):
    """A request for a session that cannot be carried out; the session itself continues.

    A page shows the message beside `field`. Code "memory": there is no room for the session.
    """

    def __init__(self, field: str, message: str, code: str = "") -> None:
        super().__init__(message, field=field, code=code)


class EngineFailure(StreamdiffError, RuntimeError):
    """The engine ended by itself; the message carries rank, session and chunk where they are known."""
