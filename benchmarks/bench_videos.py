"""Any server of OpenAI's video API under load: how soon does it take a request, make the video, and hand it over?

Requests come in an open loop at a rate, in times that a seed draws, or all at once (`--request-rate inf`); at most
`--max-concurrency` are on their way, and waiting for that counts as waiting. `--slo` says what is good. Servers differ:
`completed` or `succeeded`, a `content` that is not there yet (404 or 409 with Retry-After), statuses of their own.

    python -m benchmarks.bench_videos --base-url http://127.0.0.1:8000/v1
    python -m benchmarks.bench_videos --request-rate 0.2 --num-prompts 20 --seconds 2 --slo total=15 --out mine.json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
from tqdm import tqdm

from benchmarks import report, slo
from benchmarks.slo import PROMPTS, Video
from streamdiff import clock

OK, WRONG, USAGE = 0, 1, 2
KEY = "OPENAI_API_KEY"


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


def times_s(count: int, rate: float, seed: int) -> list[float]:
    """When each of so many requests comes, in seconds; all at once where `rate`, requests per second, is infinite."""
    if math.isinf(rate):
        return [0.0] * count
    gaps, found, at_s = Random(f"videos {seed}"), list[float](), 0.0
    for _ in range(count):
        found.append(at_s)
        at_s += gaps.expovariate(rate)
    return found


def prompts_of(path: Path | None) -> list[str]:
    """A prompt a line, or some of our own.

    Raises:
        ValueError: the file cannot be read, or has none.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path.name} cannot be read: {error}") from error
    if not (found := [line for line in lines if line]):
        raise ValueError(f"--prompts {path.name} has no prompt; give one a line")
    return found


def body_of(options: argparse.Namespace, prompts: Sequence[str], number: int) -> dict[str, Any]:
    """What request `number` says; nothing that was not asked for."""
    given = {"model": options.model, "size": options.size, "seconds": options.seconds}
    return {"prompt": prompts[number % len(prompts)], "seed": options.seed + number} | {
        name: value for name, value in given.items() if value is not None
    }


async def drive(options: argparse.Namespace, prompts: Sequence[str]) -> tuple[list[Video], float]:
    """Warm up, then send all requests; what became of each, and how many seconds it took in all."""
    key = os.environ.get(KEY, "any")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(60.0, pool=None), limits=limits, headers={"Authorization": f"Bearer {key}"}
    ) as http:
        client = VideoClient(http, options.base_url.rstrip("/"), options.poll, options.timeout)
        for number in range(options.warmup):
            warm = await client.make(body_of(options, prompts, options.num_prompts + number), retry_submit=True)
            if warm.error:
                raise ValueError(f"the warm-up's request {number + 1} ended with {warm.error!r}; nothing is measured")
        places = asyncio.Semaphore(options.max_concurrency or options.num_prompts)
        begun_s = clock.monotonic_s()
        with tqdm(total=options.num_prompts, desc="videos", dynamic_ncols=True) as bar:

            async def one(number: int, at_s: float) -> Video:
                await asyncio.sleep(max(0.0, begun_s + at_s - clock.monotonic_s()))
                due_s = clock.monotonic_s()
                async with places:
                    video = await client.make(body_of(options, prompts, number))
                if video.submit_s is not None:
                    video.submit_s += video.at_s - due_s
                video.at_s = due_s
                bar.update()
                return video

            arrivals = times_s(options.num_prompts, options.request_rate, options.seed)
            videos = await asyncio.gather(*(one(number, at_s) for number, at_s in enumerate(arrivals)))
        return list(videos), clock.monotonic_s() - begun_s


def table(found: Mapping[str, Any]) -> str:
    """The figures for people."""
    rows: list[dict[str, report.Value]] = []
    for name in slo.VIDEO_LIMITS:
        rows.append({"seconds": name, **found[f"{name}_s"]})
    counts = {name: found[name] for name in ("videos", "completed", "served_well", "per_minute", "goodput_per_minute")}
    lines = [report.table(rows), "", report.table([counts])]
    for kind in ("errors", "broken"):
        if found[kind]:
            lines.append(f"{kind}: " + ", ".join(f"{name}: {count}" for name, count in sorted(found[kind].items())))
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_videos",
        description=__doc__,
        epilog=f"The API key is taken from {KEY}. Only its use stands in requests, never in results.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="before /videos (default %(default)s)")
    add("--model", help="its name there (default: the server's choice)")
    add(
        "--request-rate", type=float, default=math.inf, metavar="N", help="requests a second (default inf: all at once)"
    )
    add("--max-concurrency", type=int, metavar="N", help="on their way at once, at most (default: all)")
    add("--num-prompts", type=int, default=10, metavar="N", help="requests that count (default 10)")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line, taken in turns (default: five of our own)")
    add("--warmup", type=int, default=1, metavar="N", help="requests before, one by one, not counted (default 1)")
    add("--slo", default="", metavar="LIMITS", help=f"as total=30,submit=1; of {', '.join(slo.VIDEO_LIMITS)}")
    add("--seed", type=int, default=0, help="of the arrivals; request N's video has seed + N (default 0)")
    add("--size", metavar="WxH", help="of the pictures (default: the server's choice)")
    add("--seconds", metavar="S", help="of video (default: the server's choice)")
    add("--poll", type=float, default=0.5, metavar="S", help="seconds between looks (default 0.5), or as Retry-After")
    add("--timeout", type=float, default=600.0, metavar="S", help="a video is given up after so long (default 600)")
    add("--out", type=Path, metavar="FILE", help="JSON file to write")
    return made


def check(options: argparse.Namespace) -> dict[str, float]:
    """The limits of --slo. Raises ValueError for an option that cannot be."""
    for name, least in (("num_prompts", 1), ("max_concurrency", 1), ("warmup", 0), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be {least} or more")
    for name in ("request_rate", "poll", "timeout"):
        if not (value := getattr(options, name)) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}, but must be above 0")
    url = urlsplit(options.base_url)
    if url.scheme not in ("http", "https") or not url.hostname or url.username:
        raise ValueError(f"--base-url is {options.base_url!r}; give http://HOST:PORT/v1, and a key in {KEY}")
    return slo.parse(options.slo, slo.VIDEO_LIMITS) if options.slo else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON; the exit code says whether every video was made."""
    options = parser().parse_args(argv)
    try:
        limits, prompts = check(options), prompts_of(options.prompts)
        head = report.header(
            ["benchmarks.bench_videos", *argv] if argv is not None else None,
            warm_up=f"{options.warmup} videos, one after the other",
        )
        videos, seconds = asyncio.run(drive(options, prompts))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    found = slo.video_figures(videos, limits, seconds)
    print(table(found))
    if options.out is not None:
        names = ("model", "max_concurrency", "num_prompts", "seed", "size", "seconds", "poll")
        settings: dict[str, report.Json] = {name: getattr(options, name) for name in names}
        rate = None if math.isinf(options.request_rate) else options.request_rate
        settings |= {"request_rate": rate, "slo": limits, "prompts": len(prompts)}
        begun_s = min(video.at_s for video in videos)
        raw = [vars(video) | {"at_s": video.at_s - begun_s} for video in videos]
        results: dict[str, report.Json] = {"figures": found, "seconds": round(seconds, 3), "requests": raw}
        report.write_json(options.out, head, results, benchmark="bench_videos", settings=settings)
        print(f"written: {report.public_path(str(options.out.resolve()))}")
    return OK if not any(video.error for video in videos) else WRONG


if __name__ == "__main__":
    sys.exit(main())
