"""`streamdiff mcp` as an assistant has it: by the SDK's own client over standard input and output, before a server."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from mcp import Client, StdioServerParameters
from PIL import Image

from streamdiff.cli import main
from tests.server.scripted import COLOURS
from tests.server.test_restart import ROOT, serving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


async def test_an_assistant_opens_steers_looks_records_and_closes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-to-steer-with")
    async with serving("--name", "steered", "--control-token-file", str(token)) as (_, http):
        http.headers["Authorization"] = "Bearer a-token-to-steer-with"
        command = ["-m", "streamdiff", "mcp", "--url", str(http.base_url), "--token-file", str(token)]
        program = StdioServerParameters(
            command=sys.executable, args=[*command, "--folder", str(tmp_path)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
        )
        async with Client(program) as assistant:

            async def call(tool: str, **given: Any) -> Any:
                answer = await assistant.call_tool(tool, given)
                content = answer.content[0]
                return answer.is_error, content.data if content.type == "image" else content.text

            tools = {tool.name: tool for tool in (await assistant.list_tools()).tools}
            assert tools.keys() == {"open", "join", "prompt", "control", "look", "timeline", "record", "close"}
            opened = json.loads((await call("open", prompt="a red circle"))[1])
            stream = {"stream": opened["stream"]}
            assert [each["name"] for each in opened["controls"]] == ["move_x", "jump"]
            failed, text = await call("prompt", **stream, prompt="a blue star")
            assert not failed and json.loads(text)["stage"] == "shown"
            failed, picture = await call("look", **stream)
            with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
                assert np.abs(np.asarray(image)[:16, :16].mean((0, 1)) - COLOURS["blue"]).max() < 40
            failed, text = await call("control", **stream, values={"move_x": 1}, seconds=0.1)
            assert json.loads(text)["stage"] == "shown"
            failed, text = await call("control", **stream, values={"fly": 1})
            assert failed and "move_x" in text, "the assistant reads what there is"
            assert await call("timeline", **stream, changes=[]) == (False, "0 changes are to come.")
            av.open((await call("record", **stream, seconds=1))[1]).close()
            assert (await call("look", stream="s-none"))[0]
            assert not (await call("join"))[0], "the server's own session"
            await call("close", **stream)
            sessions = (await http.get("/api/sessions")).json()["sessions"]
            assert [each["id"] for each in sessions] == ["default"]


@pytest.mark.parametrize(
    ("words", "missing", "named"),
    [
        ("mcp", "mcp.server.mcpserver", "pip install 'streamdiff[mcp]'"),
        ("osc", "pythonosc.osc_server", "pip install 'streamdiff[stage]'"),
        ("osc --listen 9000", "", "HOST:PORT"),
        ("mcp --token-file none", "", "none cannot be read"),
    ],
)
def test_what_is_missing_is_named(
    words: str, missing: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main.main(words.split()) == main.USER_ERROR
    assert named in capsys.readouterr().err
