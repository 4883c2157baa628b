"""Runs a server: supervises the engine process, serves the web side, shuts both down. What `streamdiff serve` calls.

Knows nothing about routes, codecs or sessions.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from ipaddress import ip_address
from typing import Any

from fastapi import FastAPI

from streamdiff import clock
from streamdiff.config import Config, ModelConfig, ServeConfig
from streamdiff.engine.messages import Ready
from streamdiff.engine.process.engine_process import EngineProcess
from streamdiff.engine.process.fetching import DownloadProgress, fetch
from streamdiff.engine.process.supervisor import EngineSupervisor, RestartPolicy
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.server.app import attach_engine, create_app
from streamdiff.server.app_state import MAX_SOCKETS, AppState
from streamdiff.server.auth import Tokens, read_tokens
from streamdiff.server.http_server import ACCEPTS, BACKLOG, MAX_CONNECTIONS, SPARE, HttpServer
from streamdiff.server.load import serve_agent
from streamdiff.server.logging_setup import configure, console, fatal
from streamdiff.server.middleware import not_ready
from streamdiff.server.sessions.keeper import open_folders
from streamdiff.server.tasks import end_tasks
from streamdiff.server.webrtc.aiortc_compat import host_addresses
from streamdiff.server.webrtc.ice import IceServers, UdpPortLoop

EXIT_OK, EXIT_ENGINE, EXIT_USAGE = 0, 1, 2
UNREAD_S = 20
"""A connection whose other end takes nothing for so long is ended."""
OWN_DESCRIPTORS = 48 + 3 * ACCEPTS
"""Of engines, jobs, the log and the loop, and of connections that are accepted and then refused."""
FEW_CONNECTIONS = 1000
"""Below that many the log says so."""
DRAIN_POLL_S = 0.1
FETCHED_PERCENT = 5
"""Of a file, after which progress is logged again."""
GOODBYE_S = 0.3
"""Time for the message that the engine has ended to reach viewers, before connections are closed."""

RANK_FAILURE_S = 3.0
"""For the engine to say that a rank is gone, when torchrun ends this one."""

Fetch = Callable[[ModelConfig, Callable[[DownloadProgress], None]], Awaitable[None]]


def run(config: Config, *, supervise: Callable[[Config], EngineProcess] = EngineProcess, fetch: Fetch = fetch) -> int:
    """Serve until Ctrl-C, SIGTERM or the engine's end; returns the exit code.

    0: asked to end. 1: the engine could not start, or failed once more than it is started again. 2: a setting that
    cannot be used, for example a port that is taken; one line on standard error says which. `supervise` makes
    an engine process, each time one is started; `fetch` gets what the model needs, before the first one.
    """
    with configure(config.serve):
        try:
            tokens = read_tokens(config.serve)
            with open_folders(config.serve):  # or their errors, before a model is loaded
                IceServers(config.serve.ice_servers)
            connections = connections_within_descriptors(config.serve.max_viewers)
            ports = config.serve.media_ports
            make_loop = None if ports is None else partial(UdpPortLoop, ports)  # None: asyncio's own choice
            with listen(config.serve.host, config.serve.port) as listener:
                _check_exposed(config.serve, listener, tokens)
                with asyncio.Runner(loop_factory=make_loop) as runner:
                    return runner.run(_serve(config, listener, connections, supervise, fetch))
        except (ConfigError, EngineFailure) as error:
            fatal.error("%s", error)
            return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ENGINE


def connections_within_descriptors(max_viewers: int) -> int:
    """How many connections this process may have file descriptors for, beside viewers and WebSockets: half of them at
    least, `MAX_CONNECTIONS` at most. Mutates: the process's soft limit, which becomes the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, 65536) if hard == resource.RLIM_INFINITY else hard
    if soft not in (limit, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    left = limit - OWN_DESCRIPTORS - SPARE
    others = max_viewers * len(host_addresses(use_ipv4=True, use_ipv6=True)) + MAX_SOCKETS
    fit = min(MAX_CONNECTIONS, max(8, left // 2, left - others))
    if fit < FEW_CONNECTIONS:
        console.warning(
            "At most %d connections are open here at the same time: a process may have %d file descriptors. Raise the "
            "limit (ulimit -n, LimitNOFILE)", fit, limit,
        )  # fmt: skip
    return fit


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`; at `::` also for IPv4, where the system can.

    Raises:
        ConfigError: the address cannot be had; says why and what to do.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
        # Accepted connections inherit these. asyncio sets the first one only on sockets whose protocol number says
        # TCP, which the listener's does not: without it every second answer on a connection waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        return listener
    except (socket.gaierror, UnicodeError) as error:  # the latter of a name that none can have
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"host {host!r} cannot be found: {why}. Use 127.0.0.1 or an address.") from error
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: f"port {port} is in use on {host}. Choose another with --port; 0 picks a free one.",
            errno.EACCES: f"port {port} needs more rights than you have. Choose one above 1023 with --port.",
            errno.EADDRNOTAVAIL: f"host {host!r} is no address of this machine. Use 127.0.0.1 or one that is.",
        }
        raise ConfigError(reasons.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}")) from error


def _check_exposed(config: ServeConfig, listener: socket.socket, tokens: Tokens) -> None:
    """Raises ConfigError if others can reach the server and nothing keeps them from steering it."""
    if _is_loopback(listener) or tokens.control is not None or config.insecure:
        return
    raise ConfigError(
        f"host {config.host!r} lets other machines in, and there is no token that keeps them from steering. Give one "
        "with --control-token-file FILE (and --view-token-file FILE, to choose who watches), or say --insecure if all "
        "who reach this machine may watch and steer."
    )


def _is_loopback(listener: socket.socket) -> bool:
    return ip_address(listener.getsockname()[0].split("%")[0]).is_loopback


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL that a browser on this machine opens."""
    host, port = listener.getsockname()[:2]
    address = ip_address(host.split("%")[0])
    if address.is_unspecified:
        address = ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"{scheme}://[{address}]:{port}/" if address.version == 6 else f"{scheme}://{address}:{port}/"


class ShutdownRequest:
    """Whether the user asked the server to end; `immediate`: without waiting for viewers (Ctrl-C, or asked again)."""

    def __init__(self) -> None:
        self.requested, self.immediate = asyncio.Event(), False

    def request(self, immediate: bool) -> None:
        """Note a signal. Mutates: self."""
        self.immediate = immediate or self.requested.is_set()
        self.requested.set()


async def _serve(
    config: Config,
    listener: socket.socket,
    connections: int,
    supervise: Callable[[Config], EngineProcess],
    fetch: Fetch,
) -> int:
    shutdown = ShutdownRequest()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, shutdown.request, True)
    loop.add_signal_handler(signal.SIGTERM, shutdown.request, False)
    limits = RestartPolicy(config.serve.max_restarts)
    engine = EngineSupervisor(lambda: supervise(config), limits, spare=config.serve.warm_standby)
    app = create_app(config)
    http = HttpServer(app, config.serve, connections)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        if not await _unless_shut_down(_start_engine(config, engine, app, fetch), shutdown):
            return EXIT_OK
        async with (
            attach_engine(app, config, engine) as state,
            serve_agent(config.serve.host, config.serve.agent_port, state.manager.free_sessions),
        ):
            try:
                _announce(config, listener, engine.ready)
                return await _serve_engine(config, state, engine, serving, shutdown)
            finally:
                http.should_exit = True
                await serving
    finally:
        http.should_exit = True
        await serving
        await engine.stop()


async def _start_engine(config: Config, engine: EngineSupervisor, app: FastAPI, fetch: Fetch) -> None:
    """Fetch what the model needs, and start the engine; progress goes to the log and to what `app` answers meanwhile.
    Mutates: app."""
    logged: tuple[str, int] | None = None

    def report(progress: DownloadProgress) -> None:
        nonlocal logged
        # Which files these are is for those who may watch.
        named = str(progress) if config.serve.view_token_file is None else "fetching the model's files"
        app.state.loading = not_ready(f"{named[0].upper()}{named[1:]}.", "fetching")
        now = progress.file, 100 * progress.done // (progress.total or 1) // FETCHED_PERCENT
        if now != logged:
            logged = now
            console.info("%s", progress)

    await fetch(config.model, report)
    app.state.loading = not_ready()
    console.info("loading the model %r ...", config.model.name)
    await engine.start()


async def _unless_shut_down(starting: Coroutine[Any, Any, None], shutdown: ShutdownRequest) -> bool:
    """Run `starting`; False, and it is cancelled, when the user asks to end before it is done."""
    task = asyncio.create_task(starting)
    requested = asyncio.create_task(shutdown.requested.wait())
    await asyncio.wait({task, requested}, return_when=asyncio.FIRST_COMPLETED)
    requested.cancel()
    if task.done():
        task.result()
        return True
    await end_tasks(task)
    return False


async def _serve_engine(
    config: Config, state: AppState, engine: EngineSupervisor, serving: asyncio.Task[None], shutdown: ShutdownRequest
) -> int:
    """Serve a warm engine until the server is asked to end, or the engine has failed for good; the exit code."""
    code = EXIT_OK
    requested, ended = (asyncio.create_task(event.wait()) for event in (shutdown.requested, state.manager.ended))
    try:
        await asyncio.wait({serving, requested, ended}, return_when=asyncio.FIRST_COMPLETED)
        if state.manager.engine.state == "failed" and not shutdown.requested.is_set():
            await asyncio.sleep(GOODBYE_S)
            if not engine.gave_up:
                raise EngineFailure(state.manager.engine.reason)
            fatal.error("%s", state.manager.engine.reason)
            fatal.error("the server stays to say so, /readyz answers 503 (Ctrl-C ends)")
            await asyncio.wait({serving, requested}, return_when=asyncio.FIRST_COMPLETED)
            code = EXIT_ENGINE
        if "RANK" in os.environ and shutdown.requested.is_set() and not shutdown.immediate:
            # torchrun ends this rank when it has lost another, which the engine notices at the same time: then what is
            # kept stays for the next server.
            await asyncio.wait({ended}, timeout=RANK_FAILURE_S)
        hands_over = config.serve.handover is not None and not shutdown.immediate
        if shutdown.requested.is_set() and (hands_over or state.manager.engine.state != "failed"):
            state.manager.draining = True  # no more sessions are opened
            if hands_over:
                await state.manager.keeper.hand_over(state.manager.sessions)
                console.info("sessions are in %s: the next server opens them", config.serve.handover)
            else:
                await _drain(state, config.serve.drain_s, shutdown)
            await state.manager.keeper.end()
        return code
    finally:
        await end_tasks(requested, ended)


async def _drain(state: AppState, limit_s: float, shutdown: ShutdownRequest) -> None:
    """Wait until no viewers are left, at most `limit_s`, or until asked to end now."""
    end_s = clock.monotonic_s() + limit_s
    if state.viewers.count and limit_s > 0 and not shutdown.immediate:
        console.info("ends when the viewers have left, in %g s at the latest", limit_s)
    while state.viewers.count and clock.monotonic_s() < end_s and not shutdown.immediate:
        await asyncio.sleep(DRAIN_POLL_S)


def _announce(config: Config, listener: socket.socket, ready: Ready) -> None:
    url = address_of(listener, "http" if config.serve.tls_cert is None else "https")
    size = f"{ready.width}x{ready.height}"
    console.info("%s on %s, %s, %g frames per second", ready.model, ready.device, size, config.playback.fps)
    if not _is_loopback(listener):
        serve = config.serve
        others = "all who reach this machine can watch and steer"
        if serve.control_token_file is not None:
            others = "who reaches this machine can watch" if serve.view_token_file is None else "others need a token"
        console.info("listening on %s: %s", serve.host, others)
    if config.serve.control_token_file is not None:
        console.info("steering takes the token in %s: open %s#token=TOKEN", config.serve.control_token_file, url)
    console.info("open %(url)s (Ctrl-C ends)", {"url": url})
    if ready.begins_with_picture and config.session.image is None:
        console.info("there is no --image: who opens the page chooses the picture that the stream begins with")
    if config.serve.open_browser and _has_display():
        threading.Thread(target=webbrowser.open, args=(url,), name="open-browser", daemon=True).start()


def _has_display() -> bool:
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
