"""The catalogue: every packaged entry holds, says what its authors published, and nothing unknown gets in."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from streamdiff.models import catalogue, sampling
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.spec import check_spec

FOLDER = Path(catalogue.__file__).parent / "published"
WARPED = (1000, 937.5, 833.3333, 625)
# Causal-rCM tells 1600/1601, 15/16, 5/6 and 5/8 of 1000 in bfloat16, whose neighbours there are 4 apart.
RCM, SCALE = (1000, 936, 832, 624), float(Fraction(1600, 1601))

# What each model is told and mixed with, and what its first chunk is told where that differs: from the authors' lists
# and configurations, worked out by hand (5t / (1 + 4t); nearest grid points), not from the catalogue.
PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...] | None]] = {
    "tiny": (WARPED, (1, 0.9375, 0.833333, 0.625), None),
    "self-forcing": (WARPED, (1, 0.9375, 0.833333, 0.625), None),
    "causal-forcing-chunkwise": (WARPED, (1, 0.9375, 0.833333, 0.625), None),
    "causal-forcing-framewise": (WARPED, (1, 0.9375, 0.833333, 0.625), None),
    "causal-forcing-framewise-2step": ((1000, 833.3333), (1, 0.833333), WARPED),
    "causal-forcing-framewise-1step": ((1000,), (1,), WARPED),
    "longlive-1.3b": (WARPED, (1, 0.9375, 0.833333, 0.625), None),
    "reward-forcing-1.3b": (WARPED, (1, 0.9375, 0.833333, 0.625), None),
    "streamdiffusionv2-1.3b": ((700, 500, 400, 200), (0.700232, 0.499719, 0.400260, 0.198347), None),
    "streamdiffusionv2-14b": ((700, 500, 400, 200), (0.700232, 0.499719, 0.400260, 0.198347), None),
    # Told 0 at its end, at the lowest point of the grid: 5 * 0.001 / 1.004.
    "krea-realtime-14b": ((1000, 937, 833, 625, 0), (1, 0.936874, 0.832777, 0.625, 0.004980), None),
    "lingbot-world-fast": ((999, 978, 947, 825), (0.9999, 0.978971, 0.947909, 0.825853), None),
    "lingbot-world-v2-1.3b": ((999, 967, 908, 768), (0.9999, 0.967949, 0.908925, 0.768994), None),
    "lingbot-world-v2-14b": ((999, 967, 908, 768), (0.9999, 0.967949, 0.908925, 0.768994), None),
    "matrix-game-2": ((1000, 908.8428, 713.9794), (1, 0.908843, 0.713979), None),
    "matrix-game-2-gta": ((1000, 908.8428, 713.9794), (1, 0.908843, 0.713979), None),
    "matrix-game-2-templerun": (WARPED, (1, 0.9375, 0.833333, 0.625), None),
    "causal-rcm-framewise": (RCM, (SCALE, 0.9375, 0.833333, 0.625), None),
    "causal-rcm-chunkwise": (RCM, (SCALE, 0.9375, 0.833333, 0.625), None),
    "causal-rcm-framewise-2step": ((1000, 832), (SCALE, 0.833333), RCM),
}
BASES = {"wan2.1-t2v-1.3b": "wan2.1-1.3b", "wan2.1-t2v-14b": "wan2.1-14b", "wan2.2-ti2v-5b": "wan2.2-5b"}


def test_every_packaged_file_is_an_entry_and_stands_in_the_tables() -> None:
    names = {path.stem for path in FOLDER.glob("*.yaml")} - {"parts"}
    assert set(catalogue.entries()) == names
    assert set(catalogue.entries()) == names == set(PUBLISHED) | set(BASES)
    assert list(catalogue.entries())[:4] == ["tiny", *BASES], "the embedded model first, then the bases"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_timesteps(name: str) -> None:
    timesteps, sigmas, first_chunk = PUBLISHED[name]
    found = catalogue.find(name).sampling
    assert found is not None
    assert found.schedule().timesteps == pytest.approx(timesteps, abs=1e-4)
    assert found.schedule().sigmas == pytest.approx(sigmas, abs=1e-6)
    assert found.schedule().of(0).timesteps == pytest.approx(first_chunk or timesteps, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "switch"),
    [("longlive-1.3b", "recache"), ("self-forcing", "flush"), ("tiny", "keep"), ("reward-forcing-1.3b", "keep")],
)
def test_what_a_new_prompt_does_to_the_past(name: str, switch: str) -> None:
    """What the model was trained with, else what works, else nothing."""
    entry = catalogue.find(name)
    assert entry.switches is not None and entry.switches.own == switch
    assert name == "tiny" or catalogue.make_spec(name, entry, catalogue.transformer_arguments(entry)).switch == switch


def test_the_embedded_entry_says_what_its_weights_say() -> None:
    weights = EMBEDDED_WEIGHTS
    entry, shared = catalogue.find("tiny"), catalogue.parts()
    stream = json.loads((weights / "model_index.json").read_text())["stream"]
    transformer = json.loads((weights / "transformer" / "config.json").read_text())
    vae = json.loads((weights / "vae" / "config.json").read_text())
    sizes, pictures = shared.architectures["tiny"], shared.autoencoders["tiny"]
    assert entry.stream and entry.context and entry.sampling
    for key in ("chunk_latents", "window_latents", "clean_window_latents", "sink_latents"):
        assert getattr(entry.stream, key) == stream[key]
    assert entry.native_fps == stream["native_fps"]
    assert entry.context.noise == 1000 * stream["context_sigma"]
    assert entry.sampling.schedule().sigmas == sampling.schedule(stream["steps"][0], stream["shift"])
    assert (entry.height, entry.width) == (
        pictures.spatial * stream["latent_height"],
        pictures.spatial * stream["latent_width"],
    )
    assert (sizes.blocks, sizes.heads, sizes.width // sizes.heads, sizes.ffn_dim) == (
        transformer["num_layers"],
        transformer["num_attention_heads"],
        transformer["attention_head_dim"],
        transformer["ffn_dim"],
    )
    assert (sizes.in_channels, sizes.out_channels) == (transformer["in_channels"], transformer["out_channels"])
    assert (pictures.channels, shared.text_encoders["tiny"].width) == (vae["latent_channels"], transformer["text_dim"])


def test_what_a_window_holds_goes_together() -> None:
    """Sink, chunk and first chunk fit into the window, and what is done with the sink is known."""
    changing = {"reward-forcing-1.3b": (None, 0.999), "streamdiffusionv2-1.3b": (0.2, None)}
    changing["streamdiffusionv2-14b"] = changing["streamdiffusionv2-1.3b"]
    for entry in catalogue.listed():
        spec = catalogue.make_spec(entry.name, entry, catalogue.transformer_arguments(entry))
        check_spec(spec)
        assert (spec.adaptive_sink, spec.averaged_sink) == changing.get(entry.name, (None, None))


@pytest.mark.parametrize(
    "change", [{"famly": "x"}, {"kind": "both"}, {"native_fps": "16"}, {"stream": {"chunk_latents": 3, "windw": 21}}]
)
def test_an_unknown_key_and_a_value_of_another_kind_are_refused(change: dict[str, object]) -> None:
    tree = catalogue.find("longlive-1.3b").model_dump(mode="json")
    catalogue.CatalogueEntry.model_validate_json(json.dumps(tree))
    with pytest.raises(ValidationError):
        catalogue.CatalogueEntry.model_validate_json(json.dumps(tree | change))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_key_is_given_twice(path: Path) -> None:
    """YAML would keep the last one without a word."""

    def check(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{path}: {keys}"
        for child in node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else ():
            for part in child if isinstance(child, tuple) else (child,):
                check(part)

    check(yaml.compose(path.read_text(encoding="utf-8")))
