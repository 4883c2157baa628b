"""Logging of the server: lines for a person at a terminal, or JSON objects for a log collector.

Nothing is written per frame, chunk or micro-step. Prompts never are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

from streamdiff.config import ServeConfig

console = logging.getLogger("streamdiff.console")
"""Messages to the operator: the server's address, its end. As text they go to standard output."""
fatal = logging.getLogger("streamdiff.fatal")
"""Why the server cannot go on."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601 with offset), level, logger, message; and the values of a message that
    names them, as `%(session)s`, with others beside them. Never a prompt or a token."""

    def format(self, record: logging.LogRecord) -> str:
        second, offset = self.formatTime(record, "%Y-%m-%dT%H:%M:%S %z").split()
        body: dict[str, object] = {
            "time": f"{second}.{int(record.msecs):03d}{offset}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.args, Mapping):
            body = {**body, **record.args, **body}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False, default=str)


@contextlib.contextmanager
def configure(config: ServeConfig) -> Iterator[None]:
    """Context manager: log as `config` says.

    As text: what a person must know, and warnings, as plain lines. As JSON: everything on standard error, and also
    which sessions and viewers come and go.
    """
    root, package = logging.getLogger(), logging.getLogger("streamdiff")
    loggers = (root, package, console, fatal)
    saved = [(each, each.handlers[:], each.level, each.propagate) for each in loggers]
    as_json = config.log_format == "json"
    try:
        if as_json:
            _add_handler(root, JsonFormatter(), sys.stderr)
        else:
            _add_handler(root, logging.Formatter("%(message)s"), sys.stderr)
            for logger, stream in ((console, sys.stdout), (fatal, sys.stderr)):
                _add_handler(logger, logging.Formatter("streamdiff: %(message)s"), stream)
                logger.propagate = False
        package.setLevel(logging.INFO if as_json else logging.WARNING)
        console.setLevel(logging.INFO)
        yield
    finally:
        for logger, handlers, level, propagate in saved:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def _add_handler(logger: logging.Logger, formatter: logging.Formatter, stream: TextIO) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
