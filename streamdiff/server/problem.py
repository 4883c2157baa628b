"""Errors over HTTP as `application/problem+json` (RFC 9457). Knows nothing about what went wrong."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection, Request

DRAIN_BYTES = 1024 * 1024
DOCUMENT: dict[str, Any] = {
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string", "description": "for people"},
                    "code": {"type": "string", "description": "for programs"},
                    "field": {"type": "string", "description": "the field at fault, or empty"},
                },
                "required": ["type", "title", "status", "detail"],
            }
        }
    }
}
"""A problem in the API's description."""
Responses = dict[int | str, dict[str, Any]]


def described(**problems: str) -> Responses:
    """What an address may refuse, for the API's description: `described(s404="No such session")`."""
    return {int(name[1:]): {"description": says, **DOCUMENT} for name, says in problems.items()}


class Problem(Exception):
    """An answer other than success. `extra` goes into the body beside title, status and detail."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.extra = extra

    @property
    def code(self) -> str:
        """A word for programs; the status where there is none."""
        return str(self.extra.get("code", self.status))


def respond(problem: Problem) -> JSONResponse:
    """The response that says so."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        **problem.extra,
    }
    return JSONResponse(body, problem.status, problem.headers, media_type="application/problem+json")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body; nothing beyond the limit is kept, with or without a Content-Length.

    A little more than the limit is read and thrown away: who is still sending when the connection closes never sees
    the answer.

    Raises:
        Problem: 413.
    """
    body = bytearray()
    length = 0
    async for piece in request.stream():
        length += len(piece)
        if length <= limit_bytes:
            body += piece
        elif length > limit_bytes + DRAIN_BYTES:
            break
    if length > limit_bytes:
        message = f"The body is larger than {limit_bytes // 1024} KiB, the most this address takes."
        raise Problem(413, message, {"Connection": "close"})
    return bytes(body)


def is_own_page(request: HTTPConnection, origins: Collection[str]) -> bool:
    """Whether a request comes from no page at all, from one of this server, or from one of `origins`.

    A browser says where a page is from; without this any page could steer a server on the viewer's own machine.
    """
    origin = request.headers.get("origin")
    if origin is None or "*" in origins or origin in origins:
        return True
    return origin.partition("://")[2].lower() == request.headers.get("host", "").lower() != ""


def media_type(request: Request) -> str:
    """Content-Type without its parameters, in lower case."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()
