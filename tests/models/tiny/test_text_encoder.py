"""Tokenizer and text encoder of the embedded model."""

from __future__ import annotations

import torch

from streamdiff.models.tiny import prompts
from streamdiff.models.tiny.model import PAD, TEXT_TOKENS, UNKNOWN, WIDTH
from tests.small import RED, small_text
from training.model_folder import build_tokenizer


def test_the_tokenizer_knows_every_word_of_the_captions_and_nothing_else() -> None:
    assert set(build_tokenizer().get_vocab()) == {PAD, UNKNOWN, *prompts.known_words()}


def test_padding_is_zero_and_words_are_not() -> None:
    text = small_text(0)
    ids = text.tokens([RED])[0]
    words = len(RED.split())
    assert ids.shape == (TEXT_TOKENS,) and (ids[:words] > 1).all() and not ids[words:].any()
    embedded = text.encode(RED)
    assert embedded.shape == (TEXT_TOKENS, WIDTH) and embedded.dtype == torch.float32
    assert not embedded[words:].any()
    assert (embedded[:words].norm(dim=1) > 0).all()


def test_padding_does_not_reach_the_words() -> None:
    """What stands in the padded places of a batch has no influence: one text alone and among longer ones agree."""
    text = small_text(0)
    short = "a blue star"
    together = text.embed(text.tokens([short, RED]))[0]
    torch.testing.assert_close(together, text.encode(short), rtol=1e-5, atol=1e-6)


def test_a_text_that_is_too_long_is_cut() -> None:
    text = small_text(0)
    long = " ".join(["red", "circle"] * 20)
    assert text.encode(long).shape == (TEXT_TOKENS, WIDTH)
    assert torch.equal(text.encode(long), text.encode(" ".join(long.split()[:TEXT_TOKENS])))


def test_unknown_words_have_one_token_of_their_own() -> None:
    text = small_text(0)
    assert text.tokens(["dragon zeppelin"])[0, :3].tolist() == [1, 1, 0]
