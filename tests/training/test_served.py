"""A model folder as training writes it runs like any model. Its weights are untrained."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streamdiff
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny import model, prompts
from training import autoencoder as clips
from training.__main__ import stream_settings
from training.autoencoder import initialise
from training.model_folder import save_model
from training.network import Network

pytestmark = pytest.mark.slow

WEIGHTS_MB = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    autoencoder, network = TAEHV(clips.AUTOENCODER), Network()
    initialise(autoencoder)
    path = tmp_path_factory.mktemp("tiny")
    channels = clips.AUTOENCODER.latent_channels
    parts = (network.text, network.finished())
    save_model(path, autoencoder, torch.zeros(channels), torch.ones(channels), parts, stream_settings())
    return path


def test_the_folder_is_small_and_reads_prompts(folder: Path) -> None:
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    assert sum(sizes) < WEIGHTS_MB * 1e6
    text = model.load_model(folder, torch.device("cpu")).text
    assert (text.examples, text.suggestions, text.vocabulary) == (
        prompts.EXAMPLES,
        prompts.SUGGESTIONS,
        prompts.VOCABULARY,
    )
    assert text.read("make it blue", prompts.EXAMPLES[4]).text == "a blue star bouncing fast over a meadow in the snow"


@pytest.mark.parametrize("kv_context", ["clean", pytest.param("staircase", marks=pytest.mark.soak)])
def test_a_stream_of_it_is_steered_saved_and_gone_on_with(folder: Path, tmp_path: Path, kv_context: str) -> None:
    options: Any = {"model": str(folder), "steps": 2, "kv_context": kv_context}
    with streamdiff.open("a sunflower", **options) as session:
        assert (session.width, session.height, session.text) == (256, 256, "a yellow star moving right over a meadow")
        assert "“sunflower”: I draw a yellow star." in session.notice
        frames = list(itertools.islice(session, 13))
        assert all(frame.shape == (256, 256, 3) and frame.dtype == np.uint8 for frame in frames)
        assert session.set_prompt("now at nihgt") == ("“nihgt”: I read “night”.")
        list(itertools.islice(session, 12))
        session.save(tmp_path / "stream.safetensors")
        then = [frame.tobytes() for frame in itertools.islice(session, 12)]
    with streamdiff.load(tmp_path / "stream.safetensors", **options) as session:
        assert session.text == "a yellow star moving right over a meadow at night"
        assert [frame.tobytes() for frame in itertools.islice(session, 12)] == then
