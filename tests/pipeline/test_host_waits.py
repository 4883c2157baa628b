"""Whole streams on tensors that are said to lie on CUDA and have no memory: the host asks for no value of the device,
and copies nothing to it from memory that is not pinned. For both it would wait, which tests on a CPU cannot see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernel_count import CUDA, STEPS, WithoutDevice, denoiser, spec_of
from streamdiff.core import KV_CONTEXTS
from streamdiff.models.model import Model
from streamdiff.pipeline import ring as ring_module
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.link import NoLink
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.init_latents import InitLatents
from streamdiff.pipeline.runner.sampler import StreamInputs

CHUNKS = 6  # windows of four
FROM_VIDEO = 2
"""Chunks that show what each one that starts from video does."""
ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")


def memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Pinning(WithoutDevice):
    """Notes what has been pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, Tensor] = {}  # kept, so that no other tensor gets the number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.pin_memory:
            self.pinned[memory(result)] = result
        return result


class Waits(TorchDispatchMode):
    """Notes operations for which the host would wait."""

    def __init__(self, pinning: Pinning) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pinning = pinning
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":
            return func(*args, **(kwargs or {}))
        with self:  # what is made of other operations comes back as these
            if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ASKS and any(each.is_cuda for each in tree_leaves(args) if isinstance(each, Tensor)):
            self.found.append(name)
        if name in ("copy_", "_to_copy"):
            to, source = (args[0], args[1]) if name == "copy_" else (result, args[0])
            asynchronous = (kwargs or {}).get("non_blocking") or (name == "copy_" and args[2:3] == (True,))
            pinned = memory(source) in self.pinning.pinned and source.dtype == to.dtype
            if {to.device.type, source.device.type} == {"cpu", "cuda"} and not (asynchronous and pinned):
                self.found.append(f"{name} from {source.device.type} {list(source.shape)}")
        return result


class AtOnce(ThreadPoolExecutor):
    """What another thread would do: modes of torch are a thread's own."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@contextmanager
def ring_on_cuda(**more: Any) -> Iterator[tuple[Ring, Waits]]:
    pinning = Pinning()
    waits = Waits(pinning)
    with FakeTensorMode(), pinning, torch.inference_mode():
        model = Model(spec_of("longlive-1.3b"), denoiser(1), None, None)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceTimer, "on", lambda device: DeviceTimer())
            patch.setattr(ring_module, "one_stage_link", lambda device: NoLink())
            ring = Ring(model, CUDA, **more)
        ring.sampler._thread = AtOnce(1)
        yield ring, waits


def stream(ring: Ring, waits: Waits, kv_context: str, source: InitLatents | None = None, chunks: int = CHUNKS) -> None:
    """Chunks of one session; opening it may wait. Mutates: all."""
    spec = ring.sampler.spec
    text = torch.zeros(spec.text_shape)
    ring.open(0, text, epoch=0, steps=STEPS, kv_context=kv_context, given=StreamInputs(source=source))
    while ring.has_work:
        ring.step_latents()
    made = 0
    with waits:
        while made < chunks:
            ring.scheduler.set_frame_credit(0, 2 * chunks * spec.chunk_frames)
            made += len(ring.step_latents()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_context",
    [pytest.param(context, marks=[pytest.mark.soak] if context == "same_step" else []) for context in KV_CONTEXTS],
)
def test_no_micro_step_waits_for_the_device(kv_context: str) -> None:
    with ring_on_cuda() as (ring, waits):
        stream(ring, waits, kv_context)
    assert not waits.found


def only_levels(source: InitLatents, device: torch.device) -> InitLatents:
    """What leaves the latents in memory that is not pinned."""
    levels = source.noise_level.to(device), source.timestep.to(device)
    return InitLatents(source.latents, *levels)


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [True, False])
def test_chunks_that_start_from_video_do_not_wait_either(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring_on_cuda() as (ring, waits):
        source = InitLatents.steady(torch.zeros(FROM_VIDEO, *ring.sampler.spec.chunk_shape), 0.7, 700.0)
        if not pinned:
            monkeypatch.setattr(InitLatents, "on", only_levels)
        stream(ring, waits, "clean", source, FROM_VIDEO)
    assert bool(waits.found) is not pinned, "and where they would, it is seen"
