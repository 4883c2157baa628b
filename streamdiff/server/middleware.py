"""ASGI middleware of every request: checks of Host and Origin, security headers, unhandled errors, answers while the
model loads.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable
from ipaddress import IPv6Address
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamdiff.config import ServeConfig
from streamdiff.server.peers import parse_address
from streamdiff.server.problem import Problem, Unavailable, respond, route_path

_CSP = "Content-Security-Policy"
SECURITY_HEADERS = {
    _CSP: (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
HEALTH, READY = "/healthz", "/readyz"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_RETRY_S = 1
_LOADING = """<!doctype html><html lang="en"><meta charset="utf-8"><title>streamdiff</title>
<meta name="viewport" content="width=device-width">
<p role="status">{} This page looks again by itself.
"""
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{0,5})?")
_SHOWN = 80
"""Characters of a name that the answer repeats."""


def not_ready(text: str = "The model is loading.", code: str = "loading") -> Problem:
    """What is answered until an engine is attached: `text` for people, `code` for programs."""
    return Unavailable(code, text, _RETRY_S)


class HostPolicy:
    """Check of the Host header against DNS rebinding. Accepts `localhost`, any IP address, `serve.host` and
    `serve.hosts`, in any case and with any port.

    A page whose name is made to point at this machine is, to the browser, of the same origin as this server; the Host
    header still has that name. Addresses cannot be made to point elsewhere, so they need not be listed.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._names = {"localhost", *(_plain(name) for name in (config.host, *config.hosts))}

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Check a request's headers (names in lower case).

        Raises:
            Problem: 400 without exactly one well-formed Host header, 421 for another server's name.
        """
        given = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(given) != 1:
            raise Problem(400, f"A request has one Host header; this one has {len(given)}.", code="host")
        found = _HOST.fullmatch(given[0])
        if found is None or (found["v6"] is not None and not isinstance(parse_address(found["v6"]), IPv6Address)):
            raise Problem(400, f"The Host header {given[0][:_SHOWN]!r} is no name or address.", code="host")
        name = found["name"]
        if name is None or parse_address(name) is not None or _plain(name) in self._names:
            return
        shown = name[:_SHOWN]
        message = f"This server is not known as {shown!r}. If it should be: --allowed-host {shown}, or serve.hosts."
        raise Problem(421, message, code="host")


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_own_page(request: HTTPConnection, origins: Collection[str]) -> bool:
    """Whether a request comes from no page at all, from one of this server, or from one of `origins`.

    A browser says where a page is from; without this any page could steer a server on the viewer's own machine.
    """
    origin = request.headers.get("origin")
    if origin is None or "*" in origins or origin in origins:
        return True
    return origin.partition("://")[2].lower() == request.headers.get("host", "").lower() != ""


class GuardMiddleware:
    """Pure ASGI, for HTTP and WebSockets. The application's `state.app_state` is None until an engine is
    attached; until then its `state.loading` is the answer.

    An exception of the application is answered with a problem document and continues to the server, which logs it.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        """`config`: names of the server, and the other origins whose pages may use it."""
        self._app, self._hosts, self._origins = app, HostPolicy(config), config.cors_origins
        self._headers = SECURITY_HEADERS
        if config.whep_url is not None:
            origin = "/".join(config.whep_url.split("/")[:3])
            policy = SECURITY_HEADERS[_CSP].replace("connect-src 'self'", f"connect-src 'self' {origin}")
            self._headers = {**SECURITY_HEADERS, _CSP: policy}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        started, path, prefix = False, route_path(scope), scope.get("root_path", "")

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                started, headers = True, MutableHeaders(scope=message)
                headers.update(self._headers)
                # Below the prefix, as a path: which scheme the client's proxy speaks is not known.
                if (location := headers.get("location")) is not None:
                    own = location.startswith("/")  # of a route; the router's redirects are whole, with the prefix
                    whole = urlsplit(location)._replace(scheme="", netloc="").geturl()
                    headers["location"] = prefix + location if own else whole
                headers.setdefault("Cache-Control", "no-cache" if path.startswith("/static") else "no-store")
            await send(message)

        try:
            answer = self._answer(scope) or self._app
            await answer(scope, receive, send_guarded)
        except ClientDisconnect:  # in the middle of a body: nobody is there to be answered
            return
        except Exception:
            if scope["type"] == "http" and not started:
                problem = Problem(500, "The server failed at this; its log says where.", code="internal")
                await respond(problem, path)(scope, receive, send_guarded)
            raise

    def _answer(self, scope: Scope) -> Response | None:
        """The answer to a request that is refused, or comes before the engine; None: the application answers."""
        state = scope["app"].state.app_state
        try:
            self._check(scope)
        except Problem as problem:
            if scope["type"] == "websocket" and state is not None:
                state.metrics.sockets_refused.labels(problem.code).inc()
            return respond(problem, route_path(scope))
        return None if state is not None or route_path(scope) == HEALTH else _loading(scope)

    def _check(self, scope: Scope) -> None:
        """Raises Problem for a request that is refused whatever it asks for."""
        connection = HTTPConnection(scope)
        path = route_path(scope)
        if "crowded" in scope.get("state", ()) and path != HEALTH:
            headers = {"Retry-After": str(_RETRY_S), "Connection": "close"}
            raise Problem(503, "The server has as many connections as it takes.", headers, code="connections")
        # Probes name a server as they like, or not at all as in HTTP/1.0. Whether it lives is no secret.
        if path != HEALTH and not (path == READY and "host" not in connection.headers):
            self._hosts.check(scope["headers"])
        if (scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS) and not _is_own_page(
            connection, self._origins
        ):
            foreign = connection.headers["origin"]
            raise Problem(403, f"Pages of {foreign[:80]!r} may not use this server.", code="origin")


def _loading(scope: Scope) -> Response:
    """What is answered until the engine is warm."""
    loading: Problem = scope["app"].state.loading
    path = route_path(scope)
    if scope["type"] == "http" and path == "/" and scope["method"] in ("GET", "HEAD"):
        headers = loading.headers | {"Refresh": str(_RETRY_S)}
        return HTMLResponse(_LOADING.format(html.escape(loading.detail)), loading.status, headers)
    return respond(loading, path)
