"""uvicorn as the server runs it. Knows nothing about routes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from streamdiff.config import ServeConfig
from streamdiff.serve.control import MAX_MESSAGE_BYTES

MAX_CONNECTIONS = 1000


class HttpServer(uvicorn.Server):
    """Serves an application on sockets that listen already, until `should_exit`.

    It leaves signals alone: ours also cover the time before and after it runs.
    """

    def __init__(self, app: ASGIApp, serve: ServeConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # it writes as we do
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                limit_concurrency=MAX_CONNECTIONS,
                ws="wsproto",
                ws_max_size=2 * MAX_MESSAGE_BYTES,  # the answer to a message a little too long can still be given
                ws_per_message_deflate=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
