"""What the package imports is what pyproject.toml asks for, and nothing is asked for in vain."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

from tests.rules.source import ROOT, imports, modules

pytestmark = pytest.mark.xdist_group("source rules")

# Where the name to install and the name to import differ.
IMPORT_NAMES = {
    "huggingface-hub": "huggingface_hub",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
# Comes with another one of ours by contract: a part of it, not a choice of its own.
COMES_WITH = {"starlette": "fastapi", "annotated_types": "pydantic", "pydantic_core": "pydantic", "h11": "uvicorn"}
COMES_WITH |= {"anyio": "httpx"}
# Needed at run time by a library that we call, though we do not import it ourselves.
INDIRECT: dict[str, str] = {
    "python-multipart": "starlette reads forms with it",
    "wsproto": "uvicorn speaks WebSocket with it",
}


def declared(extra: str = "") -> set[str]:
    """Import names of the runtime dependencies, or of those that come with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    names = [re.split(r"[<>=!~ \[;]", requirement)[0].lower() for requirement in wanted]
    return {IMPORT_NAMES.get(name, name) for name in names}


def imported() -> dict[str, str]:
    """Third-party top-level names the package imports, each with one place."""
    found = {}
    for module in modules():
        for line, name in imports(module):
            top = name.split(".")[0]
            if top and top != "streamdiff" and top not in sys.stdlib_module_names:
                found[top] = f"{module.place}:{line}"
    return found


@pytest.mark.slow
def test_every_import_is_declared() -> None:
    known = declared().union(*map(declared, ("plot", "quantize", "client", "gguf", "mcp", "stage")))
    missing = {name: place for name, place in imported().items() if COMES_WITH.get(name, name) not in known}
    assert not missing, f"imported but not in pyproject.toml: {missing}"


@pytest.mark.slow
def test_every_dependency_is_imported() -> None:
    unused = declared() - set(imported()) - set(INDIRECT)
    assert not unused, f"in pyproject.toml but never imported: {sorted(unused)}"
