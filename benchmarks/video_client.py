"""One video asked for over OpenAI's video API: submitted, looked at until it has ended, downloaded. For benchmarks.

Takes what servers of several houses answer: `completed` or `succeeded`, a `content` that is not there yet (404 or 409
with Retry-After), 429 and 503 with Retry-After, statuses that this does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.slo import Video
from streamdiff import clock

DONE, BAD = ("completed", "succeeded"), ("failed", "cancelled", "canceled", "expired", "error")
NOT_YET, BUSY = (404, 409, 425), (429, 503)
LONGEST_WAIT_S = 10.0


@dataclass(frozen=True)
class VideoClient:
    """`url` ends before `/videos`. A video that is not there after `limit_s` is given up and deleted."""

    http: httpx.AsyncClient
    url: str
    poll_s: float = 0.5
    limit_s: float = 600.0

    async def make(self, body: Mapping[str, Any], retry_submit: bool = False) -> Video:
        """Have one made; never raises for what the server does, which is told in the record's `error`:

        - `http NNN`: an answer of this status to the request, while waiting or to the download;
        - `failed`: the server says that the video has failed;
        - `empty`: a download without a byte; `answer`: one that is no JSON object with an id or a status;
        - `timeout`: not there within `limit_s`; `connection`: the line broke, or the server was not there.

        With `retry_submit` a full queue (429, 503) is waited for, as it says, and the wait counts.
        """
        begun_s = clock.monotonic_s()
        video, made = Video(begun_s), _Made()
        try:
            async with asyncio.timeout(self.limit_s):
                await self._make(body, video, made, retry_submit)
        except (TimeoutError, httpx.TimeoutException):
            video.error = "timeout"
            await self._delete(made)
        except httpx.HTTPError:
            video.error = "connection"
        except _Unexpected as unexpected:
            video.error = str(unexpected)
        except asyncio.CancelledError:
            await self._delete(made)
            raise
        return video

    async def _make(self, body: Mapping[str, Any], video: Video, made: _Made, retry_submit: bool) -> None:
        answer = await self.http.post(f"{self.url}/videos", json=dict(body))
        while retry_submit and answer.status_code in BUSY:
            await asyncio.sleep(_retry_s(answer, 1.0))
            answer = await self.http.post(f"{self.url}/videos", json=dict(body))
        reply = _reply(answer)
        made.id = _text(reply, "id")
        video.submit_s = clock.monotonic_s() - video.at_s
        while _text(reply, "status") not in DONE:
            if _text(reply, "status") in BAD:
                raise _Unexpected("failed")
            await asyncio.sleep(_retry_s(answer, self.poll_s))
            answer = await self.http.get(f"{self.url}/videos/{made.id}")
            reply = reply if answer.status_code in BUSY else _reply(answer)
        video.wait_s = clock.monotonic_s() - video.at_s - video.submit_s
        video.bytes = await self._download(made.id)
        if not video.bytes:
            raise _Unexpected("empty")
        video.download_s = clock.monotonic_s() - video.at_s - video.submit_s - video.wait_s

    async def _download(self, id: str) -> int:
        """Bytes of the video, which is not kept."""
        while True:
            async with self.http.stream("GET", f"{self.url}/videos/{id}/content", follow_redirects=True) as answer:
                later = answer.status_code in (*NOT_YET, *BUSY) and "retry-after" in answer.headers
                if not later:
                    if answer.status_code != 200:
                        raise _Unexpected(f"http {answer.status_code}")
                    return sum([len(part) async for part in answer.aiter_bytes()])
            await asyncio.sleep(_retry_s(answer, self.poll_s))

    async def _delete(self, made: _Made) -> None:
        """Let the server make nothing that nobody waits for; that it cannot be told so is no other error."""
        if made.id:
            try:
                await self.http.delete(f"{self.url}/videos/{made.id}", timeout=5.0)
            except httpx.HTTPError:
                return


@dataclass
class _Made:
    id: str = ""


class _Unexpected(Exception):
    """The server did something else than make a video; says in a word what."""


def _reply(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code not in (200, 201, 202):
        raise _Unexpected(f"http {answer.status_code}")
    try:
        found = answer.json()
    except ValueError:
        raise _Unexpected("answer") from None
    if not isinstance(found, dict):
        raise _Unexpected("answer")
    return found


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise _Unexpected("answer")
    return value


def _retry_s(answer: httpx.Response, otherwise_s: float) -> float:
    """What Retry-After says, in seconds, where it says so; dates are not read."""
    found = answer.headers.get("retry-after", "")
    return min(float(found), LONGEST_WAIT_S) if found.isdecimal() else otherwise_s
