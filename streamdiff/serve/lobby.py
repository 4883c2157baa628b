"""Who answers while the engine loads: it lives, it is not ready, and a page that looks again by itself.

Gives way to the server once the engine is warm; who connects in between waits in the listener's queue.
"""

from __future__ import annotations

import asyncio
import html
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from streamdiff.serve.http_server import HttpServer
from streamdiff.serve.problem import Problem, respond

_AGAIN_S = "1"
_HEADERS = {"Connection": "close", "Cache-Control": "no-store"}
"""The next request belongs to the server."""
_METHODS = ["GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS"]
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>streamdiff</title>
<meta name="viewport" content="width=device-width">
<p role="status">{} This page looks again by itself.
"""


class Notice:
    """What all who ask are told: a sentence, and a word for programs."""

    def __init__(self) -> None:
        self.text, self.code = "The model is loading.", "loading"

    def set(self, text: str, code: str) -> None:
        """Tell this from now on. Mutates: self."""
        self.text, self.code = text, code

    async def page(self, _: Request) -> Response:
        """For people."""
        headers = {"Refresh": _AGAIN_S, "Retry-After": _AGAIN_S, "Content-Security-Policy": "default-src 'none'"}
        return HTMLResponse(_PAGE.format(html.escape(self.text)), 503, {**_HEADERS, **headers})

    async def problem(self, _: Request) -> Response:
        """For programs."""
        return respond(Problem(503, self.text, {**_HEADERS, "Retry-After": _AGAIN_S}, code=self.code))


@asynccontextmanager
async def opened(listener: socket.socket, limit_concurrency: int) -> AsyncIterator[Notice]:
    """Answer at `listener`, which stays open afterwards. Gives what is told."""
    notice = Notice()
    app = Starlette(
        routes=[
            Route("/healthz", _alive, methods=["GET"]),
            Route("/", notice.page, methods=["GET"]),
            Route("/{path:path}", notice.problem, methods=_METHODS),
        ]
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        limit_concurrency=limit_concurrency,
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener.dup()]))  # uvicorn closes what it is given
    try:
        yield notice
    finally:
        server.should_exit = True
        await serving


async def _alive(_: Request) -> Response:
    return JSONResponse({"alive": True}, headers=_HEADERS)
