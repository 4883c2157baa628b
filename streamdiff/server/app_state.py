"""What the routes share: sessions, viewers, metrics, and who may do what. Knows nothing about paths or bodies."""

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
from streamdiff.server.peers import PerAddressLimiter, SlotPool, address_of
from streamdiff.server.problem import Problem
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import DEFAULT_SESSION, EngineConnection, SessionManager
from streamdiff.server.webrtc.viewers import Viewers

REQUESTS_PER_S, REQUEST_BURST = 50.0, 200.0
MAX_SOCKETS = 64
_BEARER = {"WWW-Authenticate": 'Bearer realm="streamdiff"'}
SOCKET_PROTOCOL, TOKEN_PROTOCOL = "streamdiff", "streamdiff.token."


class AppState:
    """What the routes share. Made on the running event loop."""

    def __init__(
        self,
        config: Config,
        connection: EngineConnection,
        ready: Ready,
        codecs: tuple[Codec, ...],
        tokens: Tokens,
        targets: Sequence[Target] = (),
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.codecs = codecs
        self.access = Access(tokens)
        serve = config.serve
        self.sockets = SlotPool(MAX_SOCKETS, serve.address_share, "sockets", "control WebSockets")
        self._requests = PerAddressLimiter(REQUESTS_PER_S, REQUEST_BURST)
        self.manager = SessionManager(config, connection, ready, self.metrics)
        slots = SlotPool(serve.max_viewers, serve.address_share, "viewers", "serve.max_viewers")
        self.viewers = Viewers(slots, self.codecs, self.metrics, serve.ice_servers)
        self.manager.on_end = self.viewers.end_session
        self.outputs = Outputs(targets, lambda: self.manager.get(DEFAULT_SESSION), self.metrics)

    def update_metrics(self) -> None:
        """Bring what is not counted where it happens into the metrics."""
        for session in self.manager.sessions:
            session.update_metrics()
        self.viewers.update_metrics()
        free = self.manager.free_sessions()
        self.metrics.room.set(float("nan") if free is None else free)
        self.metrics.engine_up.set(self.manager.engine.running)
        self.metrics.sockets.set(self.sockets.count)

    def role(self, request: HTTPConnection, session: LiveSession | None = None) -> Role:
        """What a caller may do with a session, or with the server."""
        return self.access.role(_token_of(request), session.tokens if session else None)

    def require(self, request: HTTPConnection, needed: Role, session: LiveSession | None = None) -> None:
        """Raises Problem: 401 for a missing or wrong token, 403 for one that is good for less."""
        role = self.role(request, session)
        if role is Role.NOBODY or (role < needed and _token_of(request) is None):
            raise Problem(401, "This takes a token: send it as `Authorization: Bearer ...`.", _BEARER, code="token")
        if role < needed:
            raise Problem(403, "You may watch, not steer: that takes the control token.", code="forbidden")

    def watchable(self, request: HTTPConnection) -> list[LiveSession]:
        """The open sessions that a caller may watch, oldest first: of no other is it told that it exists."""
        return [session for session in self.manager.sessions if self.role(request, session) >= Role.VIEWER]

    def may_control(self, request: HTTPConnection, session: LiveSession) -> bool:
        """Whether a caller may control a session."""
        return self.role(request, session) is Role.CONTROLLER

    def limit(self, request: HTTPConnection) -> None:
        """Count a request that changes something. Raises Problem: 429 for too many from one address."""
        self._requests.check(address_of(request), "requests", clock.monotonic_s())

    def session(self, request: HTTPConnection) -> LiveSession:
        """The session a request is about, which it may watch: of its path, else of its query, else the default one.

        Raises:
            Problem: 404, 410 for one that has ended, 401.
        """
        id = request.path_params.get("session") or request.query_params.get("session") or DEFAULT_SESSION
        session = self.manager.get(id)
        if session is None and (reason := self.manager.end_reason(id)) is not None:
            raise Problem(410, f"The session {id!r} has ended ({reason}).", code="ended", reason=reason)
        if session is None:
            raise Problem(404, f"There is no session {id[:64]!r}; GET /api/sessions lists them.", code="unknown")
        self.require(request, Role.VIEWER, session)
        return session

    def controllable_session(self, request: HTTPConnection) -> LiveSession:
        """The session that a request is about to change, and may.

        Raises:
            Problem: 404, 410, 401, 403, 429, 503.
        """
        try:
            self.limit(request)
            session = self.running_session(request)
            self.require(request, Role.CONTROLLER, session)
        except Problem as problem:
            self.metrics.controls.labels("any", problem.code).inc()
            raise
        return session

    def running_session(self, request: HTTPConnection) -> LiveSession:
        """The same as `session`, while the engine runs, or is to run again.

        Raises:
            Problem: 404, 410, 401, 503.
        """
        session = self.session(request)
        if self.manager.engine.state == "failed":
            raise self.engine_problem(self.may_control(request, session))
        return session

    def engine_problem(self, may_control: bool) -> Problem:
        """The answer while the engine does not run, to a caller that may control a session, or may not."""
        engine = self.manager.engine
        headers = {"Retry-After": str(engine.retry_after_s)}
        return Problem(503, engine.message(may_control), headers, code=engine.code)


def _token_of(request: HTTPConnection) -> str | None:
    """The token that a caller shows: as a header, or as a WebSocket's subprotocol, since pages can set no headers.

    Raises:
        Problem: 401 for another kind of authorization.
    """
    given = request.headers.get("authorization")
    if given is not None:
        kind, _, token = given.partition(" ")
        if kind.lower() != "bearer":
            raise Problem(401, "Authorization is `Bearer` and a token.", _BEARER, code="token")
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


def state_of(connection: HTTPConnection) -> AppState:
    """What the routes share, while an engine is attached (`app.attach_engine`)."""
    state = connection.app.state.app_state
    assert isinstance(state, AppState)
    return state
