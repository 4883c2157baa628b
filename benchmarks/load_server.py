"""A running server under load: live visitors over its API and WebRTC, and jobs over `/v1/videos`.

A visitor opens a session, watches it as an aiortc peer that takes every packet but decodes nothing, hears on its data
channel how many frames were shown (twice a second) and when each of its prompts was, and ends the session.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiortc import InvalidStateError, RTCDataChannel, RTCPeerConnection

from benchmarks import peers
from benchmarks.arrivals import JobArrival, Visitor
from benchmarks.slo import Video, Visit
from benchmarks.video_client import VideoClient
from streamdiff import clock

LIMIT_S = 60.0
"""An answer that takes longer is no answer."""
_ERRORS = (httpx.HTTPError, RuntimeError, ConnectionError, InvalidStateError, ValueError)
"""What a server and a line can do to a visitor; ValueError: an answer that is no JSON."""


@dataclass(eq=False)
class _Viewer:
    """The end of one visitor's data channel: what it hears goes into `visit`."""

    visit: Visit
    asked_s: dict[str, float] = field(default_factory=dict)  # prompts that were not seen yet, by id
    channel: asyncio.Future[RTCDataChannel] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def hear(self, text: str) -> None:
        """The server said something. Mutates: self."""
        message, now_s = json.loads(text), clock.monotonic_s()
        if message["type"] == "stats" and message["frame"] >= 0:
            self.visit.looks.append((now_s, message["frame"] + 1))
        seen = message["type"] == "receipt" and message["stage"] in ("shown", "superseded")
        if seen and (asked_s := self.asked_s.pop(message["id"], None)) is not None:
            self.visit.controls.append(now_s - asked_s)

    async def say(self, id: str, prompt: str) -> None:
        """Ask for another prompt, as soon as there is a line; it counts from now on. Mutates: self."""
        self.asked_s[id] = clock.monotonic_s()
        channel = await asyncio.shield(self.channel)  # a visit that ends meanwhile must not end it
        channel.send(json.dumps({"type": "prompt", "id": id, "prompt": prompt, "switch": "keep"}))

    def give_up(self) -> None:
        """Prompts that were not seen took longer than until now. Mutates: self."""
        now_s = clock.monotonic_s()
        self.visit.controls += [now_s - asked_s for asked_s in self.asked_s.values()]


class LoadedServer:
    """The server at `url`, which makes `fps` frames a second for each visitor."""

    def __init__(self, http: httpx.AsyncClient, url: str, fps: float) -> None:
        self._http, self._url, self._fps = http, url, fps

    async def run(self, visitors: Sequence[Visitor], jobs: Sequence[JobArrival]) -> tuple[list[Visit], list[Video]]:
        """Let them come, until the last visitor has left; what became of them, in the same order, with times from the
        run's beginning. Jobs that are not done then are deleted, and have no end."""
        zero_s = clock.monotonic_s()
        videos = [Video(job.at_s) for job in jobs]
        making = [asyncio.create_task(self._job(job, zero_s, videos, n)) for n, job in enumerate(jobs)]
        visits = await asyncio.gather(*(self._visit(visitor, zero_s) for visitor in visitors))
        for task in making:
            task.cancel()
        for ended in await asyncio.gather(*making, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return list(visits), videos

    async def _job(self, job: JobArrival, zero_s: float, videos: list[Video], number: int) -> None:
        """Mutates: videos, at `number`."""
        await _until(zero_s + job.at_s)
        body = {"prompt": visitor_prompt(job.seed), "seed": job.seed, "seconds": job.seconds, "fps": self._fps}
        video = await VideoClient(self._http, f"{self._url}v1").make(body, retry_submit=True)
        video.at_s -= zero_s
        videos[number] = video

    async def _visit(self, visitor: Visitor, zero_s: float) -> Visit:
        await _until(zero_s + visitor.at_s)
        leaves_s = zero_s + visitor.leaves_s
        visit = Visit(clock.monotonic_s(), leaves_s)
        session: dict[str, Any] = {}
        pc: RTCPeerConnection | None = None
        seen, viewer = peers.Seen(), _Viewer(visit)
        try:
            session = await self._open(visitor, visit)  # also after its time: else nobody would end what was opened
            async with asyncio.timeout_at(_loop_s(leaves_s)):
                if session:
                    url = self._url.rstrip("/") + session["whep"]
                    token = session["control_token"]
                    pc, seen = await peers.watch(
                        self._http, url, False, hear=viewer.hear, opened=viewer.channel.set_result, token=token
                    )
                    await self._stay(visitor, viewer, zero_s)
        except TimeoutError:
            pass  # left: before there was anything to see, or at the end
        except _ERRORS as error:
            visit.refused = f"error: {type(error).__name__}"
        await _until(leaves_s)
        viewer.give_up()
        if seen.first_s is not None:
            visit.first_frame_s = seen.first_s - visit.at_s
        visit.received = seen.frames
        if pc is not None:
            await pc.close()
        if session:
            await self._end(session, visit)
        visit.at_s -= zero_s
        visit.leaves_s -= zero_s
        visit.looks = [(at_s - zero_s, frames) for at_s, frames in visit.looks]
        return visit

    async def _open(self, visitor: Visitor, visit: Visit) -> dict[str, Any]:
        """The session, or nothing where the server has no place. Mutates: visit."""
        body = {"prompt": visitor.prompt(0), "seed": visitor.seed, "fps": self._fps}
        answer = await self._http.post(f"{self._url}api/sessions", json=body)
        reply: dict[str, Any] = answer.json()
        if answer.status_code != 201:
            visit.refused = str(reply.get("code", f"http {answer.status_code}"))
            return {}
        return reply

    async def _stay(self, visitor: Visitor, viewer: _Viewer, zero_s: float) -> None:
        for number, after_s in enumerate(visitor.prompts_s, start=1):
            await _until(zero_s + visitor.at_s + after_s)
            await viewer.say(f"p{number}", visitor.prompt(number))
        await _until(zero_s + visitor.leaves_s)

    async def _end(self, session: dict[str, Any], visit: Visit) -> None:
        """Mutates: visit, where the server does not end it."""
        url, shown = f"{self._url}api/sessions/{session['id']}", peers.bearer(session["control_token"])
        try:
            answer = await self._http.delete(url, headers=shown)
        except httpx.HTTPError:  # it ends by itself when nobody watches
            return
        if answer.status_code != 200:
            visit.refused = visit.refused or f"error: end http {answer.status_code}"


def visitor_prompt(number: int) -> str:
    """A prompt of a job, those of visitors in turns."""
    return Visitor(0.0, 1.0, number, ()).prompt(0)


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - clock.monotonic_s()))


def _loop_s(at_s: float) -> float:
    """The event loop's time at `at_s` of our clock."""
    return asyncio.get_running_loop().time() + at_s - clock.monotonic_s()


async def run(
    url: str, fps: float, visitors: Sequence[Visitor], jobs: Sequence[JobArrival]
) -> tuple[list[Visit], list[Video]]:
    """See `LoadedServer.run`."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as http:
        return await LoadedServer(http, url, fps).run(visitors, jobs)
