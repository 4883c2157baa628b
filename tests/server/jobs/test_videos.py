"""The video API in front of a running server: what OpenAI's own client makes of it, and what others' documents show."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import httpx
import numpy as np
import pytest
from PIL import Image

from streamdiff.config import Config, ServeConfig
from streamdiff.engine.messages import Close, Command, Open
from streamdiff.server.jobs import runner
from streamdiff.server.routes import videos
from tests.server.conftest import Site, bearer, open_site
from tests.server.scripted import COLOURS, SIZE, Painter

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")
PROMPT = "a blue star"


@contextlib.asynccontextmanager
async def making(folder: Path, painter: Painter | None = None, **serve: Any) -> AsyncIterator[Site]:
    """A server that makes videos, kept in `folder`."""
    config = Config(serve=ServeConfig(jobs_dir=str(folder), **serve))
    async with open_site(config, painter or Painter(chunk_s=0.0)) as site:
        yield site


def client_of(site: Site, key: str = "any") -> openai.AsyncOpenAI:
    import openai  # takes a second, of every worker that collects tests

    return openai.AsyncOpenAI(base_url=f"{site.base}/v1", api_key=key, max_retries=0)


def pictures_of(video: bytes) -> list[np.ndarray[Any, Any]]:
    with av.open(io.BytesIO(video)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def is_colour(picture: np.ndarray[Any, Any], name: str) -> bool:
    return bool(np.abs(picture[:64].mean((0, 1)) - COLOURS[name]).max() < 24)


async def ended(site: Site, id: str, **headers: str) -> dict[str, Any]:
    """A job as it is when it has ended."""
    async with asyncio.timeout(240):
        while True:
            video: dict[str, Any] = (await site.http.get(f"/v1/videos/{id}", headers=headers)).json()
            if video["status"] in ("completed", "failed"):
                return video
            await asyncio.sleep(0.02)


async def ask(site: Site, **body: Any) -> dict[str, Any]:
    answer = await site.http.post("/v1/videos", json={"prompt": PROMPT, "num_frames": 20} | body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def refusal(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Status, field and code of an error, which has both shapes that clients read."""
    body = answer.json()
    assert body["error"]["message"] == body["detail"] and body["error"]["type"]
    return answer.status_code, body["error"]["param"], body["error"]["code"]


async def test_a_video_whose_session_fails_says_so_and_the_next_is_made(tmp_path: Path) -> None:
    async with making(tmp_path) as site:
        bad, good = await ask(site, prompt="black"), await ask(site)
        video = await ended(site, bad["id"])
        assert video["status"] == "failed" and "the painter has no black" in video["error"]["message"]
        assert (await ended(site, good["id"]))["status"] == "completed"


@pytest.mark.slow
async def test_openai_s_client_has_a_video_made_watches_it_takes_it_and_deletes_it(tmp_path: Path) -> None:
    import openai

    async with making(tmp_path) as site, client_of(site) as client:
        [model] = [each async for each in client.models.list()]
        video = await client.videos.create_and_poll(
            model=model.id,
            prompt=PROMPT,
            seconds="1",  # type: ignore[arg-type]
            size=f"{SIZE}x{SIZE}",  # type: ignore[arg-type]
            extra_body={"fps": 20, "seed": 7, "num_inference_steps": 2},
            poll_interval_ms=50,
        )
        assert (video.status, video.progress, video.error, video.prompt) == ("completed", 100, None, PROMPT)
        assert (video.seconds, video.size, video.model) == ("1", "128x128", "scripted")
        assert video.completed_at is not None and video.expires_at == video.completed_at + 86_400
        measured = video.model_dump()
        assert 0 < measured["inference_time_s"] < 60 and measured["peak_memory_mb"] == 3.0, "the painter's 3 MiB"
        assert (await client.models.retrieve(model.id)).id == model.id
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("sora-2/pro")
        content = await client.videos.download_content(video.id)
        pictures = pictures_of(content.read())
        assert len(pictures) == 20 and all(is_colour(picture, "blue") for picture in pictures[1:])
        assert pictures[0][:20, :20].mean() > 200, "the painter's mark of fewer steps"
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
        [opened] = [each for each in site.client.sent if isinstance(each, Open) and each.background]
        assert (opened.prompt, opened.seed, opened.steps) == (PROMPT, 7, 2)
        assert Close(opened.session) in site.client.sent
        assert [each.id async for each in client.videos.list()] == [video.id]
        deleted = await client.videos.delete(video.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
        with pytest.raises(openai.NotFoundError):
            await client.videos.retrieve(video.id)
        assert not list(tmp_path.glob("*.mp4"))


@pytest.mark.slow
async def test_what_third_party_documents_show_is_taken_and_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    """vLLM-Omni's and sglang's documents, FastVideo's protocol: the same requests at this engine's size."""
    async with making(tmp_path) as site:
        forms: list[dict[str, str]] = [
            {"width": "128", "height": "128", "num_frames": "24", "fps": "16", "num_inference_steps": "4"},
            {"seconds": "2", "size": "128x128", "fps": "16", "num_inference_steps": "2", "seed": "42"},
            {"extra_body": '{"num_frames": 8, "seed": 1}'},
        ]
        for form, frames in zip(forms, (24, 32, 8), strict=True):
            files = {name: (None, value) for name, value in (form | {"prompt": PROMPT}).items()}
            for sent in ({"files": files}, {"data": form | {"prompt": PROMPT}}):
                made = await site.http.post("/v1/videos", **sent)  # type: ignore[arg-type]
                assert made.status_code == 200, made.text
                assert made.json()["num_frames"] == frames
        sglang = await ask(site, size="128x128", num_frames=None, seconds=1)
        assert (sglang["seconds"], sglang["num_frames"], sglang["fps"]) == ("1", 40, 40.0)
        nested = await ask(site, num_frames=None, extra_body={"seconds": "0.5", "fps": 16})
        assert (nested["num_frames"], nested["status"]) == (8, "queued")
        default = await ask(site, num_frames=None)
        assert (default["seconds"], default["num_inference_steps"]) == ("4", 4)

        async def refused(**body: Any) -> tuple[int, str | None, str]:
            return refusal(await site.http.post("/v1/videos", json={"prompt": PROMPT} | body))

        for ignored in ("true_cfg_scale", "negative_prompt", "flow_shift", "quality", "image_reference", "lora"):
            assert await refused(**{ignored: "4.0"}) == (400, ignored, "unsupported")
        assert await refused(fit="contain") == (400, "fit", "invalid")
        assert await refused(extra_body={"guidance_scale": 4.0}) == (400, "guidance_scale", "invalid")
        picture = {"input_reference": ("cat.png", b"\x89PNG" * 300_000, "image/png")}
        by_form = await site.http.post("/v1/videos", data={"prompt": PROMPT}, files=picture)
        assert refusal(by_form) == (400, "input_reference", "picture")
        assert "format that is not read here" in by_form.json()["detail"]


@pytest.mark.slow
async def test_whoever_waits_gets_the_video_in_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLPerf Endpoints' adapter asks TensorRT-LLM for it, with all the fields it sends, and vLLM-Omni's clients."""
    monkeypatch.setattr(videos, "POLL_S", 0.01)
    async with making(tmp_path) as site:
        asked = {
            "prompt": PROMPT, "size": "128x128", "seconds": 0.5, "fps": 16, "num_inference_steps": 4, "seed": 42,
            "guidance_scale": 1.0, "guidance_scale_2": 1.0, "output_format": "auto", "response_format": "video_bytes",
        }  # fmt: skip
        made = (await site.http.post("/v1/videos/generations", json=asked)).json()
        shown = pictures_of(base64.b64decode(made["video_bytes"]))
        assert len(shown) == 8 and is_colour(shown[0], "blue") and made["video_id"].startswith("video_")
        answer = await site.http.post("/v1/videos/sync", data={"prompt": PROMPT, "num_frames": "8"})
        assert answer.headers["content-type"] == "video/mp4" and len(pictures_of(answer.content)) == 8
        for path in ("sync", "generations"):
            failed = await site.http.post(f"/v1/videos/{path}", json={"prompt": "black", "num_frames": 8})
            assert refusal(failed) == (422, None, "failed")
        with pytest.raises(httpx.ReadTimeout):
            await site.http.post("/v1/videos/sync", json={"prompt": PROMPT, "num_frames": 2400}, timeout=0.3)
        async with asyncio.timeout(60):
            while len((await site.http.get("/v1/videos")).json()["data"]) > 4:
                await asyncio.sleep(0.02)


EMPTY: dict[str, Any] = {"negative_prompt": "", "flow_shift": None, "lora": "", "size": "", "width": None, "seed": -1}
NO_EFFECT: dict[str, Any] = {"user": "somebody", "metadata": {"shot": 7, "final": True}, "n": 1} | EMPTY


async def test_what_changes_no_video_is_taken_and_what_would_is_refused_by_name(tmp_path: Path) -> None:
    async with making(tmp_path) as site:
        texts = {"seed": "7", "num_frames": "8", "fps": "16", "num_inference_steps": "2", "n": "1"}
        for body in (NO_EFFECT, texts, {"size": f"{SIZE}X{SIZE}", "extra_body": {"user": 7}}):
            made = await ask(site, **body)
            assert made["seed"] >= 0 and made["size"] == f"{SIZE}x{SIZE}"
        assert (made := await ask(site, **texts))["seed"] == 7 and made["num_frames"] == 8
        form = {"prompt": PROMPT, "user": "me", "metadata[shot]": "7", "negative_prompt": "", "seed": "-1", "fit": ""}
        made = await site.http.post("/v1/videos", data=form)
        assert made.status_code == 200, made.text
        for name, value in (("n", 2), ("n", True), ("seed", True), ("seed", "x"), ("lora", {}), ("fps", False)):
            answer = await site.http.post("/v1/videos", json={"prompt": PROMPT, name: value})
            assert refusal(answer)[:2] == (400, name), value
        for path in ("/health", "/v1/models/scripted"):
            assert (await site.http.get(path)).status_code == 200
        assert refusal(await site.http.get("/v1/models/a/b")) == (404, "model", "model_not_found")


@pytest.mark.slow
async def test_a_request_that_is_repeated_with_its_key_is_one_job_after_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    monkeypatch.setattr(runner, "QUEUE", 4)

    async def create(client: openai.AsyncOpenAI, key: str, **body: Any) -> str:
        given = {"prompt": PROMPT, "extra_body": {"num_frames": 8, "input_reference": yellow_png()}} | body
        return (await client.videos.create(**given, extra_headers={"Idempotency-Key": key})).id

    async with making(tmp_path) as site, client_of(site) as client:
        with site.client.held():
            first, again = await asyncio.gather(*(create(client, "a key") for _ in range(2)))
            assert first == again
            other = await create(client.with_options(api_key="another-key"), "a key", prompt="a red circle")
            assert other != first
            assert await create(client, "a key") == first, "though the queue is full"
            for changed in ({"prompt": "a red circle"}, {"extra_body": {"num_frames": 8}}):
                with pytest.raises(openai.ConflictError) as caught:
                    await create(client, "a key", **changed)
                assert (caught.value.code, caught.value.param) == ("idempotency_key", "Idempotency-Key")
            for key in ("", "k" * 256, "k\x7f"):
                answer = await site.http.post("/v1/videos", json={"prompt": PROMPT}, headers={"Idempotency-Key": key})
                assert refusal(answer) == (400, "Idempotency-Key", "invalid")
        await ended(site, first)
        await ended(site, other)
        fields, file = {"prompt": PROMPT, "num_frames": "8", "seconds": "0.2"}, base64.b64decode(yellow_png())
        headers = {"Idempotency-Key": "form"} | bearer("any")
        form = await site.http.post("/v1/videos", data=fields, files={"input_reference": file}, headers=headers)
        body = {"num_frames": 8, "input_reference": yellow_png()}
        assert await create(client, "form", seconds=0.2, extra_body=body) == form.json()["id"]
    async with making(tmp_path) as site, client_of(site) as client:
        assert await create(client, "a key") == first
        await client.videos.delete(first)
        assert await create(client, "a key") != first


def yellow_png() -> str:
    """A picture as base64."""
    yellow = io.BytesIO()
    Image.new("RGB", (300, 200), COLOURS["yellow"]).save(yellow, "PNG")
    return base64.b64encode(yellow.getvalue()).decode()


@pytest.mark.slow
async def test_a_video_begins_with_the_picture_of_its_form_or_its_json(tmp_path: Path) -> None:
    png, form = yellow_png(), {"prompt": PROMPT, "num_frames": "20"}
    address = f"data:image/png;base64,{png}"
    async with making(tmp_path) as site:
        files = {"input_reference": ("any.png", base64.b64decode(png), "image/png")}
        node = form | {"input_reference[image_url]": address}  # as OpenAI's client for Node writes an object
        text = form | {"input_reference": json.dumps({"image_url": address, "file_id": None})}
        forms = [{"data": form, "files": files}, {"data": node}, {"files": {k: (None, v) for k, v in node.items()}}]
        videos = [await ask(site, input_reference=given) for given in (png, {"image_url": address})]
        for sent in (*forms, {"data": text}):
            by_form = await site.http.post("/v1/videos", **sent)  # type: ignore[arg-type]
            assert by_form.status_code == 200, by_form.text
            videos.append(by_form.json())
        async with client_of(site) as client:
            extra = {"num_frames": 20, "input_reference": {"image_url": address}}
            made = await client.videos.create(prompt=PROMPT, extra_body=extra)
            videos.append(made.model_dump())
        for video in videos:
            assert (await ended(site, video["id"]))["status"] == "completed"
            content = await site.http.get(f"/v1/videos/{video['id']}/content")
            pictures = pictures_of(content.content)
            assert all(is_colour(picture, "yellow") for picture in pictures[:8])
            assert all(is_colour(picture, "blue") for picture in pictures[8:])
            await site.http.delete(f"/v1/videos/{video['id']}")
        assert {entry.name.partition("-")[0] for entry in tmp_path.iterdir()} == {"jobs.sqlite3"}, "nothing else"
        elsewhere = "https://a.example/cat.png"
        for wrong in (elsewhere, {"image_url": elsewhere}, {"file_id": "f"}, {}, {"image_url": 7}, [address], "{"):
            answer = await site.http.post("/v1/videos", json={"prompt": PROMPT, "input_reference": wrong})
            assert refusal(answer)[:2] == (400, "input_reference"), wrong
        twice = await site.http.post("/v1/videos", data=node, files=files)
        assert refusal(twice)[:2] == (400, "input_reference")


async def test_bodies_that_are_none_are_refused_in_both_shapes(tmp_path: Path) -> None:
    async with making(tmp_path) as site:
        kinds = {"json": "application/json", "form": "multipart/form-data; boundary=x", "other": "text/plain"}
        for kind, body, said in (
            ("json", b"{", (400, None, "bad_json")),
            ("json", b"[]", (400, None, "bad_json")),
            ("json", b"[" * 60_000, (400, None, "bad_json")),
            ("json", b" " * (15 << 20), (413, None, "413")),
            ("form", b"--x--", (400, "prompt", "invalid")),
            ("form", b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na red', (400, None, "bad_form")),
            ("form", b"nothing of the kind", (400, None, "bad_form")),
            ("other", b"prompt", (415, None, "media_type")),
        ):
            sent = await site.http.post("/v1/videos", content=body, headers={"Content-Type": kinds[kind]})
            assert refusal(sent) == said, (kind, body[:20])
        head = b'--x\r\nContent-Disposition: form-data; name="p"; filename="p"\r\n\r\n'
        large = head + bytes(17 << 20) + b"\r\n--x--\r\n"
        sent = await site.http.post("/v1/videos", content=large, headers={"Content-Type": kinds["form"]})
        assert refusal(sent) == (413, None, "too_large")
        assert refusal(await site.http.get("/v1/nothing")) == (404, None, "404")
        assert refusal(await site.http.put("/v1/videos")) == (405, None, "405")
        for query, field in (("limit=0", "limit"), ("order=up", "order"), ("after=nobody", "after")):
            assert refusal(await site.http.get(f"/v1/videos?{query}")) == (400, field, "invalid")


async def test_lists_go_on_behind_a_video_in_either_order(tmp_path: Path) -> None:
    async with making(tmp_path, name="a") as site, client_of(site) as client:
        ids = [(await ask(site, num_frames=1))["id"] for _ in range(5)]
        assert [each.id async for each in client.videos.list(limit=2, order="asc")] == ids
        assert [each.id async for each in client.videos.list(limit=2)] == ids[::-1]
        page = (await site.http.get("/v1/videos", params={"limit": 2, "after": ids[3]})).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
        assert (page["first_id"], page["last_id"], page["object"]) == (ids[2], ids[1], "list")
        assert page["server"] == "a" and (await site.http.get("/api/sessions")).json()["server"] == "a"
        for after, code in ((f"video_b_{'0' * 32}", "other_server"), (f"video_a_{'0' * 32}", "invalid")):
            assert refusal(await site.http.get("/v1/videos", params={"after": after})) == (400, "after", code)


async def test_a_video_is_there_when_it_is_whole_and_in_parts(tmp_path: Path) -> None:
    painter = Painter(chunk_s=0.0)
    async with making(tmp_path, painter) as site:
        with site.client.held():  # the engine takes no command: the job waits for it
            first, second = await ask(site), await ask(site)
            address = f"/v1/videos/{first['id']}/content"
            early = await site.http.get(address)
            assert refusal(early)[0] == 404 and int(early.headers["retry-after"]) > 0
            await site.until(lambda: any(isinstance(each, Open) and each.background for each in site.client.sent))
            shown = await site.http.get(f"/v1/videos/{first['id']}")
            assert (shown.json()["status"], shown.json()["progress"]) == ("in_progress", 0)
            assert int(shown.headers["openai-poll-after-ms"]) > 0
            assert (await site.http.get(f"/v1/videos/{second['id']}")).json()["status"] == "queued"
        await ended(site, first["id"])
        whole = await site.http.get(address)
        assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
        part = await site.http.get(address, headers={"Range": "bytes=4-7"})
        assert (part.status_code, part.content, whole.content[4:8]) == (206, b"ftyp", b"ftyp")
        beyond = await site.http.get(address, headers={"Range": "bytes=99999999-"})
        assert beyond.status_code == 416
        assert refusal(await site.http.get(f"{address}?variant=thumbnail")) == (400, "variant", "invalid")
        assert len(pictures_of(whole.content)) == 20
        (tmp_path / f"{first['id']}.mp4").unlink()
        assert refusal(await site.http.get(address)) == (404, None, "gone")


@pytest.mark.slow
async def test_a_deleted_video_is_made_no_further(tmp_path: Path) -> None:
    async with making(tmp_path, Painter(chunk_s=0.05)) as site:
        long, waiting = await ask(site, num_frames=2000), await ask(site)
        path = f"/v1/videos/{long['id']}"
        async with asyncio.timeout(240):
            while not (await site.http.get(path)).json()["progress"]:
                await asyncio.sleep(0.02)
        assert (await site.http.delete(f"/v1/videos/{waiting['id']}")).json()["deleted"]
        assert (await site.http.delete(path)).json()["deleted"]
        [opened] = [each.session for each in site.client.sent if isinstance(each, Open) and each.background]
        assert Close(opened) in site.client.sent
        assert not [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("jobs.sqlite3")]
        assert refusal(await site.http.get(path))[0] == refusal(await site.http.delete(path))[0] == 404


async def test_a_video_that_is_deleted_while_its_session_is_asked_for_leaves_none_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with making(tmp_path, Painter(chunk_s=0.05)) as site:
        handed_over, plain = asyncio.Event(), site.client.send

        async def send(command: Command) -> None:
            await plain(command)
            if isinstance(command, Open) and command.background:
                handed_over.set()
                await asyncio.Event().wait()  # a real client waits a little too when it has handed it over

        monkeypatch.setattr(site.state.jobs, "_send", send)
        video = await ask(site, num_frames=2000)
        await handed_over.wait()
        assert (await site.http.delete(f"/v1/videos/{video['id']}")).json()["deleted"]
        [opened] = [each.session for each in site.client.sent if isinstance(each, Open) and each.background]
        assert Close(opened) in site.client.sent


@pytest.mark.slow
async def test_queue_share_and_disk_have_limits_that_say_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "QUEUE", 4)
    async with making(tmp_path, address_share=0.5) as site:
        with site.client.held():
            ids = [(await ask(site))["id"] for _ in range(2)]
            full = await site.http.post("/v1/videos", json={"prompt": PROMPT})
            assert refusal(full) == (429, None, "address") and int(full.headers["retry-after"]) > 0
        for id in ids:
            await ended(site, id)
        await ended(site, (await ask(site))["id"])
    monkeypatch.setattr(runner, "QUEUE", 1)
    async with making(tmp_path) as site:
        with site.client.held():
            await ask(site)
            assert refusal(await site.http.post("/v1/videos", json={"prompt": PROMPT})) == (429, None, "queue")
    monkeypatch.undo()
    async with making(tmp_path) as site:  # which finishes what the one before was ended with
        ids = [each["id"] for each in (await site.http.get("/v1/videos")).json()["data"]]
        for id in ids:
            await ended(site, id)
    used_gb = sum((tmp_path / f"{id}.mp4").stat().st_size for id in ids) / 1e9
    for limit_gb, status in ((0.9 * used_gb, 429), (1.1 * used_gb, 200)):
        async with making(tmp_path, jobs_disk_gb=limit_gb) as site:
            answer = await site.http.post("/v1/videos", json={"prompt": PROMPT})
            assert answer.status_code == status, "a byte is a byte"
            if status == 429:
                assert refusal(answer) == (429, None, "disk") and int(answer.headers["retry-after"]) == 3600


@pytest.mark.slow
async def test_where_steering_takes_a_token_videos_take_it_for_everything(tmp_path: Path) -> None:
    """With a token to watch too they are as sessions, see `test_openapi`."""
    (tmp_path / "control").write_text(token := "a-token-to-steer-with")
    async with making(tmp_path / "jobs", control_token_file=str(tmp_path / "control")) as site:
        body = {"prompt": PROMPT, "num_frames": 1}
        for shown, status in ((None, 401), ("no-token-of-this-server", 401), (token, 200)):
            made = await site.http.post("/v1/videos", json=body, headers=bearer(shown))
            assert made.status_code == status
        id = made.json()["id"]
        await ended(site, id, **bearer(token))
        for address in (f"/v1/videos/{id}", f"/v1/videos/{id}/content", "/v1/videos", "/v1/models"):
            assert refusal(await site.http.get(address)) == (401, None, "token")
            assert (await site.http.get(address, headers=bearer(token))).status_code == 200
        async with client_of(site, token) as client:
            assert (await client.videos.delete(id)).deleted


async def test_without_a_folder_the_server_says_how_to_have_videos() -> None:
    async with open_site() as site:
        for answer in (
            await site.http.post("/v1/videos", json={"prompt": PROMPT}),
            await site.http.get("/v1/videos"),
            await site.http.delete("/v1/videos/x"),
        ):
            assert refusal(answer) == (404, None, "jobs_off") and "--jobs-dir" in answer.json()["detail"]
        assert [each["id"] for each in (await site.http.get("/v1/models")).json()["data"]] == ["scripted"]
