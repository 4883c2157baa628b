"""Errors over HTTP as `application/problem+json` (RFC 9457), below /v1 as OpenAI's clients read them; and reading of
bodies.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection, Request
from starlette.types import Scope

DRAIN_BYTES = 1024 * 1024
MAX_TEXT = 4000
"""Characters of a text in an answer."""


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The schema of an object that always has its `required` fields, by default all."""
    return {"type": "object", "properties": properties, "required": list(required or properties)}


_PROPERTIES: dict[str, Any] = {
    "type": {"type": "string"},
    "title": {"type": "string"},
    "status": {"type": "integer"},
    "detail": {"type": "string", "description": "for people"},
    "code": {"type": "string", "description": "for programs"},
    "field": {"type": "string", "description": "the field at fault, or empty"},
}
_SCHEMA = _object(_PROPERTIES, "type", "title", "status", "detail")
DOCUMENT: dict[str, Any] = {"content": {"application/problem+json": {"schema": _SCHEMA}}}
"""A problem in the API's description."""
Responses = dict[int | str, dict[str, Any]]
_MEANINGS = {
    400: "The body is not JSON, or no object",
    401: "This takes a token",
    403: "The token is good for watching only, or the page is of another origin",
    404: "No such session",
    409: "The session has another revision than `if_rev`",
    410: "The session has ended; `reason` says why",
    413: "The body is too large",
    415: "The body is of another type",
    422: "A field is wrong, and `field` names it, or the model has refused",
    429: "Too many requests from one address; Retry-After: when to go on",
    503: "The engine has ended or is started again; Retry-After: when to ask again",
    504: "The engine took no command in time; this one may still be carried out",
}


def problem_responses(*statuses: int, **others: str) -> Responses:
    """OpenAPI responses of the problems that a route may answer: `problem_responses(401, s404="No such viewer")`."""
    texts = {status: _MEANINGS[status] for status in statuses} | {int(key[1:]): text for key, text in others.items()}
    return {status: {"description": text, **DOCUMENT} for status, text in sorted(texts.items())}


OPENAI = "/v1/"
"""Addresses below it answer in the words of OpenAI's API."""
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_ERROR = _object(
    {
        "message": {"type": "string", "description": "for people"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "the field at fault"},
        "code": {"type": "string", "description": "for programs"},
    }
)
_OPENAI_SCHEMA = _object({"error": _OPENAI_ERROR, "detail": {"type": "string", "description": "the message once more"}})
_OPENAI_DOCUMENT: dict[str, Any] = {"content": {"application/json": {"schema": _OPENAI_SCHEMA}}}


def openai_problem_responses(**texts: str) -> Responses:
    """The same as `problem_responses` for routes below /v1: `openai_problem_responses(s404="No such video")`."""
    return {int(key[1:]): {"description": text, **_OPENAI_DOCUMENT} for key, text in texts.items()}


class Problem(Exception):
    """An error that becomes an HTTP response. `extra`: further fields of the body, such as `code` and `field`."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None, **extra: Any) -> None:
        self.status = status
        self.detail = _sendable(detail)
        self.headers = headers or {}
        self.extra = {key: _sendable(value) if isinstance(value, str) else value for key, value in extra.items()}
        super().__init__(self.detail)

    @property
    def code(self) -> str:
        """Machine-readable reason; the status where there is none."""
        return str(self.extra.get("code", self.status))


def _sendable(text: str) -> str:
    """`text` without what a stranger may have put into it that is no UTF-8 (half a surrogate pair), and not endless."""
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix below which a proxy shows the server."""
    return str(scope["path"]).removeprefix(scope.get("app_root_path", scope.get("root_path", "")))


def respond(problem: Problem, path: str = "") -> JSONResponse:
    """The HTTP response of a problem, to a request for `path`."""
    if path.startswith(OPENAI):
        kind = _OPENAI_TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
        param = problem.extra.get("field") or None
        error = {"message": problem.detail, "type": kind, "param": param, "code": problem.code}
        return JSONResponse({"error": error, "detail": problem.detail}, problem.status, problem.headers)
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
        Problem: 413; 415 for a body that is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"The body has Content-Encoding {encoding[:40]!r}; send it as it is, without one."
        raise Problem(415, message, {"Accept-Encoding": "identity"}, code="encoding")
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
