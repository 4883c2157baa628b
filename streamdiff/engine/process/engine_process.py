"""Starts the engine process, waits until it is warm, notices its end and says why. Torch-free, asyncio.

Knows nothing about sessions or viewers. Restarting is up to the caller: one `EngineProcess` is one engine process.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
from asyncio.subprocess import STDOUT, Process
from collections import deque
from pathlib import Path

from streamdiff import child_process
from streamdiff.config import Config
from streamdiff.engine.messages import Failed, Ready, Shutdown
from streamdiff.engine.process.ipc import EXIT_CONFIG, EngineClient, make_folder, make_pipe, wake
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.models.resolve import may_compile

output_log = logging.getLogger("streamdiff.engine.output")
"""Output of the engine process where the log is JSON; otherwise it is copied to our standard error."""

_LAST_LINES = 20
_LINE_END = re.compile(r"[\r\n]")  # bars of progress end with the one, lines with the other
_LINE_CHARACTERS = 2000
_START_LIMIT_S, _COMPILE_LIMIT_S = 300.0, 3600.0  # of silence
_STOP_LIMIT_S = 1.5
_STOP_RANKS_LIMIT_S = 10.0
# A trace that was begun is written at the end: seconds with the embedded model, more with larger ones.
_STOP_TRACED_LIMIT_S = 60.0
_LOOKS = 10  # before an engine hangs
# Ranks find out themselves which of them hangs, and say so; only if they do not is their launcher ended from here.
_RANKS_HANG_S = 15.0


def name_exit(code: int) -> str:
    """How a process ended, after the word "ended": an exit code, or (negative) a signal."""
    if code >= 0:
        return f"with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
    return f"by signal {known.get(-code, str(-code))}{hint}"


def loading_limit_s(config: Config) -> float:
    """How long an engine may be silent while it loads: much longer where it may make graphs."""
    return _COMPILE_LIMIT_S if may_compile(config.model) else _START_LIMIT_S


class EngineProcess:
    """One engine process, from start to end; with several ranks, a launcher and its ranks, unless torchrun has started
    this process as the first of them."""

    def __init__(
        self,
        config: Config,
        *,
        start_limit_s: float | None = None,
        stop_limit_s: float | None = None,
        module: str = "streamdiff.engine.process.main",
    ) -> None:
        """Args:
        start_limit_s: how long the process may be silent while it loads and warms up, which may take any time; by
            default `loading_limit_s`.
        stop_limit_s: how long the process may take to end by itself before it is killed; by default more for ranks,
            and much more where it may have a trace to write.
        module: what runs with `python -m`; takes `--address`.
        """
        self._config = config
        self._silence_limit_s = start_limit_s or loading_limit_s(config)
        ending_s = _STOP_LIMIT_S if config.model.ranks == 1 else _STOP_RANKS_LIMIT_S
        self._stop_limit_s = stop_limit_s or (ending_s if config.model.trace is None else _STOP_TRACED_LIMIT_S)
        self._module = module
        self._folder: Path | None = None
        self._process: Process | None = None
        self._ipc: EngineClient | None = None
        self._watching: asyncio.Task[int] | None = None
        self._silence_watch: asyncio.Task[None] | None = None
        self._ready: Ready | None = None
        self._silent = self._stopping = False
        self._start_pipe: int | None = None
        self._written = 0  # bytes, by the process
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    @property
    def ready(self) -> Ready:
        """The engine's `Ready` event; after `start`."""
        assert self._ready is not None, "start the engine first"
        return self._ready

    @property
    def pid(self) -> int:
        """The engine's process id; after `start`."""
        assert self._process is not None, "start the engine first"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def prepare(self) -> None:
        """Optional step before `start`: a standby process, which only imports modules until then."""
        try:
            self._folder = make_folder(self._config)
            self._start_pipe = make_pipe(self._folder)
            await self._launch("--spare")
        except BaseException:
            await self.stop()
            raise

    async def start(self) -> EngineClient:
        """Start the engine and wait until it is warm. The returned `EngineClient`'s `events` begin after `Ready`.

        Raises:
            ConfigError: the engine refuses the configuration (an unknown model, for example).
            EngineFailure: it ended, or was silent for too long; the message carries the last lines it wrote.
        """
        assert self._silence_watch is None, "one EngineProcess starts one engine; make another"
        try:
            if self._start_pipe is not None:
                wake(self._start_pipe)
            else:
                self._folder = make_folder(self._config)
                await self._launch()
            assert self._ipc is not None
            self._silence_watch = asyncio.create_task(self._kill_when_silent(), name="engine-listen")
            self._ready = await self._until_ready(self._ipc)
        except BaseException:
            await self.stop()
            raise
        model = self._config.model
        self._silence_watch.cancel()
        self._silence_limit_s = model.watchdog_s + (0.0 if model.ranks == 1 else _RANKS_HANG_S)
        self._silence_watch = asyncio.create_task(self._kill_when_silent(), name="engine-listen")
        self._last_lines.clear()  # what was chosen at the start is no reason for what ends it later
        return self._ipc

    async def _launch(self, *more: str) -> None:
        assert self._folder is not None
        self._ipc = EngineClient(self._folder)
        launches = self._config.model.ranks > 1 and "RANK" not in os.environ
        launcher = ("streamdiff.engine.process.launcher", "--module") if launches else ()
        words = *launcher, self._module, "--address", str(self._folder), *more
        # Ctrl-C in a terminal reaches the web process alone, which then ends the engine in order. The session stays
        # the web process's: Linux divides cores between sessions first, which starved one of the two for half a
        # second where other processes took all cores (docs/decisions/0056-playback-delay.md).
        self._process = await child_process.start(*words, stderr=STDOUT, process_group=0)
        self._watching = asyncio.create_task(self._watch(self._process, self._ipc), name="engine-watch")

    async def _until_ready(self, ipc: EngineClient) -> Ready:
        async with contextlib.aclosing(ipc.events()) as events:
            event = await anext(events, None)
        if isinstance(event, Ready):
            return event
        if isinstance(event, Failed) and await self.wait() == EXIT_CONFIG:
            raise ConfigError(event.reason)
        reason = event.reason if isinstance(event, Failed) else f"the engine sent {event!r:.80} before Ready"
        raise EngineFailure(reason if self._silent else f"the engine did not start: {reason}")

    async def _watch(self, process: Process, ipc: EngineClient) -> int:
        """Forward the engine's output until the process ends, then mark the IPC socket as ended, with the reason."""
        assert process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        while data := await process.stdout.read(8192):
            self._written += len(data)
            text = decoder.decode(data)
            if self._config.serve.log_format == "text" and sys.stderr is not None:  # it may be closed
                with contextlib.suppress(OSError):  # nobody reads our own standard error: go on keeping the last lines
                    sys.stderr.write(text)
                    sys.stderr.flush()
            *lines, rest = _LINE_END.split(rest + text)
            self._keep_lines(lines)
            rest = rest[-_LINE_CHARACTERS:]
        self._keep_lines([rest])
        code = await process.wait()
        output = "".join(f"\n  {line[:_LINE_CHARACTERS]}" for line in self._last_lines)
        wrote = f"; the last it wrote:{output}" if output else "; it wrote nothing"
        ipc.end(None if self._stopping else Failed(self._end_reason(code) + wrote))
        return code

    def _end_reason(self, code: int) -> str:
        if not self._silent:
            return f"the engine ended {name_exit(code)}"
        limit = f"for {self._silence_limit_s:g} s"
        if self._ready is None:
            return f"the engine said nothing {limit} while it was loading"
        more = "a machine so slow needs a larger model.watchdog_s"
        return f"the engine hung: it said nothing {limit}, and was ended ({more})"

    async def _kill_when_silent(self) -> None:
        """Kill the engine once nothing has come from it for `_silence_limit_s`: no message, and while it loads no
        output. Counts looks, not time: the process may not have run in between."""
        assert self._process is not None and self._ipc is not None
        last, silent = (0, 0), 0
        while silent < _LOOKS:
            await _pause(self._silence_limit_s / _LOOKS)
            heard = self._ipc.heard, self._written if self._ready is None else 0
            last, silent = heard, silent + 1 if heard == last else 0
        self._silent = True
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self._process.kill()

    def _keep_lines(self, lines: list[str]) -> None:
        """Keep the last lines of output for the failure reason, and log them where the log is JSON. Mutates: self."""
        for line in filter(str.strip, lines):
            self._last_lines.append(line)
            if self._config.serve.log_format == "json":
                output_log.info("%s", line)

    async def wait(self) -> int:
        """Wait until the engine process has ended, for whatever reason; returns its exit code (negative: a signal)."""
        assert self._watching is not None, "start the engine first"
        return await asyncio.shield(self._watching)

    async def stop(self) -> None:
        """End the engine, gently and then by force; removes what `start` made. May be called at any time, and again."""
        self._stopping = True
        if self._silence_watch is not None:
            self._silence_watch.cancel()
        if self._start_pipe is not None:
            # Ends a spare that nobody told, which may have outlived its launcher and then holds our pipes open.
            os.close(self._start_pipe)
            self._start_pipe = None
        process, ipc = self._process, self._ipc
        if process is not None and self._watching is not None:
            try:
                async with asyncio.timeout(self._stop_limit_s):
                    if self._ready is not None and ipc is not None and process.returncode is None:
                        await ipc.send(Shutdown())
                    elif process.returncode is None:
                        process.terminate()
                    await self.wait()
            except (TimeoutError, EngineFailure, ProcessLookupError):
                if process.returncode is None:
                    process.kill()
                await self.wait()
        if ipc is not None:
            ipc.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)
