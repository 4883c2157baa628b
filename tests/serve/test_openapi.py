"""What the API's description promises, held against a running server: tokens, statuses, content types, bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamdiff.config import Config, ServeConfig
from tests.serve.conftest import Site, bearer, run_scene

pytestmark = pytest.mark.slow
VIEW, CONTROL = "a-token-to-watch-with", "a-token-to-steer-with"
EVERYBODY: dict[str, list[str]] = {}


def _operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, each) for path, methods in described["paths"].items() for method, each in methods.items()]


def _filled(path: str) -> str:
    """An address of this kind, of the default session and of no viewer."""
    return path.replace("{session}", "default").replace("{id}", "nobody")


def test_each_operation_says_which_token_it_needs_and_needs_it(tmp_path: Path) -> None:
    (tmp_path / "v").write_text(VIEW)
    (tmp_path / "c").write_text(CONTROL)
    serve = ServeConfig(view_token_file=str(tmp_path / "v"), control_token_file=str(tmp_path / "c"))

    async def scene(site: Site) -> None:
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

    run_scene(scene, Config(serve=serve))
