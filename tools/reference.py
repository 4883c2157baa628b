#!/usr/bin/env python3
"""Writes the reference pages: docs/settings.md from the fields of `streamdiff.config`, every setting with its flag,
default and limits; and docs/api.md from the server's OpenAPI description, every operation with its fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamdiff.cli.parser import SETTINGS, fields
from streamdiff.config import Config
from streamdiff.config_file import section_of
from streamdiff.server.app import create_app

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Settings

Made by `make reference` from `streamdiff/config.py`; a test fails when it is out of date.

A setting stands in a YAML file (`--config FILE`, see `configs/`) as `section: {key: value}`. Those with an option can
be typed, and win over the file. Those of the section `model` are also the keyword arguments of `streamdiff.open`,
`load`, `stream` and `run_worker`, where `name` is called `model`. An unknown key is refused, and the nearest known one
is named.
"""


_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "an object",
}
SAFE_INTEGER = 2**53 - 1
_LIMITS = {"minimum": "{:,} or more", "exclusiveMinimum": "more than {:,}", "maximum": "at most {:,}"}


def allowed(schema: dict[str, Any]) -> str:
    """What a setting takes, in words, from pydantic's JSON schema of it."""
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if parts := [part for part in schema.get("anyOf", ()) if part.get("type") != "null"]:
        return " or ".join(dict.fromkeys(map(allowed, parts)))
    bounds = {
        name: int(schema[name]) if schema[name] == int(schema[name]) else schema[name]
        for name in _LIMITS
        if name in schema
    }
    limits = " and ".join(_LIMITS[name].format(bound) for name, bound in bounds.items() if abs(bound) < SAFE_INTEGER)
    return _TYPES.get(schema.get("type", ""), "a list") + (f": {limits}" if limits else "")


def table() -> str:
    """The page's text."""
    lines = [HEAD]
    for section in Config.model_fields:
        about = (section_of(section).__doc__ or "").strip().splitlines()[0]
        schemas = section_of(section).model_json_schema()["properties"]
        lines += [f"## {section}", "", about, "", "| key | option | default | value |  |", "|---|---|---|---|---|"]
        for key, field, _ in fields():
            if key.startswith(section + "."):
                option = f"`{', '.join(SETTINGS[key].flag.split())}`" if key in SETTINGS else ""
                default = "" if field.default is None or field.default in ([], ()) else f"{field.default}"
                about = " ".join((field.description or "").split()).replace("|", "\\|")
                cells = (f"`{key}`", option, default, allowed(schemas[key.split(".")[1]]), about)
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


API_HEAD = """# API reference

Made by `make reference` from the routes and models of `streamdiff/server/routes/`; a test fails when it is out of date.
A running server has the whole description at `/api/openapi.json`. [HTTP API](serving.md) explains what the operations
do, [jobs](jobs.md) those of `/v1`.

*Token*: `watch`, a token to watch or to control; `steer`, one to control. Without tokens everybody whom the server
answers may do both.
"""


def api() -> str:
    """The text of the page on the API."""
    paths = create_app(Config()).openapi()["paths"]
    lines = [API_HEAD, "| operation |  | token | answers |", "|---|---|---|---|"]
    bodies: list[str] = []
    for path, operations in paths.items():
        for method, operation in operations.items():
            name = f"{method.upper()} {path}"
            token = " or ".join(each["token"][0] if each else "none" for each in operation["security"]) or "none"
            lines.append(
                f"| `{name}` | {operation['summary']} | {token} | {', '.join(sorted(operation['responses']))} |"
            )
            bodies += _body(name, operation.get("requestBody", {}).get("content", {}).get("application/json", {}))
    return "\n".join([*lines, "", "## Bodies", "", *bodies])


def _body(name: str, content: dict[str, Any]) -> Iterator[str]:
    """The fields of a JSON body, or of each that it may be."""
    schema = content.get("schema", {})
    for each in schema.get("oneOf", [schema]):
        if not (known := each.get("properties")):
            continue
        kind = "/".join(known.get("type", {}).get("enum", [known.get("type", {}).get("const", "")]))
        about = f"`{kind}`: {each['description'].splitlines()[0]}" if kind else ""
        yield from (
            f"### {name} {kind}".rstrip(),
            "",
            *([about, ""] if about else []),
            "| field | value |  |",
            "|---|---|---|",
        )
        for field, facts in known.items():
            if field != "type":
                needed = "" if field not in each.get("required", ()) else ", needed"
                yield f"| `{field}` | {allowed(facts)}{needed} | {facts.get('description', '')} |"
        yield ""


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(table(), encoding="utf-8")
    (DOCS / "api.md").write_text(api(), encoding="utf-8")
