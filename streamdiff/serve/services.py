"""What the routes share: sessions, viewers, metrics. Knows nothing about addresses or answers."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from streamdiff.config import Config
from streamdiff.engine.messages import Ready
from streamdiff.serve.codecs import Codec
from streamdiff.serve.hub import DEFAULT_SESSION, Client, Hub
from streamdiff.serve.metrics import Metrics
from streamdiff.serve.outputs import Outputs
from streamdiff.serve.problem import Problem
from streamdiff.serve.session_view import SessionView
from streamdiff.serve.targets import Target
from streamdiff.serve.whep import Viewers


class Services:
    """What the routes share. Made on the running event loop."""

    def __init__(
        self, config: Config, client: Client, ready: Ready, codecs: tuple[Codec, ...], targets: Sequence[Target] = ()
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.codecs = codecs
        self.hub = Hub(config, client, ready, self.metrics)
        self.viewers = Viewers(config.serve.max_viewers, self.codecs, self.metrics, config.serve.ice_servers)
        self.hub.on_end = self.viewers.end_session
        self.outputs = Outputs(targets, lambda: self.hub.view(DEFAULT_SESSION), self.metrics)

    def view(self, request: Request) -> SessionView:
        """The session a request is about: of its path, else of its query, else the default one.

        Raises:
            Problem: 404, or 410 for one that has ended.
        """
        named = request.path_params.get("session") or request.query_params.get("session")
        session = named or DEFAULT_SESSION
        view = self.hub.view(session)
        if view is None and (reason := self.hub.end_of(session)) is not None:
            raise Problem(410, f"The session {session!r} has ended ({reason}).", code="ended", reason=reason)
        if view is None:
            raise Problem(404, f"There is no session {session[:64]!r}; GET /api/sessions lists them.", code="unknown")
        return view

    def running_view(self, request: Request) -> SessionView:
        """The same, while the engine runs.

        Raises:
            Problem: 404, 410, 503.
        """
        if self.hub.failed is not None:
            raise Problem(503, f"The engine stopped: {self.hub.failed}", {"Retry-After": "5"}, code="engine")
        return self.view(request)


def services_of(request: Request) -> Services:
    """What `create_app` made, while the application runs."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
