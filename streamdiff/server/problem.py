"""Errors over HTTP as `application/problem+json` (RFC 9457), below /v1 as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.types import Scope

from streamdiff.errors import RequestError

MAX_TEXT = 4000
"""Characters of a text in an answer."""
PROBLEM_TYPE = "application/problem+json"
OPENAI = "/v1/"
"""Addresses below it answer in the words of OpenAI's API."""
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ProblemDocument(BaseModel):
    """An error."""

    type: str
    title: str
    status: int
    detail: str = Field(description="for people")
    code: str = Field("", description="for programs")
    field: str = Field("", description="the field at fault, or empty")


class OpenAIError(BaseModel):
    """An error, as OpenAI's clients read it."""

    message: str = Field(description="for people")
    type: str
    param: str | None = Field(description="the field at fault")
    code: str = Field(description="for programs")


DOCUMENT: dict[str, Any] = {"content": {PROBLEM_TYPE: {"schema": ProblemDocument.model_json_schema()}}}
"""A problem in the API's description."""
_OPENAI_PROPERTIES = {
    "error": OpenAIError.model_json_schema(),
    "detail": {"type": "string", "description": "the message once more"},
}
OPENAI_DOCUMENT: dict[str, Any] = {
    "application/json": {
        "schema": {"type": "object", "properties": _OPENAI_PROPERTIES, "required": ["error", "detail"]}
    }
}
"""The content of one below /v1."""


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


class Unavailable(Problem):
    """What cannot be had now, but after `retry_after_s`. `code`, of a session: `time`, `memory`, `draining`,
    `restarting` or `engine`; of a job: `queue`, `address`, `disk` (the limit of kept videos) or `storage` (the disk
    takes nothing)."""

    def __init__(self, code: str, message: str, retry_after_s: int, status: int = 503, **extra: Any) -> None:
        super().__init__(status, message, {"Retry-After": str(retry_after_s)}, code=code, **extra)


@contextmanager
def refused_as(code: str, status: int = 422) -> Iterator[None]:
    """Context manager: a RequestError that is raised inside becomes a Problem of its field, with its sentence."""
    try:
        yield
    except RequestError as error:
        raise Problem(status, f"{str(error).removesuffix('.')}.", code=code, field=error.field) from error


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
    return JSONResponse(body, problem.status, problem.headers, media_type=PROBLEM_TYPE)
