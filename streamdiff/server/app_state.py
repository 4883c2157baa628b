"""State shared by all routes: sessions, viewers, metrics, access checks. Knows nothing about paths or bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from prometheus_client import Counter
from starlette.requests import HTTPConnection

from streamdiff import clock
from streamdiff.config import Config
from streamdiff.engine.process.supervisor import EngineSupervisor
from streamdiff.server.auth import Role, Tokens, link_role, read_snapshot_key, read_tokens, role_of
from streamdiff.server.jobs import runner as job_runner
from streamdiff.server.jobs.runner import JobRunner
from streamdiff.server.jobs.store import JobStore
from streamdiff.server.media.encoder import choose
from streamdiff.server.metrics import Metrics
from streamdiff.server.outputs.output import Output, Outputs, parse_targets, read_targets
from streamdiff.server.peers import PerAddressLimiter, SlotPool, address_of
from streamdiff.server.problem import Problem
from streamdiff.server.sessions.control import EngineStatus
from streamdiff.server.sessions.keeper import SnapshotKeeper
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import DEFAULT_SESSION, Manager
from streamdiff.server.sessions.wheel import Watcher
from streamdiff.server.webrtc.ice import IceServers
from streamdiff.server.webrtc.peer_connections import Feeders, Viewers

REQUESTS_PER_S, REQUEST_BURST = 50.0, 200.0
VISITS_PER_S, VISIT_BURST = 0.2, 10.0
"""Sessions that visitors open from one address."""
MAX_SOCKETS = 64
MAX_SNAPSHOTS, MAX_CLIPS = 2, 8
_BEARER = {"WWW-Authenticate": 'Bearer realm="streamdiff"'}
SOCKET_PROTOCOL, TOKEN_PROTOCOL = "streamdiff", "streamdiff.token."


class AppState:
    """State shared by all routes. Made on the running event loop."""

    def __init__(self, config: Config, connection: EngineSupervisor, keeper: SnapshotKeeper) -> None:
        """Raises ConfigError for a setting that cannot be used, see `app.attach_engine`."""
        serve = config.serve
        self.config, self.metrics = config, Metrics()
        self.codecs, self._tokens = choose(serve.codec), read_tokens(serve)
        targets = parse_targets([*serve.outputs, *read_targets(serve.outputs_file)])
        self.sockets = SlotPool(MAX_SOCKETS, serve.address_share, "sockets", "control WebSockets")
        self._requests = PerAddressLimiter(REQUESTS_PER_S, REQUEST_BURST)
        self._visits = PerAddressLimiter(VISITS_PER_S, VISIT_BURST)
        self.manager = Manager(config, connection, self.metrics, keeper)
        slots = SlotPool(serve.max_viewers, serve.address_share, "viewers", "serve.max_viewers")
        self.ice_servers = IceServers(serve.ice_servers, lambda url: self.metrics.ice_failures.labels(url).inc())
        self.viewers = Viewers(slots, self.codecs, self.metrics, self.ice_servers)
        self.feeders = Feeders(slots, self.ice_servers, self.manager.end)
        self.outputs = Outputs(serve.output_targets, self.metrics, self.ice_servers)
        self.snapshots, self.clips = asyncio.Semaphore(MAX_SNAPSHOTS), asyncio.Semaphore(MAX_CLIPS)
        """Places for files that are being taken or sent, which lie in memory meanwhile."""
        self.snapshot_key = read_snapshot_key(serve)
        self.manager.on_end = self._session_ends
        self.started_s = int(clock.wall_s())
        self.jobs = None if serve.jobs_dir is None else self._make_jobs(Path(serve.jobs_dir).expanduser(), connection)
        """None: this server makes no videos."""
        self.metrics.viewers_limit.set(serve.max_viewers)
        self.metrics.jobs_limit.set(0 if self.jobs is None else job_runner.QUEUE)
        default = partial(self.manager.get, DEFAULT_SESSION)
        self.outputs.configured = [Output(target, default, self.outputs) for target in targets]

    async def _session_ends(self, session: LiveSession) -> None:
        """Close a session's viewers, outputs and senders."""
        for end in (self.feeders.end_session, self.viewers.end_session, self.outputs.end_session):
            await end(session)

    async def remove(self, session: LiveSession, peer: str) -> None:
        """End the connection of a peer that the session's owner does not want. Does nothing for one that is gone."""
        if peer in session.peers:
            session.peers[peer][0]({"type": "session_ended", "reason": "removed"})  # ends sockets and events
            await asyncio.sleep(0)  # lets the data channel send it
            self.viewers.end_soon(peer, "removed")

    def _make_jobs(self, folder: Path, connection: EngineSupervisor) -> JobRunner:
        """The runner of the server's jobs, connected to the manager's events. Mutates: manager."""
        # A `clean` session has one step in the ring at most, so it takes one for each stage to leave none idle.
        stages = self.config.model.stages if self.config.model.kv_context == "clean" else 1
        store = JobStore(folder, self.config.serve.name)
        runner = JobRunner(
            store, self.config.serve, connection.send, lambda: self.manager.ready, self.metrics, at_once=stages
        )
        self.manager.on_event, self.manager.make_room = runner.take, runner.make_room
        return runner

    def update_metrics(self) -> None:
        """Copy the figures that other objects hold into the metrics."""
        for session in self.manager.sessions:
            session.update_metrics()
        self.metrics.sessions.set(len(self.manager.sessions))
        self.metrics.sessions_watched.set(sum(session.watched for session in self.manager.sessions))
        limit = self.manager.sessions_limit()
        self.metrics.sessions_limit.set(float("nan") if limit is None else limit)
        for location, count in self.manager.sessions_by_location().items():
            self.metrics.sessions_at.labels(location).set(count)
        self.viewers.update_metrics()
        free = self.manager.load.free_sessions()
        self.metrics.free_sessions.set(float("nan") if free is None else free)
        self.metrics.engine_up.set(self.manager.engine.running)
        self.metrics.sockets.set(self.sockets.count)

    def role(self, request: HTTPConnection, session: LiveSession | None = None) -> Role:
        """Role of a caller for a session, or for the server where that is None."""
        role = role_of(_token_of(request), self._tokens, session.tokens if session else None)
        link = request.query_params.get("token") if self.config.serve.view_links else None
        if link is not None and session is not None:
            role = max(role, link_role(link, session.id, clock.wall_s(), (self._tokens, session.tokens or Tokens())))
        return role

    def require(self, request: HTTPConnection, needed: Role, session: LiveSession | None = None) -> None:
        """Raises Problem: 401 for a missing or wrong token, 403 for one that is good for less."""
        self._require(request, needed, self.role(request, session))

    def visits(self, request: HTTPConnection, session: LiveSession | None = None) -> bool:
        """Whether who asks for a session to be opened is a visitor, who may have one. Who steers `session` shows the
        token of that: it is no worse than none. Raises Problem: 401, 403; 429."""
        role = self.role(request) if session is None else max(self.role(request), role_of(None, self._tokens))
        visits = self.config.serve.session_per_visitor and role is not Role.CONTROLLER
        self._require(request, Role.VIEWER if visits else Role.CONTROLLER, role)
        self.limit(request, visits)
        return visits

    def require_for_jobs(self, request: HTTPConnection, needed: Role) -> None:
        """`require` for jobs: the server's token is needed for them where it has one. Where it has none, any is
        accepted, as clients of OpenAI's API always send a key."""
        if self._tokens != Tokens():
            self._require(request, needed, role_of(_token_of(request), self._tokens, Tokens()))

    def caller(self, request: HTTPConnection) -> str:
        """Who asks for a job: the holder of a token of the server, or else an address, with the key that it sends."""
        token = _token_of(request) or ""
        known = self._tokens.role_of(token) > Role.NOBODY
        return f"token {token}" if known else f"address {address_of(request)} {token}"

    def _require(self, request: HTTPConnection, needed: Role, role: Role) -> None:
        if role is Role.NOBODY or (role < needed and _token_of(request) is None):
            said = "This takes a token: send it as `Authorization: Bearer ...`."
            said = said if _token_of(request) is None else "The token is not one that is known here."
            if self.config.serve.view_links and "token" in request.query_params:
                said += " The link in `token` has expired, or is not signed for this session, or would let watch alone."
            raise Problem(401, said, _BEARER, code="token")
        if role < needed:
            raise Problem(403, "You may watch, not steer: that takes the control token.", code="forbidden")

    def watchable(self, request: HTTPConnection) -> list[LiveSession]:
        """The open sessions that a caller may watch, oldest first; the others stay unknown to it."""
        return [session for session in self.manager.sessions if self.role(request, session) >= Role.VIEWER]

    def may_control(self, request: HTTPConnection, session: LiveSession) -> bool:
        """Whether a caller may control a session."""
        return self.role(request, session) is Role.CONTROLLER

    def owns(self, request: HTTPConnection, session: LiveSession) -> bool:
        """Whether a caller shows a control token of a session. Nobody owns one that takes none."""
        return _token_of(request) is not None and self.may_control(request, session)

    def limit(self, request: HTTPConnection, visits: bool = False) -> None:
        """Count a request that changes something, or opens a session for a visitor. Raises Problem: 429 for too many
        from one address."""
        (self._visits if visits else self._requests).check(address_of(request), "requests", clock.monotonic_s())

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

    def controllable_session(self, request: HTTPConnection, wheel: bool = False) -> LiveSession:
        """The session that a request is about to change, and may; `wheel`: as may who has the wheel.

        Raises:
            Problem: 404, 410, 401, 403, 429, 503.
        """
        with count_refusals(self.metrics.controls, "any"):
            self.limit(request)
            session = self.running_session(request)
            if not (wheel and session.wheel.holds(watcher_of(request, session))):
                self.require(request, Role.CONTROLLER, session)
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

    def engine_problem(self, may_control: bool, session: LiveSession | None = None) -> Problem:
        """The answer while the engine does not run, or has not opened `session`, to a caller that may control it, or
        may not."""
        engine = self.manager.engine
        if engine.running and session is not None:
            engine = EngineStatus("opening") if session.engine.running else session.engine
        return engine.unavailable(may_control)


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


def watcher_of(request: HTTPConnection, session: LiveSession) -> Watcher | None:
    """Who a caller is at a session's wheel; None: it does not say."""
    return session.wheel.find(request.headers.get("wheel-token", ""))


@contextlib.contextmanager
def count_refusals(counter: Counter, *labels: str) -> Iterator[None]:
    """Context manager: count a Problem that is raised inside by `labels` and its code; it is raised further."""
    try:
        yield
    except Problem as problem:
        counter.labels(*labels, problem.code).inc()
        raise


def state_of(connection: HTTPConnection) -> AppState:
    """The state of the application, while an engine is attached (`app.attach_engine`)."""
    state = connection.app.state.app_state
    assert isinstance(state, AppState)
    return state
