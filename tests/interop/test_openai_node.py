"""OpenAI's client for Node asks for a video: a picture as an object, a key, and again with both."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from streamdiff.server.jobs.store import DATABASE
from tests.server.jobs.test_videos import ended, making, yellow_png

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.node]
HERE = Path(__file__).parent
SCRIPT = """
import OpenAI from "openai";
const [baseURL, png] = process.argv.slice(1);
const client = new OpenAI({baseURL, apiKey: "any", maxRetries: 0});
const ids = [];
for (const user of ["somebody", "somebody", ""]) {
  const body = {prompt: "a blue star", size: "128X128", num_frames: 8, seed: -1, user, metadata: {shot: 7},
                input_reference: {image_url: `data:image/png;base64,${png}`}};
  ids.push((await client.videos.create(body, {headers: {"Idempotency-Key": "one"}})).id);
}
const model = (await client.models.retrieve("scripted")).id;
console.log(JSON.stringify({ids, model}));
"""


async def test_node_s_client_has_one_video_made_that_begins_with_its_picture(tmp_path: Path) -> None:
    async with making(tmp_path) as site:
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        command = ("node", "--input-type=module", "-e", SCRIPT, f"{site.base}/v1", yellow_png())
        node = await asyncio.create_subprocess_exec(*command, cwd=HERE, **pipes)  # type: ignore[arg-type]
        said, errors = await node.communicate()
        assert node.returncode == 0, errors.decode()
        found = json.loads(said)
        [id] = set(found["ids"])
        assert found["model"] == "scripted" and (await ended(site, id))["status"] == "completed"
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        assert database.execute("SELECT job, name FROM inputs").fetchall() == [(id, "picture")], "kept with it"
