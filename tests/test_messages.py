"""What users read after a mistake: tests/messages.txt has what they do, and the answer below it.

    $ streamdiff ...      a command line, in a folder with a few wrong files: the exit status and what is printed
    yaml ...              a configuration file with that text
    >>> ...               an expression in Python, where `given` is a session that paints
    POST /api/... BODY    a request to a running server (or GET, PATCH, DELETE): status, field, code, sentence

To add a case, write its first line. `python -m tests.test_messages` asks everything again and writes the file, which is
then read by eye. Other tests assert an error's type, `field` and `code`, never its words.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import streamdiff
from streamdiff.api import StreamSession
from streamdiff.cli import main
from streamdiff.config import Config, ServeConfig
from streamdiff.config_file import load
from streamdiff.errors import StreamdiffError
from tests.engine.painted import PaintedPipeline
from tests.server.conftest import Site, open_site

FILE = Path(__file__).with_name("messages.txt")
KINDS = ("$ streamdiff", "yaml", ">>>", "POST", "GET", "PATCH", "DELETE")
REQUESTS = KINDS[3:]


def read() -> dict[str, str]:
    """The answer to each line."""
    found: dict[str, list[str]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith(tuple(f"{kind} " for kind in KINDS)):
            found[line] = answer = []
        elif line and not line.startswith("#"):
            answer.append(line.strip())
    return {asked: "\n".join(answer) for asked, answer in found.items()}


def marked(kind: object, field: str | None, code: str | None, sentence: object) -> str:
    marks = ", ".join(f"{name} {value}" for name, value in (("field", field), ("code", code)) if value)
    return f"{kind} ({marks}): {sentence}" if marks else f"{kind}: {sentence}"


def answer(asked: str) -> str:
    """What is said to a command line, a file or an expression."""
    try:
        if asked.startswith("$"):
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                status = main.main(shlex.split(asked)[2:])
            return f"[{status}] {out.getvalue().strip()}"
        if asked.startswith("yaml"):
            Path("config.yaml").write_bytes(asked[5:].encode().decode("unicode_escape").encode())
            load(Path("config.yaml"))
        else:
            with StreamSession(PaintedPipeline(), "red", seed=5) as given:
                eval(asked[4:], {"streamdiff": streamdiff, "np": np, "given": given})
    except StreamdiffError as error:
        return marked(type(error).__name__, error.field, error.code, error)
    return "no error"


async def response(site: Site, asked: str) -> str:
    method, path, *body = asked.split(" ", 2)
    kind = "application/sdp" if path.startswith("/wh") else "application/json"
    sent = await site.http.request(method, path, content="".join(body), headers={"Content-Type": kind} if body else {})
    told = sent.json()
    if "error" in told:  # below /v1
        told |= {"field": told["error"]["param"], "code": told["error"]["code"]}
    return marked(sent.status_code, told.get("field"), told.get("code"), told.get("detail", "no error"))


def answers(asked: list[str]) -> dict[str, str]:
    """The answers to all lines, in a folder of their own."""
    before, found = Path.cwd(), {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_wrong_files()
            there = sorted(Path(folder).iterdir())
            found = {each: answer(each) for each in asked if not each.startswith(REQUESTS)}
            assert sorted(Path(folder).iterdir()) in (there, sorted([*there, Path(folder, "config.yaml")]))

            async def ask() -> None:
                async with open_site(Config(serve=ServeConfig(jobs_dir=f"{folder}/jobs"))) as site:
                    found.update({each: await response(site, each) for each in asked if each.startswith(REQUESTS)})

            if any(each.startswith(REQUESTS) for each in asked):
                asyncio.run(ask())
        finally:
            os.chdir(before)
        return {each: clean(found[each].replace(folder, "FOLDER")) for each in asked}


def write_wrong_files() -> None:
    """Into this folder."""
    Path("notes.txt").write_text("a blue star\n")
    Path("empty.txt").write_text("\n")
    Path("text.safetensors").write_text("no tensors are in here, only words")
    Path("empty.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    save_file({"x": np.zeros(1, np.float32)}, "other.safetensors")
    save_file({"latents": np.zeros((1, 1, 2, 2), np.float32)}, "latents.safetensors")
    save_file({"latents": np.full((16, 2, 2, 2), np.nan, np.float32)}, "nan.safetensors")
    save_file({"latents": np.zeros((16, 1, 2, 2), np.float32)}, "right.safetensors")
    for name, shape, value in (("bytes", (3, 4, 16, 16), 255), ("grey", (1, 4, 16, 16), 0), ("odd", (3, 4, 16, 20), 0)):
        save_file({"video": np.full(shape, value, np.float32)}, f"{name}.safetensors")
    save_file({"blocks.0.self_attn.q.lora_A.weight": np.ones((2, 2), np.float32)}, "style.safetensors")
    Path("cut.safetensors").write_bytes(Path("latents.safetensors").read_bytes()[:-4])
    Path("page.safetensors").write_text("<!DOCTYPE html><title>Sign in</title>")
    Path("pointer.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    Path("there.mp4").write_bytes(b"")
    wrong = {"brace": "{", "list": '{"prompt": "x"}\n[1]', "deep": 100_000 * "[", "without": "{}"}
    wrong |= {"misspelt": '{"prompt": "x", "sed": 1}', "avi": '{"prompt": "x", "output": "x.avi"}'}
    for name, text in wrong.items():
        Path(f"{name}.jsonl").write_text(text)


def clean(text: str) -> str:
    """Without what differs from run to run."""
    return re.sub(r"\bs-[\w-]{8,}", "SESSION", "\n".join(line.strip() for line in text.splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:3], REQUESTS], ids=["commands", "files and calls", "requests"])
def test_messages_are_those_that_were_read(kinds: tuple[str, ...]) -> None:
    expected = {asked: said for asked, said in read().items() if asked.startswith(kinds)}
    assert len(expected) > 20
    assert answers(list(expected)) == expected, "read them again after `python -m tests.test_messages`"


def lines(found: dict[str, str]) -> Iterator[str]:
    """The file, with comments and blank lines where they are."""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line in found:
            yield line
            yield from (f"    {each}" for each in found[line].splitlines())
        elif not line or line.startswith("#"):
            yield line


if __name__ == "__main__":
    sys.exit(FILE.write_text("\n".join(lines(answers(list(read())))) + "\n", encoding="utf-8") == 0)
