"""What the server writes down, and how: lines for a person at a terminal, or JSON objects for a collector of logs.

Nothing is written per frame, chunk or micro-step. Prompts are written by `prompt_log` alone, and only if asked for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

from streamdiff.config import ServeConfig

says = logging.getLogger("streamdiff.says")
"""For whoever started the server: where it listens, that it ends. Text goes to standard output."""
complains = logging.getLogger("streamdiff.complains")
"""Why the server cannot go on."""
prompt_log = logging.getLogger("streamdiff.prompts")
"""Where prompts are written, if that is asked for."""


def facts(**values: object) -> dict[str, Any]:
    """For a log call's `extra`: fields of its JSON object, beside the message. Never a prompt or a token."""
    return {"facts": values}


class JsonFormatter(logging.Formatter):
    """One JSON object in a line: time (ISO 8601, with the offset), level, logger, message, and the record's `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        second, offset = self.formatTime(record, "%Y-%m-%dT%H:%M:%S %z").split()
        body = {
            "time": f"{second}.{int(record.msecs):03d}{offset}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False, default=str)


@contextlib.contextmanager
def written(config: ServeConfig) -> Iterator[None]:
    """Write the log as `config` says, meanwhile.

    As text: what a person must know, and warnings, as plain lines. As JSON: everything on standard error, and also
    which sessions and viewers come and go.
    """
    root, ours, undo = logging.getLogger(), logging.getLogger("streamdiff"), contextlib.ExitStack()
    as_json = config.log_format == "json"
    with undo:
        if as_json:
            _attach(undo, root, JsonFormatter(), sys.stderr)
        else:
            _attach(undo, root, logging.Formatter("%(message)s"), sys.stderr)
            for logger, stream in ((says, sys.stdout), (complains, sys.stderr)):
                _attach(undo, logger, logging.Formatter("streamdiff: %(message)s"), stream)
                _set(undo, logger, "propagate", False)
        _set(undo, ours, "level", logging.INFO if as_json else logging.WARNING)
        _set(undo, says, "level", logging.INFO)
        _set(undo, prompt_log, "level", logging.INFO if config.log_prompts else logging.CRITICAL + 1)
        yield


def _attach(undo: contextlib.ExitStack, logger: logging.Logger, formatter: logging.Formatter, stream: Any) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    undo.callback(logger.removeHandler, handler)


def _set(undo: contextlib.ExitStack, logger: logging.Logger, name: str, value: int | bool) -> None:
    undo.callback(_put, logger, name, getattr(logger, name))
    _put(logger, name, value)


def _put(logger: logging.Logger, name: str, value: int | bool) -> None:
    # `setLevel` also forgets what the logger remembers of its level, which setting the attribute does not.
    if name == "level":
        logger.setLevel(value)
    else:
        setattr(logger, name, value)
