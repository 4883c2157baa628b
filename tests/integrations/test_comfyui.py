"""Nodes for ComfyUI in integrations/comfyui, loaded and called as its documentation says: no package index has it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import streamdiff
from streamdiff import api
from streamdiff.engine.messages import Applied
from streamdiff.errors import RequestError
from tests.rules.source import ROOT
from tests.small import BLUE, CONTROLS, RED, save_model

pytestmark = pytest.mark.slow
SIZE = (16, 16)


class Runner:
    """What of ComfyUI runs a node: its inputs by name in inference mode, on a thread of each run."""

    def __init__(self, pack: ModuleType, model: Path) -> None:
        self.pack, self.model = pack, str(model)

    def __call__(self, name: str, /, **inputs: Any) -> tuple[Any, ...]:
        node = self.pack.NODE_CLASS_MAPPINGS[f"Streamdiff{name}"]
        taken = node.INPUT_TYPES()
        given = {key: kind[1]["default"] for key, kind in taken["required"].items() if "default" in kind[-1]} | inputs
        given |= dict.fromkeys(taken.get("hidden", ()), "7")
        found: list[Any] = []

        def run() -> None:
            try:
                with torch.inference_mode():
                    found.append(getattr(node(), node.FUNCTION)(**given))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        assert len(found[0]) == len(node.RETURN_TYPES)
        return tuple(found[0])

    def session(self, **inputs: Any) -> Any:
        return self("Session", **{"prompt": RED, "model": self.model} | inputs)[0]

    def frames(self, session: Any, prompt: str = "", count: int = 20, **inputs: Any) -> np.ndarray:
        images = self("Frames", session=session, prompt=prompt, count=count, switch="model", **inputs)[0]
        assert (
            images.dtype == torch.float32 and images.shape[1:] == (*SIZE, 3) and 0 <= images.min() <= images.max() <= 1
        )
        return np.asarray((images * 255).round().to(torch.uint8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, controls=CONTROLS)
    return folder


@pytest.fixture
def run(model: Path) -> Iterator[Runner]:
    folder = ROOT / "integrations" / "comfyui"
    spec = importlib.util.spec_from_file_location(str(folder).replace(".", "_x_"), folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    pack = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = pack
    spec.loader.exec_module(pack)
    yield Runner(pack, model)
    for stream in pack._open.values():
        stream.session.close()
    del sys.modules[spec.name]


def alone(model: Path, prompt: str, number: int, **options: Any) -> np.ndarray:
    with streamdiff.open(prompt, model=str(model), **options) as session:
        return np.stack(list(islice(session, number)))


def test_each_node_takes_by_name_what_it_declares(run: Runner) -> None:
    assert len(run.pack.NODE_CLASS_MAPPINGS) == len(run.pack.NODE_DISPLAY_NAME_MAPPINGS) == 3
    for node in run.pack.NODE_CLASS_MAPPINGS.values():
        declared = node.INPUT_TYPES()
        parameters = dict(inspect.signature(getattr(node, node.FUNCTION)).parameters)
        del parameters["self"]
        assert set(parameters) == {name for group in declared.values() for name in group}
        needed = {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}
        assert needed == {*declared["required"], *declared.get("hidden", ())}
    frames = run.pack.NODE_CLASS_MAPPINGS["StreamdiffFrames"]
    assert (frames.IS_CHANGED(prompt=RED),) != (frames.IS_CHANGED(prompt=RED),), "each run takes new frames"


def test_runs_continue_one_stream_and_show_the_prompt_of_the_run(run: Runner, model: Path) -> None:
    session = run.session(seed=3)
    runs = [run.frames(session, count=count) for count in (7, 20)]
    assert np.array_equal(np.concatenate(runs), alone(model, RED, 27, seed=3)), "as if taken at once"
    applied: list[int] = []
    stream = session.session
    take = stream._take
    stream._take = lambda events: (
        applied.extend(each.first_frame for each in events if isinstance(each, Applied)),
        take(events),
    )
    blue = run.frames(session, BLUE)
    last = stream._made - len(stream._frames)
    assert len(blue) == 20 and applied and last - 20 >= applied[0], "none of those made ahead under the prompt before"


def test_a_seed_begins_again_on_the_same_model_and_another_model_takes_its_place(
    run: Runner, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int | None] = []
    load = api.load_model
    monkeypatch.setattr(api, "load_model", lambda config: (loads.append(config.steps), load(config))[1])
    first = run.session(seed=1)
    run.frames(first)
    again = run.session(seed=2)
    assert np.array_equal(run.frames(again), alone(model, RED, 20, seed=2))
    loads.clear()
    run.session(seed=2, options='{"steps": 2}')
    assert len(loads) == 1 and again.session is first.session
    with pytest.raises(streamdiff.errors.StreamdiffError) as closed:
        again.session.pause()
    assert closed.value.code == "closed"


def test_controls_hold_for_their_run_alone(run: Runner) -> None:
    def played(held: list[tuple[str, float]]) -> list[dict[str, float]]:
        session, controls = run.session(), None
        for name, value in held:
            (controls,) = run("Controls", name=name, value=value, others=controls)
        told: list[dict[str, float]] = []
        control = session.session.control
        session.session.control = lambda **values: (told.append(values), control(**values))[1]
        run.frames(session, **{"controls": controls} if controls else {})
        run.frames(session)
        return told

    assert played([("x", -0.5), ("jump", 1.0)]) == [{"x": -0.5, "jump": 1.0}, {"x": 0.0, "jump": 0.0}]
    assert played([]) == []
    with pytest.raises(RequestError) as refused:
        played([("y", 1.0)])
    assert refused.value.field == "control"


def test_a_batch_of_images_is_followed_and_then_left(run: Runner) -> None:
    session = run.session()
    run.frames(session)
    chunk = session.session.chunk_frames
    red, green = (torch.zeros(3 * chunk, 32, 48, 3) for _ in range(2))
    red[..., 0], green[..., 1] = 1.0, 1.0
    followed = [run.frames(session, video=video, strength=0.02) for video in (red, green)]
    assert len(followed[1]) == 3 * chunk, "frame for frame, once the stream has begun"
    assert not np.array_equal(*(each[-chunk:] for each in followed))
    assert len(run.frames(session, count=11)) == 11, "from the prompt alone again"
    with pytest.raises(ValueError, match=str(chunk)):
        run.frames(session, video=red[:1])
