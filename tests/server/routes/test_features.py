"""Features over HTTP: files of a form for prompt, picture or video; faults are named before anything is queued."""

from __future__ import annotations

import io
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from streamdiff.config import Config
from streamdiff.engine.features import check_file
from streamdiff.engine.messages import Open, Ready
from streamdiff.errors import RequestError
from streamdiff.server.sessions.live_session import StreamSpec
from tests.server.conftest import Site, bearer, open_site
from tests.server.jobs.test_videos import ended, is_colour, making, pictures_of
from tests.server.scripted import CHUNK_FRAMES, CHUNK_SHAPE, COLOURS, INFO

RAW_ONE, READY = {"normalised": "no"}, Ready(**asdict(INFO))


def embeds(colour: str, rows: int = 2) -> Tensor:
    return torch.tensor(COLOURS[colour]).float().expand(rows, 3).contiguous()


def latents(*colours: str) -> Tensor:
    chunks = [torch.tensor(COLOURS[each]).float().view(3, 1, 1, 1).expand(CHUNK_SHAPE) for each in colours]
    return torch.stack(chunks)


def file_of(name: str, tensor: Tensor, **metadata: str) -> bytes:
    return save({"prompt_embeds" if name == "prompt_embeds" else "latents": tensor}, metadata or None)


EMBEDS = file_of("prompt_embeds", embeds("green"))
PICTURE = file_of("image_latents", latents("yellow"))
VIDEO = file_of("video_latents", latents("yellow", "purple"))


def files(**given: bytes) -> dict[str, tuple[str, bytes]]:
    return {name: (f"{name}.safetensors", data) for name, data in given.items()}


def opened_by(site: Site, session: str) -> list[Open]:
    return [each for each in site.client.sent if isinstance(each, Open) and each.session == session]


@pytest.mark.slow
async def test_a_session_is_opened_with_features_and_says_so() -> None:
    async with open_site() as site:
        form = {"seed": "5", "strength": "0.3"}
        answer = await site.http.post(
            "/api/sessions", data=form, files=files(prompt_embeds=EMBEDS, video_latents=VIDEO)
        )
        assert answer.status_code == 201, answer.text
        session = answer.json()
        assert session["features"] == ["prompt_embeds", "video_latents"]
        assert (session["prompt"], session["text"], session["image"], session["seed"]) == ("", "", False, 5)
        [opened] = opened_by(site, session["id"])
        assert (opened.prompt, opened.prompt_embeds, opened.video_latents) == ("", EMBEDS, VIDEO)
        assert opened.strength == 0.3 and opened.image_latents is None

        by_picture = await site.http.post("/api/sessions", data={"prompt": "blue"}, files=files(image_latents=PICTURE))
        assert by_picture.json()["features"] == ["image_latents"] and by_picture.json()["image"] is True
        plain = await site.http.post("/api/sessions", json={"prompt": "blue"})
        assert plain.json()["features"] == [] and opened_by(site, plain.json()["id"])[0].prompt_embeds is None
        capacity = (await site.http.get("/api/sessions")).json()["capacity"]
        assert (capacity["text_shape"], capacity["chunk_shape"]) == ([4, 3], list(CHUNK_SHAPE))


@pytest.mark.slow
async def test_they_are_kept_for_an_engine_that_is_started_again_until_something_takes_their_place() -> None:
    async with open_site() as site:
        given = files(prompt_embeds=EMBEDS, image_latents=PICTURE)
        session = (await site.http.post("/api/sessions", files=given)).json()
        where, headers = f"/api/sessions/{session['id']}", bearer(session["control_token"])
        live = site.state.manager.get(session["id"])
        assert live is not None

        async def asked_again() -> Open:
            await live.ask_open()
            return opened_by(site, live.id)[-1]

        again = await asked_again()
        assert (again.prompt, again.prompt_embeds, again.image_latents) == ("", EMBEDS, PICTURE)
        changed = await site.http.patch(where, json={"prompt": "red"}, headers=headers)
        assert changed.json()["session"]["features"] == ["image_latents"]
        again = await asked_again()
        assert (again.prompt, again.prompt_embeds, again.image_latents) == ("red", None, PICTURE)
        changed = await site.http.patch(where, json={"image": ""}, headers=headers)
        assert changed.json()["session"]["features"] == []
        assert (await asked_again()).image_latents is None


async def test_a_session_that_has_them_from_a_snapshot_alone_begins_afresh_with_the_default_prompt() -> None:
    """Where nothing is kept of it: an engine refuses an empty prompt."""
    async with open_site() as site:
        spec = StreamSpec("", 5, 16.0)  # as of a snapshot that has `prompt_embeds`
        live = site.state.manager._add("s-saved", spec)
        await live.ask_open(b"snapshot")
        await live.ask_open()
        asked = [(each.prompt, each.snapshot) for each in opened_by(site, live.id)]
        assert asked == [("", b"snapshot"), (Config().session.prompt, None)]
        await site.until(lambda: live.opened)
        assert live.text == live.prompt == Config().session.prompt


@pytest.mark.slow
@pytest.mark.parametrize("kind", ['boundary="a,b"', 'Boundary="a b"', "boundary=ab"])
async def test_any_legal_boundary_of_a_form_will_do(kind: str) -> None:
    async with open_site() as site:
        mark = kind.partition("=")[2].strip('"')
        form = f'--{mark}\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nred\r\n--{mark}--\r\n'
        headers = {"Content-Type": f"multipart/form-data; {kind}"}
        answer = await site.http.post("/api/sessions", content=form, headers=headers)
        assert answer.status_code == 201, answer.text
        cut = await site.http.post("/api/sessions", content=form[:-4], headers=headers)
        assert cut.status_code == 400, "it is cut off"


def odd(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[3] = value
    return changed


def p_of(tensor: Tensor) -> tuple[str, bytes]:
    return "prompt_embeds", file_of("prompt_embeds", tensor)


def i_of(tensor: Tensor) -> tuple[str, bytes]:
    return "image_latents", file_of("image_latents", tensor)


def v_of(tensor: Tensor, **metadata: str) -> tuple[str, bytes]:
    return "video_latents", file_of("video_latents", tensor, **metadata)


def headed(text: str) -> bytes:
    """A file whose header is `text`, and nothing else."""
    return len(text).to_bytes(8, "little") + text.encode()


def c_of(array: np.ndarray) -> bytes:
    """A file of NumPy's."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


POSES = np.tile(np.eye(4), (9, 1, 1))
HUGE = '{"latents": {"dtype": "F32", "shape": [%s, %s], "data_offsets": [0, 0]}}' % (("1" + "0" * 3000,) * 2)
MANY = "{" + ", ".join(f'"{number}": 0' for number in [*range(70_000), 0]) + "}"
WIDE = torch.zeros(1, *CHUNK_SHAPE[:3], 3)
BAD: dict[str, tuple[str, bytes, str]] = {
    "no safetensors": ("prompt_embeds", b"GIF89a", "expected tensors"),
    "a pickle": ("prompt_embeds", pickle.dumps([1, 2]), "this is a pickle"),
    "cut off": ("prompt_embeds", EMBEDS[:-4], "bytes of tensors"),
    "another name": ("prompt_embeds", save({"embeds": embeds("red")}), "prompt_embeds is missing, embeds is unknown"),
    "one more": ("prompt_embeds", save({"prompt_embeds": embeds("red"), "mask": torch.ones(2)}), "mask is unknown"),
    "too many rows": (*p_of(embeds("red", 5)), "L (1 to 4), 3], got [5, 3]"),
    "another width": (*p_of(torch.zeros(2, 7)), "got [2, 7]"),
    "another rank": (*p_of(torch.zeros(3)), "got [3]"),
    "whole numbers": (*p_of(embeds("red").int()), "F16 or F64, got I32"),
    "nan": (*p_of(odd(embeds("red"), float("nan"))), "in float32), got nan at [1, 0]"),
    "finite, but useless": (*p_of(odd(embeds("red"), 3e38)), "from -10,000 to 10,000"),
    "beyond float32": (*p_of(odd(embeds("red").double(), 1e300)), "got inf at [1, 0]"),
    "infinite bfloat16": (*i_of(odd(latents("red"), float("inf")).bfloat16()), "got inf"),
    "two chunks": (*i_of(latents("red", "red")), "[1, 3, 2, 2, 2] or [3, 2, 2, 2]"),
    "another size": (*i_of(WIDE), f"got {list(WIDE.shape)}"),
    "too short a clip": (*v_of(torch.zeros(3, 1, 2, 2)), "F (at least 2)"),
    "not normalised": (*v_of(latents("red"), **RAW_ONE), "not; encode without --raw"),
    "motion of others": (*v_of(latents("red"), motion="0.1"), "each of its 2 latent frames"),
    "too large": ("video_latents", b"\x40" + bytes(7) + b" " * (33 << 20), "at most 33,554,432 bytes"),
    "a huge header": ("image_latents", (2 << 20).to_bytes(8, "little") + b" " * (3 << 20), "at most 1,048,576 bytes"),
    "endless sizes": ("image_latents", headed(HUGE), "expected dtype, shape and data_offsets"),
    "a name twice": ("image_latents", headed(MANY), "'0' stands in it twice"),
    "half a surrogate pair": ("image_latents", headed('{"\\ud800": 0}'), "\\ud800: expected dtype"),
    "empty": ("image_latents", b"", "is empty"),
    "no array": ("poses", EMBEDS, "cannot be read"),
    "an array of objects": ("poses", c_of(np.array([POSES, None], object)), "got object [2]"),
    "an array of no size": ("poses", c_of(POSES[:0]), "got float64 [0, 4, 4]"),
    "an array that is cut off": ("poses", c_of(POSES)[:-8], "bytes for float64 [9, 4, 4]"),
    "an array with a huge header": ("poses", c_of(POSES).replace(b"(9, 4, 4), ", b"(9**9, 4, 4), "), "cannot be read"),
    "an array of millions": ("poses", c_of(POSES).replace(b"(9, ", b"(99999999, "), "bytes for float64 [99999999"),
    "no rotation": ("poses", c_of(2 * POSES), "expected rotations"),
    "a pose that is nan": ("poses", c_of(POSES * float("nan")), "expected finite values"),
    "too many poses": ("poses", c_of(np.tile(POSES, (4000, 1, 1))), "at most 4,194,304 bytes"),
    "no focal length": ("intrinsics", c_of(np.zeros((1, 4))), "focal lengths above 0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", ["/api/sessions", "/v1/videos"])
async def test_each_fault_names_the_tensor_and_nothing_is_queued(where: str, tmp_path: Path) -> None:
    async with making(tmp_path) as site:
        for name, (field, data, words) in BAD.items():
            form = {} if field == "prompt_embeds" else {"prompt": "blue"}
            answer = await site.http.post(where, data=form, files=files(**{field: data}))
            told = answer.json()
            assert answer.status_code == 422, f"{name}: {answer.text[:300]}"
            assert words in told["detail"] and told["detail"].startswith(field), f"{name}: {told['detail']}"
            named = told["field"] if where == "/api/sessions" else told["error"]["param"]
            assert named == field, name
        assert len(site.state.manager.sessions) == 1, "the default one"
        assert [each.session for each in site.client.sent if isinstance(each, Open)] == ["default"]
        assert not (await site.http.get("/v1/videos")).json()["data"]


TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"data": {"prompt": "red"}, "files": files(prompt_embeds=EMBEDS)}, "prompt_embeds"),
    "two beginnings": (
        {"data": {"prompt": "red"}, "files": files(image_latents=PICTURE, video_latents=VIDEO)}, "video_latents",
    ),
    "a text": ({"data": {"prompt": "red", "video_latents": "file.safetensors"}, "files": files()}, "video_latents"),
    "strength alone": ({"data": {"strength": "0.5"}, "files": files(image_latents=PICTURE)}, "strength"),
    "intrinsics alone": ({"data": {}, "files": files(intrinsics=c_of(np.ones((1, 4))))}, "intrinsics"),
    "no strength": ({"data": {"prompt": "red", "strength": "0"}, "files": files(video_latents=VIDEO)}, "strength"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
async def test_what_would_be_ignored_is_refused(name: str) -> None:
    async with open_site() as site:
        request, field = TOGETHER[name]
        if not request["files"]:
            request = request | {"files": {"image": ("", b"")}}
        answer: httpx.Response = await site.http.post("/api/sessions", **request)
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
        by_json = await site.http.post("/api/sessions", json={"prompt": "red", "prompt_embeds": "AAAA"})
        assert by_json.status_code == 422 and "no field 'prompt_embeds'" in by_json.json()["detail"]


async def test_a_video_is_made_of_them(tmp_path: Path) -> None:
    async with making(tmp_path) as site:
        given = files(prompt_embeds=EMBEDS, video_latents=VIDEO)
        answer = await site.http.post("/v1/videos", data={"num_frames": "24", "strength": "0.4"}, files=given)
        assert answer.status_code == 200, answer.text
        id = answer.json()["id"]
        assert (await ended(site, id))["status"] == "completed"
        [opened] = [each for each in site.client.sent if isinstance(each, Open) and id in each.session]
        assert opened.strength == 0.4 and opened.prompt_embeds == EMBEDS
        pictures = pictures_of((await site.http.get(f"/v1/videos/{id}/content")).content)
        for first, colour in ((0, "yellow"), (CHUNK_FRAMES, "purple"), (2 * CHUNK_FRAMES, "green")):
            assert all(is_colour(each, colour) for each in pictures[first : first + CHUNK_FRAMES]), colour
        await site.http.delete(f"/v1/videos/{id}")
        nothing = await site.http.post("/v1/videos", data={"num_frames": "8"}, files=files(image_latents=PICTURE))
        assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, "prompt")


class Watched(io.BytesIO):
    """Notes how much of it was read."""

    taken = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


@pytest.mark.parametrize("good", [True, False])
def test_no_more_than_the_header_is_read_before_it_is_found_good(good: bool) -> None:
    chunks = torch.zeros(2000, *(CHUNK_SHAPE if good else (3, 2, 2, 3)))
    data = file_of("video_latents", chunks)
    file: BinaryIO = Watched(data)
    if good:
        check_file("video_latents", file, len(data), READY)
    else:
        with pytest.raises(RequestError) as caught:
            check_file("video_latents", file, len(data), READY)
        assert caught.value.field == "video_latents"
    assert isinstance(file, Watched) and file.taken < 1000 < len(data) and file.tell() == 0
