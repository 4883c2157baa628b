"""What the routes share: sessions, viewers, metrics. Knows nothing about addresses or answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from prometheus_client import Counter
from starlette.requests import HTTPConnection

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.messages import Ready
from streamdiff.server.auth import Access, Role, Tokens
from streamdiff.server.media.codecs import Codec
from streamdiff.server.metrics import Metrics
from streamdiff.server.outputs.output import Outputs
from streamdiff.server.outputs.target import Target
from streamdiff.server.peers import Places, address_of
from streamdiff.server.problem import Problem
from streamdiff.server.rate_limit import PerAddressLimiter
from streamdiff.server.sessions.engine_state import EngineState, lost_message
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import DEFAULT_SESSION, EngineConnection, SessionManager
from streamdiff.server.webrtc.viewers import Viewers

REQUESTS_PER_S, REQUEST_BURST = 50.0, 200.0
MAX_SOCKETS = 64
SOCKET_PROTOCOL, TOKEN_PROTOCOL = "streamdiff", "streamdiff.token."


class AppState:
    """What the routes share. Made on the running event loop."""

    def __init__(
        self,
        config: Config,
        client: EngineConnection,
        ready: Ready,
        codecs: tuple[Codec, ...],
        tokens: Tokens,
        targets: Sequence[Target] = (),
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.codecs = codecs
        self.access = Access(tokens)
        self.sockets = Places(MAX_SOCKETS, config.serve.address_share, "sockets", "control WebSockets")
        """Of control WebSockets."""
        self._requests = PerAddressLimiter(REQUESTS_PER_S, REQUEST_BURST)
        self.hub = SessionManager(config, client, ready, self.metrics)
        places = Places(config.serve.max_viewers, config.serve.address_share, "viewers", "serve.max_viewers")
        self.viewers = Viewers(places, self.codecs, self.metrics, config.serve.ice_servers)
        self.hub.on_end = self.viewers.end_session
        self.outputs = Outputs(targets, lambda: self.hub.view(DEFAULT_SESSION), self.metrics)

    def measure(self) -> None:
        """Bring what is not counted where it happens into the metrics."""
        for view in self.hub.views:
            view.measure()
        self.viewers.measure()
        room = self.hub.room()
        self.metrics.room.set(float("nan") if room is None else room)
        self.metrics.engine_up.set(self.hub.failed is None and self.hub.restarting is None)
        self.metrics.sockets.set(self.sockets.count)

    def role(self, request: HTTPConnection, view: LiveSession | None = None) -> Role:
        """What a caller may do with a session, or with the server."""
        return self.access.role(_token_of(request), view.tokens if view else None)

    def require(self, request: HTTPConnection, wanted: Role, view: LiveSession | None = None) -> None:
        """Raises Problem: 401 for a missing or wrong token, 403 for one that is good for less."""
        role = self.role(request, view)
        if role is Role.NOBODY or (role < wanted and _token_of(request) is None):
            headers = {"WWW-Authenticate": 'Bearer realm="streamdiff"'}
            raise Problem(401, "This takes a token: send it as `Authorization: Bearer ...`.", headers, code="token")
        if role < wanted:
            raise Problem(403, "You may watch, not steer: that takes the control token.", code="forbidden")

    def watchable(self, request: HTTPConnection) -> list[LiveSession]:
        """The open sessions that a caller may watch, oldest first: of no other is it told that it exists."""
        return [view for view in self.hub.views if self.role(request, view) >= Role.VIEWER]

    def may_control(self, request: HTTPConnection, view: LiveSession) -> bool:
        """Whether a caller may steer a session."""
        return self.role(request, view) is Role.CONTROLLER

    def limit(self, request: HTTPConnection) -> None:
        """Count a request that changes something. Raises Problem: 429 for too many from one address."""
        if not self._requests.of(address_of(request)).take(clock.monotonic_s()):
            raise Problem(429, "Too many requests in a short time from one address.", {"Retry-After": "1"}, code="rate")

    def view(self, request: HTTPConnection) -> LiveSession:
        """The session a request is about, which it may watch: of its path, else of its query, else the default one.

        Raises:
            Problem: 404, 410 for one that has ended, 401.
        """
        named = request.path_params.get("session") or request.query_params.get("session")
        session = named or DEFAULT_SESSION
        view = self.hub.view(session)
        if view is None and (reason := self.hub.end_of(session)) is not None:
            raise Problem(410, f"The session {session!r} has ended ({reason}).", code="ended", reason=reason)
        if view is None:
            raise Problem(404, f"There is no session {session[:64]!r}; GET /api/sessions lists them.", code="unknown")
        self.require(request, Role.VIEWER, view)
        return view

    def controlled_view(self, request: HTTPConnection) -> LiveSession:
        """The session that a request is about to change, and may.

        Raises:
            Problem: 404, 410, 401, 403, 429, 503.
        """
        try:
            self.limit(request)
            view = self.running_view(request)
            self.require(request, Role.CONTROLLER, view)
        except Problem as problem:
            self.metrics.controls.labels("any", problem.code).inc()
            raise
        return view

    def restart_s(self) -> int:
        """In how many seconds an engine that is started again may be there, as far as is known."""
        return self.hub.restarting.retry_after_s if self.hub.restarting is not None else 1

    def running_view(self, request: HTTPConnection) -> LiveSession:
        """The same as `view`, while the engine runs, or is to run again.

        Raises:
            Problem: 404, 410, 401, 503.
        """
        view = self.view(request)
        if self.hub.failed is not None:
            raise self.lost("failed", self.hub.failed, self.may_control(request, view))
        return view

    def lost(self, engine: EngineState, reason: str, may_control: bool) -> Problem:
        """The answer where the engine does not run, for somebody who may steer, or may not."""
        code, again_s = ("engine", 5) if engine == "failed" else ("restarting", self.restart_s())
        return Problem(503, lost_message(engine, reason, may_control), {"Retry-After": str(again_s)}, code=code)


def _token_of(request: HTTPConnection) -> str | None:
    """The token that a caller shows: as a header, or as a WebSocket's subprotocol, since pages can set no headers.

    Raises:
        Problem: 401 for another kind of authorization.
    """
    given = request.headers.get("authorization")
    if given is not None:
        kind, _, token = given.partition(" ")
        if kind.lower() != "bearer":
            headers = {"WWW-Authenticate": 'Bearer realm="streamdiff"'}
            raise Problem(401, "Authorization is `Bearer` and a token.", headers, code="token")
        return token.strip()
    offered: list[str] = request.scope.get("subprotocols", [])
    shown = [each.removeprefix(TOKEN_PROTOCOL) for each in offered if each.startswith(TOKEN_PROTOCOL)]
    return shown[0] if shown else None


@contextlib.contextmanager
def refusals(counter: Counter) -> Iterator[None]:
    """Count every Problem that is raised inside by its reason; it goes on."""
    try:
        yield
    except Problem as problem:
        counter.labels(problem.code).inc()
        raise


def services_of(request: HTTPConnection) -> AppState:
    """What `create_app` made, while the application runs."""
    services = request.app.state.services
    assert isinstance(services, AppState)
    return services
