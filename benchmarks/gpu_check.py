"""One check of `gpu_suite`, in a process of its own, for a CUDA error spoils the process it comes in.

    python -m benchmarks.gpu_check cpu:clean --device cuda        the same latents as on the CPU?
    python -m benchmarks.gpu_check decoder:full --device cuda     the same pictures?
    python -m benchmarks.gpu_check graphs:full --device cuda      captured, channels last, and as YUV420: the same?
    python -m benchmarks.gpu_check wan:bfloat16 --device cuda     two blocks of Wan 1.3B, their numbers
    python -m benchmarks.gpu_check fast:clean --device cuda       graphs against plain
    python -m benchmarks.gpu_check sessions:clean --device cuda   two at once: both captured, and against plain
    python -m benchmarks.gpu_check sync:clean --device cuda       micro-steps in which the host waits for nothing
    python -m benchmarks.gpu_check memory:clean --device cuda     replayed micro-steps that take no memory
    python -m benchmarks.gpu_check shared:clean --device cuda     two ranks that share a stage, against one

Prints one line; exit code 0 it holds, 1 it does not, 77 it cannot be tried here.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.report import ROOT
from benchmarks.stream_case import CONTEXTS, DECODERS
from streamdiff.config import ModelConfig, ServedModel
from streamdiff.core import MicroStep
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, yuv420p
from streamdiff.models.autoencoder.taehv import TaehvAutoencoder
from streamdiff.models.autoencoder.wan import WanAutoencoder
from streamdiff.models.loader import ModelLoader
from streamdiff.models.transformer.wan import TokenStates, WanDenoiser, attend
from streamdiff.models.transformer.weights import kept_dtype
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.runner.graphs import Tensors, capture_on, one_graph
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

HOLDS, WRONG, NOT_HERE = 0, 1, 77
"""Exit codes; the last is no code of pytest's, nor of a shell's, nor 128 and a signal."""
CPU = torch.device("cpu")
_SESSION, _CHUNKS, _BEYOND = 0, 6, 3
# Two chunks in, a stream repeats what differed before; so this is far above rounding and far below a wrong kernel.
_LATENTS_OFF, _PICTURES_OFF = 2e-3, 2
_ALLOCATED, _OF_DRIVER = "allocation.all.allocated", "num_device_alloc"
_BLOCKS_OFF = {torch.float32: 2e-3, torch.bfloat16: 4e-2}
FAST = "compile"
"""The setting of `model:` with a fast path, and its value for the plain one."""
OFF = "off"


class NotHere(Exception):
    """There is nothing to check; says why."""


def off_by(got: Tensor, expected: Tensor) -> float:
    """Length of the difference through that of what is expected; infinite where something is not finite."""
    off = float((got.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())
    return off if off == off else float("inf")


def latents_of(runtime: StreamingPipeline, chunks: int) -> Tensor:
    """The first chunks of a stream, `[chunks, C, F, h, w]`, from the runtime's ring; noise is drawn on the CPU."""
    ring, info = runtime, runtime.info
    text = runtime.text.encode(runtime.text.read(runtime.text.examples[0], None).text)
    ring.open(_SESSION, text, seed=1, epoch=0, steps=info.steps, kv_context=info.kv_context)
    found: list[Tensor] = []
    while len(found) < chunks:
        ring.scheduler.set_frame_credit(_SESSION, 10**6)
        found += [done.latents for done in ring.step_latents(1.0)[1]]
    ring.close_session(_SESSION)
    ring.step_latents()
    return torch.stack(found[:chunks])


def played(**values: object) -> Tensor:
    """`latents_of` the embedded model with these settings."""
    runtime = build_pipeline(ModelConfig.model_validate(values))
    try:
        return latents_of(runtime, _CHUNKS)
    finally:
        runtime.close()


def same_as_cpu(context: str, device: torch.device) -> str:
    """Latents of a stream in float32, window full and beyond."""
    got = played(device=device.type, dtype="float32", kv_context=context, preset="plain")
    return _held(off_by(got, played(device="cpu", dtype="float32", kv_context=context)), _LATENTS_OFF)


def fast_as_plain(context: str, device: torch.device) -> str:
    """Latents with every value of the setting against `off`."""
    field = ModelConfig.model_fields.get(FAST)
    if field is None:
        raise NotHere(f"there is no model.{FAST} in this version")
    values = [value for value in get_args(field.annotation) if value not in (OFF, "auto")]
    plain = played(device=device.type, dtype="float32", kv_context=context, preset="plain", **{FAST: OFF})
    findings = []
    for value in values:
        got = played(device=device.type, dtype="float32", kv_context=context, **{FAST: value})
        findings.append(f"{value} {_held(off_by(got, plain), _LATENTS_OFF)}")
    return "; ".join(findings)


def two_sessions(context: str, device: torch.device) -> str:
    """Latents of two sessions at once on the fast path against the plain one, in float32; on CUDA the caches of both
    have captured graphs."""
    values = {"device": device.type, "dtype": "float32", "kv_context": context}
    plain, _ = two_streams(ModelConfig.model_validate({**values, "preset": "plain"}))
    served = {**values, FAST: "on", "pictures": "rgb"}  # whose pool is for several
    got, captured = two_streams(ServedModel.model_validate(served))
    if device.type == "cuda" and captured != 2:
        raise AssertionError(f"{captured} of 2 sessions have captured graphs")
    return f"{captured} of 2 sessions captured, {_held(off_by(got, plain), _LATENTS_OFF)}"


def two_streams(config: ModelConfig) -> tuple[Tensor, int]:
    """The first chunks of two sessions that take turns, `[2, chunks, C, F, h, w]`, some of them beyond a full window,
    for which there are graphs; of how many sessions there are."""
    runtime = build_pipeline(config)
    try:
        ring, info = runtime, runtime.info
        if ring.stage.compiled is not None:
            ring.stage.compiled.replayed.clear()  # the start has made chunks too
        chunks = runtime.model.spec.window_chunks(info.kv_context) + _BEYOND
        found: dict[int, list[Tensor]] = {1: [], 2: []}
        for name in found:
            text = runtime.text.encode(runtime.text.read(runtime.text.examples[name], None).text)
            ring.open(name, text, seed=name, epoch=0, steps=info.steps, kv_context=info.kv_context)
        while min(map(len, found.values())) < chunks:
            for name in found:
                ring.scheduler.set_frame_credit(name, 10**6)
            for row, latents in ring.step_latents(1.0)[1]:
                found[row.session].append(latents.clone())
        compiled = ring.stage.compiled
        captured = 0
        if compiled is not None and compiled.pool is not None:
            captured = len({number // compiled.pool.caches for number in compiled.replayed})
        return torch.stack([torch.stack(latents[:chunks]) for latents in found.values()]), captured
    finally:
        runtime.close()


def decoder_as_cpu(name: str, device: torch.device) -> str:
    """Pictures of the same weights, the CPU's copied to the device, in float32."""
    own: Any = load_autoencoder(DECODERS[name], "decoder", CPU)
    latents = torch.randn(1, 16, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    expected = PictureDecoder(own).decode(latents, own.new_memory())
    moved = _moved(own, device)
    got = PictureDecoder(moved).decode(latents.to(device), moved.new_memory()).cpu()
    off = int((got.int() - expected.int()).abs().max())
    return _held(off, _PICTURES_OFF, "levels of 255")


def decoder_graphs(name: str, device: torch.device) -> str:
    """A stream's pictures in YUV420 by the compiled and captured decoder, channels last, against the plain one's, in
    float32."""
    if device.type != "cuda":
        raise NotHere("on a CPU tests/pipeline/decode/test_compiled_decoder.py compiles small ones")
    plain: Any = load_autoencoder(DECODERS[name], "decoder", device)
    plain.set_channels_last(channels_last=False)
    chunks = torch.randn(3, 1, 16, 3, 8, 12, generator=torch.Generator().manual_seed(0)).to(device)
    memory = plain.new_memory()
    pictures = torch.cat([PictureDecoder(plain).decode(chunk, memory) for chunk in chunks])
    expected = yuv420p(pictures.permute(0, 3, 1, 2).float())
    fast: Any = load_autoencoder(DECODERS[name], "decoder", device)
    fast.set_channels_last(channels_last=True)
    decoder = PictureDecoder(fast, yuv420p)
    decoder.compile(chunks[0, 0], 3, one_graph, capture_on(device))
    memory = decoder.new_memory()
    with torch.compiler.set_stance("fail_on_recompile"):
        got = torch.cat([decoder.decode(chunk, memory) for chunk in chunks])
    return _held(int((got.int() - expected.int()).abs().max()), _PICTURES_OFF, "levels of 255")


def _moved(decoder: Any, device: torch.device) -> Any:
    """The decoder, its network on the device."""
    network = decoder.autoencoder
    if isinstance(decoder, WanAutoencoder):
        network.decoder.to(device)
        network.post_quant_conv.to(device)
        return WanAutoencoder(network)
    return TaehvAutoencoder(network.to(device), decoder.normalisation)


def blocks_as_cpu(dtype_name: str, device: torch.device) -> str:
    """Two blocks of Wan 1.3B and 1,560 tokens, against float32 on the CPU: a wrong kernel gives noise here."""
    dtype = getattr(torch, dtype_name)
    plain = ModelLoader(ModelConfig(name="random:wan2.1-1.3b"), CPU).transformer((0, 2))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1560, plain.width, generator=generator)
    time = torch.randn(1, 1, plain.width, generator=generator)
    text = torch.randn(1, 512, plain.model.config["text_dim"], generator=generator)

    def run(denoiser: WanDenoiser, kind: torch.dtype, where: torch.device) -> Tensor:
        tokens = TokenStates(hidden.to(where, kind), time.to(where, kind))
        with torch.inference_mode():
            keys = denoiser.text(text.to(where, kind))
            return denoiser.run_blocks(tokens, keys, lambda layer, q, k, v: attend(q, k, v)).hidden

    expected = run(plain, torch.float32, CPU)
    model = copy.deepcopy(plain.model)
    for name, weight in model.named_parameters():
        if not weight.is_meta:
            weight.data = weight.data.to(device, kept_dtype(name, dtype))
    return _held(off_by(run(WanDenoiser(model), dtype, device), expected), _BLOCKS_OFF[dtype])


def no_host_sync(context: str, device: torch.device) -> str:
    """Turns of the ring with torch raising where the host waits for the device."""
    if device.type != "cuda":
        raise NotHere("on a CPU nothing waits")
    runtime = build_pipeline(ModelConfig.model_validate({"device": "cuda", "kv_context": context, "preset": "plain"}))
    try:
        latents_of(runtime, _CHUNKS)
        torch.cuda.set_sync_debug_mode("error")
        try:
            count = _turns(runtime, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        runtime.close()
    return f"{count} micro-steps without waiting"


def no_memory_taken(context: str, device: torch.device) -> str:
    """Blocks of memory that a stage takes in the forwards that it replays: none, but in a chunk's first step, which has
    a table of rotary factors; and nothing at all is asked of the driver."""
    if device.type != "cuda":
        raise NotHere("on a CPU tests/pipeline/runner/test_cuda_graphs.py sees the operations of a replay")
    runtime = build_pipeline(ModelConfig.model_validate({"device": "cuda", "kv_context": context, FAST: "on"}))
    try:
        latents_of(runtime, _CHUNKS)
        asked = torch.cuda.memory_stats()[_OF_DRIVER]
        taken = taken_in_replays(runtime, lambda: torch.cuda.memory_stats()[_ALLOCATED])
        asked = torch.cuda.memory_stats()[_OF_DRIVER] - asked
    finally:
        runtime.close()
    counts = f"{len(taken)} replayed micro-steps took {sum(taken)} blocks, and {asked} of the driver"
    if sum(taken) or asked or not taken:
        raise AssertionError(counts)
    return counts


def taken_in_replays(runtime: StreamingPipeline, taken_so_far: Callable[[], int]) -> list[int]:
    """By how much `taken_so_far` grows in each forward of a stream that is replayed and no chunk's first step: while a
    window fills there are no graphs. Mutates: the runtime."""
    stage, taken = runtime.stage, list[int]()
    forward, compiled = stage.forward, stage.compiled
    assert compiled is not None, "the model was loaded compiled"

    def counted(rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        compiled.replayed.clear()
        before = taken_so_far()
        result = forward(rows, given)
        if compiled.replayed and all(row.step > 0 for row in rows):
            taken.append(taken_so_far() - before)
        return result

    stage.forward = counted  # type: ignore[method-assign]
    latents_of(runtime, _CHUNKS)
    return taken


def shared_as_alone(context: str, device: torch.device) -> str:
    """Latents of the embedded model by two ranks that share its one stage against those of one, in float32."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise NotHere("ranks that share a stage have a GPU each, and there is one")
    with tempfile.TemporaryDirectory(prefix="streamdiff-") as folder:
        alone = _generated(Path(folder) / "alone.safetensors", context, device)
        shared = _generated(Path(folder) / "shared.safetensors", context, device, "--parallel", "1x2", "--processes")
    return _held(off_by(shared, alone), _LATENTS_OFF)


def _generated(out: Path, context: str, device: torch.device, *split: str) -> Tensor:
    """Latents of `streamdiff generate`, which starts the ranks."""
    words = ["--chunks", str(_CHUNKS), "--no-decode", "--latents-out", str(out), "--kv-context", context]
    words += ["--device", device.type, "--dtype", "float32", *split]
    done = subprocess.run(
        [sys.executable, "-m", "streamdiff", "generate", *words], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return load_file(out)["latents"]


def _turns(runtime: StreamingPipeline, chunks: int) -> int:
    """Micro-steps of some chunks of a stream whose first ones were made before."""
    ring, info = runtime, runtime.info
    text = torch.zeros(runtime.model.spec.text_shape, device=ring.stage.device)
    with _waiting():
        ring.open(_SESSION + 1, text, seed=2, epoch=0, steps=info.steps, kv_context=info.kv_context)
        ring.step_latents()
    done = count = 0
    while done < chunks:
        ring.scheduler.set_frame_credit(_SESSION + 1, 10**6)
        rows, finished = ring.step_latents()
        done, count = done + len(finished), count + len(rows)
    return count


class _waiting:
    """For what is no micro-step: opening a stream may wait. Mutates: torch's setting, until the end."""

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("error")


def _held(off: float, allowed: float, unit: str = "of the length") -> str:
    if not off <= allowed:
        raise AssertionError(f"off by {off:.3g} {unit}, {allowed:g} is allowed")
    return f"off by {off:.3g} {unit}, {allowed:g} is allowed"


CHECKS: dict[str, tuple[Callable[[str, torch.device], str], tuple[str, ...]]] = {
    "cpu": (same_as_cpu, CONTEXTS),
    "decoder": (decoder_as_cpu, tuple(DECODERS)),
    "graphs": (decoder_graphs, tuple(DECODERS)),
    "wan": (blocks_as_cpu, ("float32", "bfloat16")),
    "fast": (fast_as_plain, CONTEXTS),
    "sessions": (two_sessions, CONTEXTS),
    "sync": (no_host_sync, CONTEXTS),
    "memory": (no_memory_taken, CONTEXTS),
    "shared": (shared_as_alone, ("clean",)),
}
NAMES = tuple(f"{kind}:{what}" for kind, (_, values) in CHECKS.items() for what in values)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES, metavar="CHECK", help=", ".join(NAMES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kind, _, what = options.name.partition(":")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"{options.name}: torch sees no CUDA device")
        return NOT_HERE
    try:
        finding = CHECKS[kind][0](what, torch.device(options.device))
    except NotHere as reason:
        print(f"{options.name}: {reason}")
        return NOT_HERE
    except AssertionError as fault:
        print(f"{options.name}: {fault}")
        return WRONG
    print(f"{options.name}: {finding}")
    return HOLDS


if __name__ == "__main__":
    sys.exit(main())
