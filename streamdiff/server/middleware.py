"""What every request meets first and every answer leaves with: the checks of Host and Origin, security headers, errors.

Also answers while there is no engine yet: the server lives, it is not ready, and the page looks again by itself.
"""

from __future__ import annotations

import html
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamdiff.server.hosts import HostPolicy
from streamdiff.server.problem import Problem, is_own_page, respond

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
HEALTH, READY = "/healthz", "/readyz"
_READING = ("GET", "HEAD", "OPTIONS")
_AGAIN_S = "1"
_LOADING = """<!doctype html><html lang="en"><meta charset="utf-8"><title>streamdiff</title>
<meta name="viewport" content="width=device-width">
<p role="status">{} This page looks again by itself.
"""


@dataclass
class Notice:
    """What everybody is told until an engine is attached: a sentence, and a word for programs."""

    text: str = "The model is loading."
    code: str = "loading"


class GuardMiddleware:
    """Pure ASGI, for HTTP and WebSockets. The application's `state.services` is None until an engine is attached;
    until then its `state.notice` is the answer.

    An exception of the application is answered with a problem document and goes on to the server, which logs it.
    """

    def __init__(self, app: ASGIApp, hosts: HostPolicy, origins: Collection[str]) -> None:
        """`origins`: pages of other origins that may use the server (`serve.cors_origins`)."""
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                started = True
                _add_headers(message, scope["path"])
            await send(message)

        try:
            answer = self._answer(scope) or self._app
            await answer(scope, receive, send_guarded)
        except ClientDisconnect:  # in the middle of a body: nobody is there to be answered
            return
        except Exception:
            if scope["type"] == "http" and not started:
                problem = Problem(500, "The server failed at this; its log says where.", code="internal")
                await respond(problem)(scope, receive, send_guarded)
            raise

    def _answer(self, scope: Scope) -> Response | None:
        """What is answered in the application's place; None: the application answers."""
        services = scope["app"].state.services
        try:
            self._check(scope)
        except Problem as problem:
            if scope["type"] == "websocket" and services is not None:
                services.metrics.sockets_refused.labels(problem.code).inc()
            return respond(problem)
        return None if services is not None or scope["path"] == HEALTH else _loading(scope)

    def _check(self, scope: Scope) -> None:
        """Raises Problem for a request that is refused whatever it asks for."""
        connection = HTTPConnection(scope)
        path = scope["path"]
        if "crowded" in scope.get("state", ()) and path != HEALTH:
            again = {"Retry-After": _AGAIN_S, "Connection": "close"}
            raise Problem(503, "The server has as many connections as it takes.", again, code="connections")
        # Probes name a server as they like, or not at all as in HTTP/1.0. Whether it lives is no secret.
        if path != HEALTH and not (path == READY and "host" not in connection.headers):
            self._hosts.check(scope["headers"])
        if (scope["type"] == "websocket" or scope["method"] not in _READING) and not is_own_page(
            connection, self._origins
        ):
            foreign = connection.headers["origin"]
            raise Problem(403, f"Pages of {foreign[:80]!r} may not use this server.", code="origin")


def _add_headers(message: Message, path: str) -> None:
    headers = MutableHeaders(scope=message)
    headers.update(SECURITY_HEADERS)
    headers.setdefault("Cache-Control", "no-cache" if path.startswith("/static") else "no-store")


def _loading(scope: Scope) -> Response:
    """What is answered until the engine is warm."""
    notice: Notice = scope["app"].state.notice
    again: dict[str, Any] = {"Retry-After": _AGAIN_S}
    if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
        return HTMLResponse(_LOADING.format(html.escape(notice.text)), 503, again | {"Refresh": _AGAIN_S})
    return respond(Problem(503, notice.text, again, code=notice.code))
