"""Runs a whole server: engine process, web process, and their end. What `streamdiff serve` calls.

Knows nothing about routes, codecs or sessions.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Coroutine
from ipaddress import ip_address
from typing import Any

from streamdiff import clock
from streamdiff.config import Config, ModelConfig, ServeConfig
from streamdiff.engine.messages import Ready
from streamdiff.engine.process.engine_process import EngineHandle, EngineProcess
from streamdiff.engine.process.fetching import Progress, fetch
from streamdiff.engine.process.supervisor import EngineSupervisor, RestartPolicy
from streamdiff.errors import ConfigError, EngineFailure, StreamdiffError
from streamdiff.server import logging_setup
from streamdiff.server.app import attach_engine, create_app
from streamdiff.server.app_state import AppState
from streamdiff.server.auth import Tokens, read_tokens
from streamdiff.server.http_server import HttpServer
from streamdiff.server.middleware import Notice

EXIT_OK, EXIT_ENGINE, EXIT_USAGE = 0, 1, 2
UNREAD_S = 20
"""A connection whose other end takes nothing for so long is ended."""
DRAIN_LOOK_S = 0.1
FETCHED_PERCENT = 5
"""Of a file, after which the log is told again."""
FAREWELL_S = 0.3
"""How long viewers are given to hear that the engine ended."""

Fetch = Callable[[ModelConfig, Callable[[Progress], None]], Awaitable[None]]


def run(config: Config, *, supervise: Callable[[Config], EngineHandle] = EngineProcess, fetch: Fetch = fetch) -> int:
    """Serve until Ctrl-C, SIGTERM or the engine's end; returns the exit code.

    0: asked to end. 1: the engine could not start, or failed once more than it is started again. 2: a setting that
    cannot be used, for example a port that is taken; one line on standard error says which. `supervise` makes
    an engine process, each time one is started; `fetch` gets what the model needs, before the first one.
    """
    with logging_setup.written(config.serve):
        return _run(config, supervise, fetch)


def _run(config: Config, supervise: Callable[[Config], EngineHandle], fetch: Fetch) -> int:
    try:
        tokens = read_tokens(config.serve)
        listener = listen(config.serve.host, config.serve.port)
    except StreamdiffError as error:
        return _complain(error, EXIT_USAGE)
    with listener:
        try:
            _check_exposed(config.serve, listener, tokens)
            return asyncio.run(_serve(config, listener, supervise, fetch))
        except ConfigError as error:
            return _complain(error, EXIT_USAGE)
        except EngineFailure as error:
            return _complain(error, EXIT_ENGINE)


def _complain(error: StreamdiffError, code: int) -> int:
    logging_setup.complains.error("%s", error)
    return code


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`.

    Raises:
        ConfigError: the address cannot be had; says why and what to do.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=512)
        # Accepted connections inherit these. asyncio sets the first one only on sockets whose protocol number says
        # TCP, which the listener's does not: without it every second answer on a connection waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        return listener
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} cannot be found: {error.strerror}. Use 127.0.0.1 or an address.") from error
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


def address_of(listener: socket.socket) -> str:
    """The URL that a browser on this machine opens."""
    host, port = listener.getsockname()[:2]
    address = ip_address(host.split("%")[0])
    if address.is_unspecified:
        address = ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}/" if address.version == 6 else f"http://{address}:{port}/"


class _Asked:
    """Whether somebody asked for the end; `now`: without waiting for viewers (Ctrl-C, or asked again)."""

    def __init__(self) -> None:
        self.ever, self.now = asyncio.Event(), asyncio.Event()

    def end(self, now: bool) -> None:
        """Somebody asks. Mutates: self."""
        if now or self.ever.is_set():
            self.now.set()
        self.ever.set()


async def _serve(
    config: Config, listener: socket.socket, supervise: Callable[[Config], EngineHandle], fetch: Fetch
) -> int:
    asked = _Asked()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, asked.end, True)
    loop.add_signal_handler(signal.SIGTERM, asked.end, False)
    limits = RestartPolicy(config.serve.restarts, config.serve.restart_window_s, config.serve.restart_wait_s)
    engine = EngineSupervisor(lambda: supervise(config), limits, spare=config.serve.spare)
    app = create_app(config)
    http = HttpServer(app, config.serve)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        if not await _unless_asked(_start_engine(config, engine, app.state.notice, fetch), asked):
            return EXIT_OK
        async with attach_engine(app, config, engine, engine.ready) as services:
            try:
                _announce(config, listener, engine.ready)
                return await _serve_engine(config, services, engine, serving, asked)
            finally:
                http.should_exit = True
                await serving
    finally:
        http.should_exit = True
        await serving
        await engine.stop()


async def _start_engine(config: Config, engine: EngineSupervisor, notice: Notice, fetch: Fetch) -> None:
    """Fetch what the model needs, and start the engine; says so in the log and to who asks."""
    told: tuple[str, int] | None = None

    def tell(progress: Progress) -> None:
        nonlocal told
        # Which files these are is for those who may watch.
        named = str(progress) if config.serve.view_token_file is None else "fetching the model's files"
        notice.text, notice.code = f"{named[0].upper()}{named[1:]}.", "fetching"
        now = progress.file, 100 * progress.done // (progress.total or 1) // FETCHED_PERCENT
        if now != told:
            told = now
            logging_setup.says.info("%s", progress)

    await fetch(config.model, tell)
    notice.text, notice.code = Notice.text, Notice.code
    logging_setup.says.info("loading the model %r ...", config.model.name)
    await engine.start()


async def _unless_asked(starting: Coroutine[Any, Any, None], asked: _Asked) -> bool:
    """Do this; False, and it is cut short, when the user asks to end before it is done."""
    task = asyncio.create_task(starting)
    asking = asyncio.create_task(asked.ever.wait())
    await asyncio.wait({task, asking}, return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


async def _serve_engine(
    config: Config, services: AppState, engine: EngineSupervisor, serving: asyncio.Task[None], asked: _Asked
) -> int:
    """Serve a warm engine until somebody asks to end, or the engine does and is never started again."""
    asking, ended = (asyncio.create_task(event.wait()) for event in (asked.ever, services.hub.ended))
    try:
        await asyncio.wait({serving, asking, ended}, return_when=asyncio.FIRST_COMPLETED)
        if services.hub.failed is not None and not asked.ever.is_set():
            await asyncio.sleep(FAREWELL_S)
            if not engine.gave_up:
                raise EngineFailure(services.hub.failed)
            await _stay(services.hub.failed, serving, asking)
            return EXIT_ENGINE
        if asked.ever.is_set() and services.hub.failed is None:
            await _drain(services, config.serve.drain_s, asked)
        return EXIT_OK
    finally:
        for task in (asking, ended):
            task.cancel()


async def _stay(failed: str, *ends: asyncio.Task[Any]) -> None:
    """Say why there is no engine any more, to all who ask, until somebody ends the server."""
    logging_setup.complains.error("%s", failed)
    logging_setup.complains.error("the server stays to say so, /readyz answers 503 (Ctrl-C ends)")
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


async def _drain(services: AppState, limit_s: float, asked: _Asked) -> None:
    """Open no more sessions, and wait until nobody watches, for `limit_s` at the most, or until asked to end now."""
    services.hub.draining = True
    end_s = clock.monotonic_s() + limit_s
    if services.viewers.count and limit_s > 0 and not asked.now.is_set():
        logging_setup.says.info("ends when the viewers have left, in %g s at the latest", limit_s)
    while services.viewers.count and clock.monotonic_s() < end_s and not asked.now.is_set():
        await asyncio.sleep(DRAIN_LOOK_S)


def _announce(config: Config, listener: socket.socket, ready: Ready) -> None:
    url = address_of(listener)
    size = f"{ready.width}x{ready.height}"
    logging_setup.says.info("%s on %s, %s, %g frames per second", ready.model, ready.device, size, config.playback.fps)
    if not _is_loopback(listener):
        serve = config.serve
        others = "all who reach this machine can watch and steer"
        if serve.control_token_file is not None:
            others = "who reaches this machine can watch" if serve.view_token_file is None else "others need a token"
        logging_setup.says.info("listening on %s: %s", serve.host, others)
    if config.serve.control_token_file is not None:
        logging_setup.says.info(
            "steering takes the token in %s: open %s#token=TOKEN", config.serve.control_token_file, url
        )
    logging_setup.says.info("open %s (Ctrl-C ends)", url, extra=logging_setup.facts(url=url))
    if config.serve.open_browser and _has_display():
        _open_browser(url)


def _has_display() -> bool:
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open_browser(url: str) -> None:
    threading.Thread(target=webbrowser.open, args=(url,), name="open-browser", daemon=True).start()
