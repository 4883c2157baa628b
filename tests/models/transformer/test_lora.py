"""LoRAs are merged while weights are read: exactly W + scale * B @ A, and only what matches."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import open_checkpoint
from streamdiff.models.spec import Lora, parse_lora
from tests.models.layouts import Counting, State, load, original, original_name, save, small_state

RANK = 3
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("base") / "base.safetensors", original(small_state(layers=3)))


def factors(seed: int = 0, rank: int = RANK) -> Factors:
    """A and B for every linear layer of the blocks, by diffusers' names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, tensor.shape[1], generator=generator) / 5,
            torch.randn(tensor.shape[0], rank, generator=generator) / 5,
        )
        for name, tensor in small_state(layers=3).items()
        if name.startswith("blocks.") and tensor.ndim == 2
    }


def merged(changes: Factors, scale: float, into: State | None = None) -> State:
    state = dict(into or small_state(layers=3))
    return state | {name: state[name] + (up @ down) * scale for name, (down, up) in changes.items()}


def peft(changes: Factors, adapter: str = "") -> State:
    """Original names as PEFT saves them; `adapter` is the name that some programs leave in them."""
    result = {}
    for name, (down, up) in changes.items():
        module = "base_model.model." + original_name(name).removesuffix(".weight")
        result |= {f"{module}.lora_A{adapter}.weight": down, f"{module}.lora_B{adapter}.weight": up}
    return result


def diffusers(changes: Factors) -> State:
    result = {}
    for name, (down, up) in changes.items():
        module = "transformer." + name.removesuffix(".weight")
        result |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    return result


def assert_weights(base: Path, loras: list[Lora], expected: State) -> None:
    """All weights to the rounding of one product in float32, and those without a change exactly."""
    state, plain = load(base, loras=loras).state_dict(), small_state(layers=3)
    for name, tensor in expected.items():
        if tensor is plain[name] or torch.equal(tensor, plain[name]):
            assert torch.equal(state[name], plain[name]), name
        else:
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert len(factors()) == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "container", "scale"), [("", "generator_lora", 1.0), (".default", None, -2.0), ("", None, 0.0)]
)
def test_longlive(adapter: str, container: str | None, scale: float, base: Path, tmp_path: Path) -> None:
    state, path = peft(factors(), adapter), tmp_path / "lora.pt"
    torch.save({container: state, "step": 3} if container else state, path)
    assert_weights(base, [Lora(path, scale)], merged(factors(), scale))


def test_a_lora_in_diffusers_names_on_a_model_in_original_names(base: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "lora.safetensors", diffusers(factors()))
    assert_weights(base, [Lora(path)], merged(factors(), 1.0))


def test_several_loras_add_up(base: Path, tmp_path: Path) -> None:
    one = save(tmp_path / "one.safetensors", diffusers(factors(1)))
    two = save(tmp_path / "two.safetensors", peft(factors(2, rank=5)))
    expected = merged(factors(2, rank=5), -0.25, merged(factors(1), 0.5))
    assert_weights(base, [Lora(one, 0.5), Lora(two, -0.25)], expected)


def test_alpha_beside_each_pair(base: Path, tmp_path: Path) -> None:
    state = diffusers(factors())
    state = {k.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): t for k, t in state.items()}
    state |= {name.removesuffix(".weight") + ".alpha": torch.tensor(6.0) for name in factors()}
    assert_weights(base, [Lora(save(tmp_path / "a.safetensors", state))], merged(factors(), 6.0 / RANK))


@pytest.mark.parametrize(("stabilised", "strength"), [(False, 6 / RANK), (True, 6 / math.sqrt(RANK))])
def test_alpha_in_the_files_header(stabilised: bool, strength: float, base: Path, tmp_path: Path) -> None:
    settings = {"transformer.lora_alpha": 6, "transformer.r": RANK, "transformer.use_rslora": stabilised}
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(diffusers(factors()), path, metadata={"lora_adapter_metadata": json.dumps(settings)})
    for source in (path, tmp_path):
        assert_weights(base, [Lora(source, 0.5)], merged(factors(), strength * 0.5))


def test_a_change_of_a_fused_projection_is_split(base: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(RANK, 24, generator=generator), torch.randn(72, RANK, generator=generator)
    module = "blocks.1.self_attn.qkv"
    path = save(tmp_path / "a.safetensors", {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up})
    parts = zip(("to_q", "to_k", "to_v"), up.split(24), strict=True)
    assert_weights(base, [Lora(path)], merged({f"blocks.1.attn1.{n}.weight": (down, part) for n, part in parts}, 1.0))


def test_the_base_file_is_not_changed(base: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "lora.safetensors", diffusers(factors()))
    before, checkpoint = base.read_bytes(), open_checkpoint(base)
    load(checkpoint, loras=[Lora(path)])
    assert base.read_bytes() == before
    name = "blocks.0.self_attn.q.weight"
    assert torch.equal(checkpoint.read(name), small_state(layers=3)["blocks.0.attn1.to_q.weight"])


def test_a_stage_reads_only_the_pairs_of_its_blocks(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "lora.safetensors", peft(factors()))
    counting: list[Counting] = []

    def remember(*args: object, **options: object) -> Counting:
        counting.append(Counting(open_checkpoint(*args, **options)))  # type: ignore[arg-type]
        return counting[-1]

    monkeypatch.setattr("streamdiff.models.transformer.weights.open_checkpoint", remember)
    model = load(base, loras=[Lora(path)], blocks=(1, 2))
    assert sorted(counting[-1].reads) == sorted(name for name in peft(factors()) if ".blocks.1." in name)
    name = "attn1.to_q.weight"
    torch.testing.assert_close(model.blocks[0].get_parameter(name), merged(factors(), 1.0)[f"blocks.1.{name}"])


def pair(module: str, rows: int = 24, columns: int = 24, rank: int = RANK, up_rank: int = RANK) -> State:
    return {f"{module}.lora_A.weight": torch.ones(rank, columns), f"{module}.lora_B.weight": torch.ones(rows, up_rank)}


OWN = "blocks.1.self_attn.q"
MISFITS: dict[str, tuple[State, str]] = {
    "no such block": (
        peft(factors()) | pair("blocks.9.self_attn.q"),
        "1 names that match nothing in the model (blocks.9.self_attn.q.lora_A",
    ),
    "no such module": (peft(factors()) | pair("blocks.0.self_attn.qq"), "(blocks.0.self_attn.qq.lora_A"),
    "no factor": (pair(OWN) | {"blocks.0.norm3.other": torch.ones(24)}, "(blocks.0.norm3.other)"),
    "an addend": ({"blocks.0.norm3.diff_b": torch.ones(23)}, "is [24], but blocks.0.norm3.diff_b [23] is to be added"),
    "half a pair": ({k: t for k, t in pair(OWN).items() if "lora_A" in k}, f"({OWN}.lora_A.weight)"),
    "rows": (pair(OWN, rows=25), "blocks.1.attn1.to_q.weight is 24 x 24, but [25, 3] x [3, 24] is to be added"),
    "columns": (pair(OWN, columns=23), "but [24, 3] x [3, 23] is to be added"),
    "two ranks": (pair(OWN, up_rank=4), "[24, 4] x [3, 24] is to be added"),
    "two adapters": (
        {f"{OWN}.lora_{half}.{which}.weight": torch.ones(RANK, RANK) for half in "AB" for which in "xy"},
        f"2 names of a second adapter, of which a file must hold one ({OWN}.lora_A.y.weight, ",
    ),
    "not finite": ({k: t / 0 for k, t in pair(OWN).items()}, "the change of blocks.1.attn1.to_q.weight is not finite"),
    "an alpha of many numbers": (pair(OWN) | {f"{OWN}.alpha": torch.ones(2)}, f"{OWN}.alpha is not a single number"),
    "a model": (original(small_state()), "not a LoRA of a Wan transformer"),
    "a text encoder's": (pair("lora_te_blocks_0_self_attn_q"), "not a LoRA of a Wan transformer"),
    "DoRA": (pair(OWN) | {"lora_unet_blocks_1_self_attn_q.dora_scale": torch.ones(24)}, "DoRA (lora_unet_blocks_1_"),
    "LoKr": ({f"{OWN}.lokr_w1": torch.ones(2, 2), f"{OWN}.lokr_w2": torch.ones(12, 12)}, "LoKr (blocks.1."),
    "LoHa": ({f"{OWN}.hada_w1_a": torch.ones(2, 2)}, "LoHa (blocks.1."),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_named(kind: str, tmp_path: Path, base: Path) -> None:
    state, told = MISFITS[kind]
    path = save(tmp_path / "lora.safetensors", state)
    with pytest.raises(ConfigError) as caught:
        load(base, loras=[Lora(path)])
    assert told in str(caught.value) and "lora.safetensors" in str(caught.value)
    if kind == "no such block":  # whichever blocks a stage has
        with pytest.raises(ConfigError):
            load(base, loras=[Lora(path)], blocks=(1, 2))


ADDED = {"attn2.to_out.0.bias": "cross_attn.o.diff_b", "norm2.weight": "norm3.diff", "scale_shift_table": "diff_m"}


def kohya(dots: int) -> tuple[State, Factors]:
    """Names of kohya's programs with alpha, for some modules only; with `dots` not all of them are underscores."""
    changes = {name: each for name, each in factors().items() if "attn1" in name or "ffn.net.2" in name}
    result: State = {}
    for name, (down, up) in changes.items():
        parts = original_name(name).removesuffix(".weight").split(".")
        joined = ".".join(["_".join(parts[: len(parts) - dots]), *parts[len(parts) - dots :]])
        module, alpha = f"lora_unet_{'_' * (dots == 1)}{joined}", torch.tensor(6.0)
        result |= {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up, f"{module}.alpha": alpha}
    return result, changes


@pytest.mark.parametrize("dots", [0, 1, 2, 3])
def test_kohyas_names_with_alpha_and_addends(dots: int, base: Path, tmp_path: Path) -> None:
    state, changes = kohya(dots)
    expected, plain = merged(changes, 0.5 * 6.0 / RANK), small_state(layers=3)
    for own, theirs in ADDED.items():
        addend = torch.randn(plain[f"blocks.2.{own}"].shape, generator=torch.Generator().manual_seed(len(own)))
        state[f"{'lora_unet_blocks_2' if dots else 'diffusion_model.blocks.2'}.{theirs}"] = addend
        expected[f"blocks.2.{own}"] = plain[f"blocks.2.{own}"] + 0.5 * addend
    assert_weights(base, [Lora(save(tmp_path / "a.safetensors", state), 0.5)], expected)


def test_the_bias_of_a_second_factor_is_as_strong_as_its_pair(base: Path, tmp_path: Path) -> None:
    name, bias = "blocks.1.attn1.to_q", torch.linspace(-1, 1, 24)
    state = pair(OWN) | {f"{OWN}.lora_B.bias": bias, f"{OWN}.alpha": torch.tensor(1.5)}
    ones = {f"{name}.weight": (torch.ones(RANK, 24), torch.ones(24, RANK))}
    expected = merged(ones, 1.5 / RANK) | {f"{name}.bias": small_state(layers=3)[f"{name}.bias"] + bias * 1.5 / RANK}
    assert_weights(base, [Lora(save(tmp_path / "a.safetensors", state))], expected)


def test_alpha_in_pefts_configuration_counts_beside_a_renamed_file_too(base: Path, tmp_path: Path) -> None:
    path = save(tmp_path / "my_style.safetensors", peft(factors()))
    told = {"r": RANK, "lora_alpha": 1.5, "peft_type": "LORA", "alpha_pattern": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    assert_weights(base, [Lora(path)], merged(factors(), 0.5))
    other = save(tmp_path / "another.safetensors", peft(factors()))
    with pytest.raises(ConfigError):
        load(base, loras=[Lora(path)])  # whose it is cannot be told
    other.rename(tmp_path / "adapter_model.safetensors")
    assert_weights(base, [Lora(path)], merged(factors(), 1.0))
    path.unlink()
    assert_weights(base, [Lora(tmp_path)], merged(factors(), 0.5))


@pytest.mark.parametrize("settings", [{"alpha_pattern": {"q": 3}}, {"use_dora": True}, {"lora_alpha": "3"}])
def test_variants_that_are_not_plain_are_refused(settings: dict[str, object], tmp_path: Path, base: Path) -> None:
    text = json.dumps({f"transformer.{key}": value for key, value in settings.items()})
    save_file(pair(OWN), tmp_path / "lora.safetensors", {"lora_adapter_metadata": text})
    with pytest.raises(ConfigError) as caught:
        load(base, loras=[Lora(tmp_path / "lora.safetensors")])
    assert next(iter(settings)) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lora.pt", Lora(Path("lora.pt"), 1.0)),
        ("a/lora.pt:0.8", Lora(Path("a/lora.pt"), 0.8)),
        ("lora.pt:-1", Lora(Path("lora.pt"), -1.0)),
        ("od:d.pt:2", Lora(Path("od:d.pt"), 2.0)),
    ],
)
def test_a_lora_on_the_command_line(text: str, expected: Lora) -> None:
    assert parse_lora(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "lora.pt:", "lora.pt:much", "lora.pt:nan", "lora.pt:inf"])
def test_a_lora_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_lora(text)
