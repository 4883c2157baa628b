"""What the API's description promises, held against a running server: tokens, statuses, content types, bodies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.config import Config
from streamdiff.engine.messages import Failed, Refused
from streamdiff.engine.process.supervisor import Restarting
from streamdiff.server.app import create_app
from streamdiff.server.routes import control, sessions
from streamdiff.server.routes.bodies import JSON
from streamdiff.server.routes.webrtc import SDP_TYPE, TRICKLE_TYPE
from streamdiff.server.sessions import manager
from streamdiff.server.sessions.live_session import OPENING
from tests.server.conftest import CONTROL, VIEW, bearer, locked, open_site

pytestmark = pytest.mark.slow
EVERYBODY: dict[str, list[str]] = {}


def _locked(folder: Path) -> Config:
    # There is enough room, for 503 is a server error to schemathesis; and sessions that it opens do not stay.
    return locked(folder, max_utilization=10.0, idle_s=1.0, jobs_dir=str(folder / "jobs"))


def _operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, each) for path, methods in described["paths"].items() for method, each in methods.items()]


def _filled(path: str) -> str:
    """An address of this kind, of the default session and of no viewer."""
    return path.replace("{session}", "default").replace("{id}", "nobody")


async def test_each_operation_says_which_token_it_needs_and_needs_it(tmp_path: Path) -> None:
    async with open_site(_locked(tmp_path)) as site:
        described = (await site.http.get("/api/openapi.json")).json()
        scheme = described["components"]["securitySchemes"]["token"]
        assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
        assert "streamdiff.token." in scheme["description"], "and how a WebSocket shows it"
        needs = set()
        for path, method, operation in _operations(described):
            said = [{"token": ["watch"]}, {"token": ["steer"]}]
            [need] = [each["token"][0] for each in operation["security"] if each in said] or ["nothing"]
            asks = need != "nothing" and EVERYBODY not in operation["security"]
            refused = {}
            for token in (None, VIEW):
                kind = next(iter(operation.get("requestBody", {}).get("content", {})), "")
                headers = bearer(token) | ({"Content-Type": kind} if kind else {})
                answer = await site.http.request(method.upper(), _filled(path), headers=headers)
                refused[token] = answer.status_code in (401, 403)
            assert refused == {None: asks, VIEW: asks and need == "steer"}, (method, path)
            needs.add((need, asks))
        assert needs == {("nothing", False), ("watch", False), ("steer", False), ("watch", True), ("steer", True)}


def test_every_error_that_is_described_is_a_problem_document_or_one_of_openai_s() -> None:
    for path, method, operation in _operations(create_app(Config()).openapi()):
        errors = {status: response for status, response in operation["responses"].items() if status >= "400"}
        kinds = {status: set(response["content"]) for status, response in errors.items()}
        if path == "/v1/videos/{id}/content":
            assert kinds.pop("416") == {"text/plain"} and "422" in kinds
        kind = "application/json" if path.startswith("/v1/") else "application/problem+json"
        assert all(each == {kind} for each in kinds.values()), (path, method, kinds)
        if path.startswith("/v1/"):
            schemas = [error["content"][kind]["schema"] for status, error in errors.items() if status != "416"]
            assert all(schema.get("required") == ["error", "detail"] for schema in schemas), (path, method)


async def test_every_method_that_is_answered_is_described_and_no_other(tmp_path: Path) -> None:
    async with open_site(_locked(tmp_path)) as site:
        described = (await site.http.get("/api/openapi.json")).json()["paths"]
        assert {"/whep", "/whep/{session}", "/whep/{session}/{id}", "/api/sessions", "/frame.jpg"} <= set(described)
        for path, methods in described.items():
            answered = {
                method
                for method in ("get", "head", "options", "post", "put", "patch", "delete")
                if (await site.http.request(method, _filled(path))).status_code != 405
            }
            as_id = {"get", "delete"} if path in ("/v1/videos/sync", "/v1/videos/generations") else set()
            assert answered == set(methods) | as_id | ({"head"} if {"get"} & (methods.keys() | as_id) else set()), path


WENT = Restarting("it was killed", 3)
REFUSED = Refused("default", OPENING, "session", "it does not fit", "memory")
ENGINES: dict[str, tuple[list[Any], str, str, str]] = {
    "hangs": ([], "running", "running", "timeout"),
    "is started again": ([WENT], "restarting", "restarting", "restarting"),
    "has not answered yet": ([WENT, "ready"], "running", "restarting", "restarting"),
    "has no memory": ([WENT, "ready", REFUSED], "running", "waiting", "memory"),
    "has failed": ([Failed("it is dead"), None], "failed", "failed", "engine"),
}
"""What is heard of an engine, its state and that of the session after that, and the code of a snapshot's refusal."""


@pytest.mark.parametrize("engine", ENGINES)
async def test_nothing_that_is_asked_fails_whatever_the_engine_does(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be had is answered 503 with a code and when to ask again, or 504 by an engine that hangs."""
    events, state, session_state, code = ENGINES[engine]
    for module, name in ((control, "ANSWER_TIMEOUT_S"), (sessions, "SAVE_TIMEOUT_S"), (manager, "OPEN_TIMEOUT_S")):
        monkeypatch.setattr(module, name, 0.2)
    async with open_site() as site:
        opened, peer = site.state.manager, await site.offer()
        bodies = {JSON: b'{"type": "prompt", "prompt": "blue"}', SDP_TYPE: peer.pc.localDescription.sdp}
        default = site.live
        with site.client.held():
            for event in events:
                await site.client.inject(site.client.ready if event == "ready" else event)
            await site.until(lambda: (opened.engine.state, default.engine.state) == (state, session_state))
            for path, method, operation in _operations((await site.http.get("/api/openapi.json")).json()):
                if (method, path) == ("delete", "/api/sessions/{session}"):
                    continue
                kind = next(iter(operation.get("requestBody", {}).get("content", {})), "")
                headers = {"Content-Type": kind} if kind else {}
                body = bodies.get(kind, b"")
                answer = await site.http.request(method, _filled(path), headers=headers, content=body)
                if answer.status_code < 500:
                    continue
                assert answer.status_code in (503, 504 if engine == "hangs" else 503), (method, path, answer.text)
                assert "retry-after" in answer.headers or answer.status_code == 504, (method, path)
                assert method == "head" or answer.json()["code"], (method, path)
            asked = await site.http.get("/api/sessions/default/snapshot")
            assert asked.json()["code"] == code


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.soak)])
async def test_what_schemathesis_thinks_of_is_answered_as_described(tmp_path: Path, examples: int) -> None:
    """Requests made from the description, so many for each operation, valid ones and others. Half of them are about the
    session that is there."""
    async with open_site(_locked(tmp_path)) as site:
        await site.until(lambda: site.state.manager.sessions[0].playback.pacer.picture() is not None)
        said = await asyncio.to_thread(_schemathesis, f"{site.base}/api/openapi.json", examples)
        assert {200, 201, 400, 404, 422} <= said, "and not only refused"


def _schemathesis(url: str, examples: int) -> set[int]:
    """Check every operation; returns the statuses that were answered."""
    import schemathesis  # takes a second, of every worker that collects tests
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as openapi

    holds = [
        checks.not_a_server_error,
        openapi.status_code_conformance,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
        openapi.negative_data_rejection,
    ]
    schemathesis.serializer.alias([SDP_TYPE, TRICKLE_TYPE], "text/plain")
    said = set()
    operations = [each.ok() for each in schemathesis.openapi.from_url(url).get_all_operations()]
    for operation in sorted(operations, key=lambda each: each.method == "delete"):  # and the default session is gone
        # What is valid is answered there when its video is made.
        waits = operation.path in ("/v1/videos/sync", "/v1/videos/generations")
        there = {"session": "default"} if "{session}" in operation.path else {}
        ways = [
            operation.as_strategy(generation_mode=mode, path_parameters=fixed, headers=bearer(CONTROL))
            for mode in ([schemathesis.GenerationMode.NEGATIVE] if waits else schemathesis.GenerationMode)
            for fixed in ({}, there)
        ]

        @settings(max_examples=examples, database=None, derandomize=True, deadline=None)
        @given(st.one_of(ways))
        def check(case: schemathesis.Case) -> None:
            response = case.call()
            said.add(response.status_code)
            case.validate_response(response, checks=holds)

        check()
    return said
