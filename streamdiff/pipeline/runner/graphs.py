"""How code becomes graphs: compiled by `torch.compile`, a function as one graph without breaks, whose code is kept on
disk; captured as CUDA graphs, forwards of the transformer and steps of a decoder."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import Capture, DecoderState, Step
from streamdiff.models.transformer.wan import BlockText
from streamdiff.pipeline.kv_cache.cache import LayerCaches
from streamdiff.pipeline.kv_cache.over_time import ActionCaches

Tensors = tuple[Tensor, ...]
Texts = Sequence[Sequence[BlockText]]
"""Of each row, of each layer."""


class RowInputs(NamedTuple):
    """Tensor inputs of a row that change from chunk to chunk, see `TensorMetadata`."""

    slot: Tensor
    query_rope: Tensor
    sink_rope: Tensor | None
    inverse_rope: Tensor | None
    base: Tensor | None = None
    """Where rows share a pool: the pool's slot that is the cache's first, int64 `[1]`."""
    seen: Tensor | None = None
    """And the pool's frames that the row sees, int64 `[n]`."""
    factors: Tensor | None = None
    """Of a model with action modules: see `ActionRow`."""

    def map(self, change: Callable[[Tensor], Tensor]) -> RowInputs:
        """The same with `change` of each tensor."""
        return RowInputs(*(change(each) if each is not None else None for each in self))  # type: ignore[arg-type]


class Inputs(NamedTuple):
    """All tensors that a forward reads; `caches`, once per session, are also written, and of `acting`, of each row of a
    model with action modules, one."""

    given: Tensors
    texts: tuple[tuple[BlockText, ...], ...]
    caches: tuple[LayerCaches, ...]
    rows: tuple[RowInputs, ...]
    acting: tuple[tuple[ActionCaches, int], ...] = ()


_In = TypeVar("_In")
_Out = TypeVar("_Out")
Run = Callable[[Inputs], Tensors]
GraphKey = Hashable
"""Key of a captured graph in its `GraphCache`."""


class Graph(Protocol):
    """A captured graph, as `torch.cuda.CUDAGraph`: replays the captured work on the same addresses."""

    def replay(self) -> None: ...


GraphCapture = Callable[[Run, Inputs], tuple[Graph, Tensors]]
"""Captures `run(inputs)` without executing it; returns the graph and its output tensors. Before that `run` is executed
outside the capture, so that all kernels are compiled and loaded."""


class CudaGraphCapture:
    """The `GraphCapture` of CUDA. All graphs share a memory pool, since they are replayed one after the other, and the
    result of one is consumed before the next begins. Their kernels have the priority of the stream that they were
    captured on, whatever stream they are replayed on (torch instantiates graphs so)."""

    def __init__(self, priority: int = 0) -> None:
        """`priority` is as of `torch.cuda.Stream`: 0 is the lowest, that of streams for which none is given."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(priority=priority)  # one: memory of the pool is used again by stream

    def __call__(self, run: Callable[[_In], _Out], inputs: _In) -> tuple[Graph, _Out]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The thread that decodes continues meanwhile: what it allocates and waits for is no fault of this capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run(inputs)
        return graph, result


def graph_cache_on(device: torch.device) -> GraphCache | None:
    """A new graph cache for a CUDA device, None for any other. Its graphs have priority over those of the decoder,
    which is captured at the default priority and has time until pictures are due."""
    return GraphCache(CudaGraphCapture(priority=-1)) if device.type == "cuda" else None


@dataclass
class TextBuffer:
    """Static buffers of what a row's blocks are given; `whose` is the object that was copied there last."""

    layers: tuple[BlockText, ...]
    whose: object = None

    def put(self, text: Sequence[BlockText]) -> None:
        """Copy `text` into the buffers unless it is there already. Mutates: self."""
        if self.whose is text:
            return
        own, new = ([tensor for kv in layers for tensor in kv] for layers in (self.layers, text))
        torch._foreach_copy_(own, new)  # sessions that take turns change it every time
        self.whose = text


class CapturedGraph(NamedTuple):
    """A captured CUDA graph with its static input buffers and its output tensors."""

    graph: Graph
    static: Inputs
    texts: tuple[TextBuffer, ...]
    result: Tensors


class GraphCache:
    """Captured CUDA graphs by key: a replayed forward is one launch, not thousands.

    All are captured before a stream runs: a capture computes nothing, and waits for the device, which in a ring may
    wait for another rank (docs/decisions/0010-links.md). Inputs other than caches are copied to static buffers that
    graphs share; text keys and values, which are large, only where a row's are others than those of the forward before.
    A replay allocates nothing.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._graph_capture = capture
        self.graphs: dict[GraphKey, CapturedGraph] = {}
        self._texts: dict[int, TextBuffer] = {}  # by row
        self._given: dict[tuple[int, torch.Size], Tensor] = {}  # by index among `Inputs.given`, and shape

    def run(self, key: GraphKey, run: Run, inputs: Inputs, texts: Texts) -> Tensors:
        """Compute `run(inputs)` by replaying the graph of `key`, which is captured first if there is none. The next
        replay overwrites the result. `texts` are those of `inputs`; a text is copied unless it is the same object as
        the last time. Mutates: self, the caches."""
        if key not in self.graphs:
            self.graphs[key] = self._capture(run, inputs)
        found = self.graphs[key]
        for row, text in zip(found.texts, texts, strict=True):
            row.put(text)
        _copy_inputs(found.static, inputs)
        found.graph.replay()
        return found.result

    def _capture(self, run: Run, inputs: Inputs) -> CapturedGraph:
        """A graph of `run`. Mutates: self."""
        rows = tuple(row.map(torch.clone) for row in inputs.rows)
        given = tuple(
            self._given.setdefault((index, tensor.shape), torch.empty_like(tensor)).copy_(tensor)
            for index, tensor in enumerate(inputs.given)
        )
        texts = tuple(self._text(row, text) for row, text in enumerate(inputs.texts))
        static = Inputs(given, tuple(text.layers for text in texts), inputs.caches, rows, inputs.acting)
        graph, result = self._graph_capture(run, static)
        return CapturedGraph(graph, static, texts, result)

    def _text(self, row: int, text: tuple[BlockText, ...]) -> TextBuffer:
        """The text buffer of a forward's row, shared by all graphs. Mutates: self."""
        if row not in self._texts:
            self._texts[row] = TextBuffer(tuple(type(own)(*(each.clone() for each in own)) for own in text))
        return self._texts[row]


def _copy_inputs(static: Inputs, inputs: Inputs) -> None:
    """Copy a forward's inputs into the static buffers. Mutates: static."""
    for there, here in zip((static.given, *static.rows), (inputs.given, *inputs.rows), strict=True):
        for to, source in zip(there, here, strict=True):
            if to is not None and source is not None:
                to.copy_(source)


# ---- torch.compile ---------------------------------------------------------------------------------------------------

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps compiled code, of Triton too."""
TRITON_CAPABILITY = (7, 0)
"""Compute capability of NVIDIA GPUs from which on torch compiles for them."""
Function = TypeVar("Function", bound=Callable[..., object])


def one_graph(function: Function) -> Function:
    """`function` as one graph for fixed shapes, compiled when it is called first.

    Raises, when called:
        torch._dynamo.exc.Unsupported: it cannot be one graph.
    """
    # torch keeps what it has compiled with the code object, and stops at eight versions: each call here has its own.
    plain = cast(FunctionType, function)
    own = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, None, plain.__closure__)
    return cast(Function, torch.compile(own, fullgraph=True, dynamic=False))


def keep_compiled_code() -> Path:
    """Let torch keep what it compiles in a private folder, and find there what an earlier process compiled: the folder
    that TORCHINDUCTOR_CACHE_DIR names, else `streamdiff/compiled` in the user's cache folder. torch itself tells by
    graph, shapes, versions and device what fits. To be called before anything is compiled. Returns the folder.
    Mutates: the process's environment.

    Raises:
        ConfigError: the folder cannot be made, or others may write there; torch unpickles what lies in it.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(CACHE_VARIABLE) or user / "streamdiff" / "compiled")
    way_out = f"name another folder with {CACHE_VARIABLE}, or leave --compile off"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"compiled code cannot be kept in {folder} ({error.strerror}); {way_out}", field=CACHE_VARIABLE
        ) from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"compiled code is not kept in {folder}: its owner is user {found.st_uid} and its mode "
            f"{found.st_mode & 0o777:o}, but it must be of user {os.getuid()} and not writable by others, as code in "
            f"it is run; chmod 700 {folder}, or {way_out}",
            field=CACHE_VARIABLE,
        )
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder


def compile_fault(device: torch.device) -> str | None:
    """Why torch cannot compile for a CUDA `device` here; None if it can, as far as that is known before."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    if not any(map(shutil.which, compilers)):  # Triton compiles what launches its kernels
        return f"there is no C compiler ({', '.join(compilers)})"
    if (found := torch.cuda.get_device_capability(device)) < TRITON_CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, and compiling takes {TRITON_CAPABILITY[0]}.0"
    return None


class CapturedStep:
    """A compiled step as one CUDA graph, for all streams: inputs are copied to where the graph looks for them, and
    results from where it puts them, so that no stream's past lies in the graph's memory."""

    def __init__(self, step: Step, piece: Tensor, past: DecoderState, capture: CudaGraphCapture) -> None:
        """Of tensors like these, which are not kept; the step is executed first, to warm up."""
        self._piece, self._past = piece.clone(), _cloned(past)
        self._graph, (self._pictures, self._after) = capture(lambda given: step(*given), (self._piece, self._past))

    def __call__(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        """See `Step`."""
        self._piece.copy_(piece)
        for layer, there in self._past.items():
            if isinstance(there, Tensor):
                there.copy_(cast(Tensor, past[layer]))
        self._graph.replay()
        return self._pictures.clone(), _cloned(self._after)


def capture_on(device: torch.device) -> Capture | None:
    """What captures a decoder's steps on `device`; None where there are no CUDA graphs. Their memory is a pool of their
    own, as the transformer's graphs are replayed at the same time."""
    return partial(CapturedStep, capture=CudaGraphCapture()) if device.type == "cuda" else None


def _cloned(past: DecoderState) -> DecoderState:
    return {layer: each.clone() if isinstance(each, Tensor) else each for layer, each in past.items()}
