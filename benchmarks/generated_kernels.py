"""The CUDA code that torch's compiler writes for a function, without a GPU and without Triton: written, never run.

torch is told of a device (an H100's properties), and that Triton is there, for as long as the code is written. Which
kernels there are is decided before Triton has any part in it: it would only compile them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.compile_fx import _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _triton

_H100: dict[str, Any] = {
    "major": 9,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
}


def kernels(function: Callable[..., Any], given: Sequence[Tensor], mode: FakeTensorMode) -> list[str]:
    """Names of the Triton kernels that the compiled `function(*given)` launches, in order; matrix products and
    attention are calls of libraries, and not among them. To be called in `mode`, whose tensors `given` are, on CUDA;
    other tensors that the function uses count as inputs."""
    return re.findall(r"^\s*(triton_\w+)\.run\(", generated(function, given, mode), re.MULTILINE)


def generated(function: Callable[..., Any], given: Sequence[Tensor], mode: FakeTensorMode) -> str:
    """The wrapper's source, with that of its kernels; see `kernels`."""
    plain = torch.func.functionalize(function, remove="mutations")
    with torch.no_grad():
        traced = make_fx(plain, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)(*given)
    inputs = [*given, *_lift_constants(traced)]
    with _pretended_gpu(), V.set_fake_mode(mode), DebugContext():
        view_to_reshape(traced)
        _recursive_post_grad_passes(traced, is_inference=True)
        graph = GraphLowering(traced, example_inputs=inputs, is_inference=True)
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            wrapper, _ = graph.codegen()
    return str(wrapper.value)


def _lift_constants(traced: fx.GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that a traced function holds: as constants they would be looked into. Returns these.
    Mutates: traced."""
    last = [node for node in traced.graph.nodes if node.op == "placeholder"][-1]
    lifted: dict[str, fx.Node] = {}
    found: list[Tensor] = []
    for node in [node for node in traced.graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in lifted:
            with traced.graph.inserting_after(last):
                last = lifted[name] = traced.graph.placeholder(f"held{name}")
            found.append(getattr(traced, name))
            last.meta = {"val": found[-1]}
        node.replace_all_uses_with(lifted[name])
        traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return found


@contextmanager
def _pretended_gpu() -> Iterator[None]:
    """Mutates, within: torch's answers about CUDA and Triton."""
    properties = SimpleNamespace(name="NVIDIA H100", minor=0, total_memory=80 << 30, gcnArchName="", **_H100)
    with ExitStack() as stack:
        for owner, name, answer in (
            (torch.cuda, "is_available", True),
            (torch.cuda, "current_device", 0),
            (torch.cuda, "device_count", 1),
            (torch.cuda, "get_device_properties", properties),
            (torch.cuda, "get_device_capability", (9, 0)),
            (CudaInterface, "is_available", True),
            (CudaInterface, "get_device_properties", properties),
            (CudaInterface, "get_compute_capability", "90"),
            (CudaInterface, "is_triton_capable", True),
            (CudaInterface, "raise_if_triton_unavailable", None),
            (CudaInterface.Worker, "get_device_properties", properties),
            (DeviceProperties, "create", DeviceProperties(type="cuda", index=0, cc=90, **_H100)),
            (scheduler, "has_triton", True),
            (_triton, "triton_hash_with_backend", "none"),
        ):
            stack.enter_context(mock.patch.object(owner, name, mock.Mock(return_value=answer)))
        stack.enter_context(inductor_config.patch(fx_graph_cache=False, compile_threads=1))
        yield
