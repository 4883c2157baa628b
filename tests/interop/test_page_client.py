"""The page's client, run by Node: what it makes of the server's `Link` header."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from starlette.responses import Response

from streamdiff.config import IceServer
from streamdiff.server.routes.whep import with_links

pytestmark = [pytest.mark.interop, pytest.mark.node]

CLIENT = Path(__file__).parents[2] / "streamdiff" / "server" / "static" / "client.js"
SCRIPT = """
import { readFileSync } from "node:fs";
const source = readFileSync(process.argv[1], "utf8");
const client = await import(`data:text/javascript,${encodeURIComponent(source)}`);
console.log(JSON.stringify(client.parseIceServers(process.argv[2])));
"""


def _parsed(header: str) -> list[dict[str, str]]:
    words = ["node", "--input-type=module", "-e", SCRIPT, "--", str(CLIENT), header]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert isinstance(found, list)
    return found


def test_the_page_reads_the_servers_that_the_server_names() -> None:
    servers = [
        IceServer(url="stun:stun.example:3478"),
        IceServer(url="turn:turn.example:3478?transport=udp", username="ann", credential="s3;cr,et="),
    ]
    headers = with_links(Response(), servers).headers.getlist("Link")
    assert len(headers) == 2
    assert _parsed(", ".join(headers)) == [  # as a browser gives them
        {"urls": "stun:stun.example:3478"},
        {"urls": "turn:turn.example:3478?transport=udp", "username": "ann", "credential": "s3;cr,et="},
    ]


def test_no_servers_and_other_links_are_no_servers() -> None:
    assert "Link" not in with_links(Response(), []).headers
    assert _parsed("") == []
    assert _parsed('<https://example.org/>; rel="help"') == []
