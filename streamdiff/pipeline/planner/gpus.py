"""Named GPUs: peak rates of their data sheets, and the shares of these that estimates assume.

Data sheets have dense rates without sparsity; shares are assumptions, each with what it rests on. Nothing here was
measured by this project; tests/pipeline/planner/test_gpus.py compares what comes out with published figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.costs import Ceilings, Exchange

_GIB = 2**30
CONTEXT_BYTES = 600_000_000
"""What a CUDA context takes of a card before anything is loaded: an assumption."""
MEMORY_SHARE = 0.8
"""Of a device memory's rate, what element-wise kernels reach; copies measured by many reach 0.8 to 0.9."""
HOST_SHARE = 0.8
"""Of a PCIe rate, what copies from pinned host memory reach: about 25 of 32, and 50 of 64 GB/s."""
CONVOLUTION_SHARE = 0.25
"""Of the tensor cores' rate, what the decoders' convolutions reach: Wan's decoder, 54 TFLOP for 16 frames of 832x464 in
1.05 s on an RTX 5090 (github.com/kaarelkaarelson/lingbot-world-v2-realtime), is 0.25 of its 209."""
ELEMENTWISE_ACTIVATIONS = 52.0
"""What element-wise kernels of a block read and write, in hidden states of a chunk: the plain path's
(benchmarks/results/kernel_count.json). Compiled blocks move less."""
EXCHANGE_SHARE = 2 / 3
"""Of a link's rate, what an all-to-all reaches: 300 of NVLink's 450 GB/s, an assumption."""
EXCHANGE_FLOOR_S = 5e-5
"""What an all-to-all costs beside its bytes: its launch, ranks that wait for one another, what kernels of fewer rows
lose. An assumption: of FLUX by xDiT on H100s, 28 steps of 4,608 tokens, compiled, 4.30 s on one, 2.68 s on two, 1.63 s
on four (its docs/performance/flux.md), bytes and copies leave 40 to 55 us for each of four exchanges in 57 blocks."""
FACTOR = 1.5
"""Within which published figures of well-made engines lie, both ways (tests/pipeline/planner/test_gpus.py)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. `tflops` are 10^12 operations per second by dtype, dense, with sums in float32; rates are 10^9 bytes per
    second, of links and PCIe in one direction; `matrix_share` and `attention_share` are the shares of `tflops` that
    matrix products and attention reach, and `shares_from` what these rest on."""

    name: str
    title: str
    tflops: dict[str, float]
    memory_gib: float
    memory_gbps: float
    link_gbps: float
    pcie_gbps: float
    source: str
    matrix_share: float
    attention_share: float
    shares_from: str

    @property
    def usable_bytes(self) -> int:
        """Of its memory, what is left for a program."""
        return round(self.memory_gib * _GIB) - CONTEXT_BYTES

    @property
    def host_gbps(self) -> float:
        """10^9 bytes per second of copies from pinned host memory."""
        return HOST_SHARE * self.pcie_gbps

    @property
    def links(self) -> dict[str, float]:
        """10^9 bytes per second, one way, of what links it to its like, the fastest first."""
        pcie = {"pcie": self.pcie_gbps}
        return {"nvlink": self.link_gbps, **pcie} if self.link_gbps > self.pcie_gbps else pcie

    def pick_link(self, wanted: str | None) -> str:
        """`wanted`, or where that is None the fastest. Raises ConfigError: it has no such link."""
        if wanted is not None and wanted not in self.links:
            raise ConfigError(f"--link is {wanted!r}, but {self.title} can be linked by {' or '.join(self.links)}")
        return wanted or next(iter(self.links))

    def ceilings(self, dtype: str, link: str | None = None) -> Ceilings:
        """What it is expected to reach in `dtype`, a key of `tflops`, linked by `link` (`links`; None: the fastest)."""
        peak, link_gbps = self.tflops[dtype], self.links[self.pick_link(link)]
        return Ceilings(
            tflops=self.matrix_share * peak,
            gbps=MEMORY_SHARE * self.memory_gbps,
            link_gbps=MEMORY_SHARE * link_gbps,
            attention_tflops=self.attention_share * peak,
            decode_tflops=CONVOLUTION_SHARE * peak,
            elementwise=ELEMENTWISE_ACTIVATIONS,
            device=self.title,
            exchange=Exchange(EXCHANGE_FLOOR_S, EXCHANGE_SHARE * link_gbps),
        )


_HOPPER = (
    "attention: cuDNN 631 of 989 TFLOP/s at 4,608 tokens of 24 heads (github.com/pytorch/pytorch issue 142132); matrix "
    "products: cuBLAS under the power limit, an assumption"
)
_BLACKWELL = (
    "attention: FlashAttention-4 reaches 1,605 of 2,250 TFLOP/s, 1.3 times cuDNN's (its paper), which torch takes by "
    "default, and less at this length; matrix products: lowered from Hopper's until NVIDIA FlashDreams' published 203 "
    "ms for 12 frames on a GB200 lay within the factor"
)
_GEFORCE = (
    "cards clock above the data sheet's rate: FlashAttention-2 is published with 165 of 165 TFLOP/s on an RTX 4090 "
    "(SageAttention's paper); a tenth is taken off, an assumption"
)

_H100 = Gpu(
    "h100",
    "NVIDIA H100 SXM",
    {"float32": 66.9, "bfloat16": 989.4, "fp8": 1978.9},
    memory_gib=80,
    memory_gbps=3350,
    link_gbps=450,
    pcie_gbps=64,
    source="NVIDIA H100 Tensor Core GPU data sheet: SXM, NVLink 900 GB/s both ways, PCIe 5.0 x16",
    matrix_share=0.65,
    attention_share=0.63,
    shares_from=_HOPPER,
)
_H200 = replace(
    _H100,
    name="h200",
    title="NVIDIA H200 SXM",
    memory_gib=140,
    memory_gbps=4800,
    source="NVIDIA H200 Tensor Core GPU data sheet: SXM, 141 GB, NVLink 900 GB/s both ways, PCIe 5.0 x16",
)
GPUS = {
    gpu.name: gpu
    for gpu in (
        _H100,
        _H200,
        Gpu(
            "b200",
            "NVIDIA B200 SXM",
            {"float32": 75.0, "bfloat16": 2250.0, "fp8": 4500.0},
            memory_gib=179,
            memory_gbps=8000,
            link_gbps=900,
            pcie_gbps=64,
            source="NVIDIA HGX and DGX B200 data sheets, an eighth of eight GPUs; NVLink 1,800 GB/s both ways",
            matrix_share=0.55,
            attention_share=0.5,
            shares_from=_BLACKWELL,
        ),
        Gpu(
            "4090",
            "NVIDIA GeForce RTX 4090",
            {"float32": 82.6, "bfloat16": 165.2, "fp8": 330.3},
            memory_gib=24,
            memory_gbps=1008,
            link_gbps=32,
            pcie_gbps=32,
            source="NVIDIA Ada GPU architecture white paper; no NVLink, so links are PCIe 4.0 x16",
            matrix_share=0.9,
            attention_share=0.9,
            shares_from=_GEFORCE,
        ),
        Gpu(
            "5090",
            "NVIDIA GeForce RTX 5090",
            {"float32": 104.8, "bfloat16": 209.5, "fp8": 419.0},
            memory_gib=32,
            memory_gbps=1792,
            link_gbps=64,
            pcie_gbps=64,
            source="NVIDIA RTX Blackwell GPU architecture white paper; no NVLink, so links are PCIe 5.0 x16",
            matrix_share=0.9,
            attention_share=0.9,
            shares_from=_GEFORCE,
        ),
    )
}
UNKNOWN_HOST_GBPS = HOST_SHARE * 32
"""Copies from pinned host memory to a GPU that is not in the table: PCIe 4.0 x16."""


def find(name: str) -> Gpu:
    """The GPU called `name`. Raises ConfigError: there is none."""
    if name not in GPUS:
        raise ConfigError(
            f"--gpu is {name!r}, but must be one of {', '.join(GPUS)}; of others --tflops and --gbps tell"
        )
    return GPUS[name]


def recognise(title: str) -> Gpu | None:
    """The GPU that a driver calls so, as `NVIDIA H100 80GB HBM3`; None for one that is not in the table."""
    words = title.lower().split()
    if {"pcie", "laptop", "nvl"} & set(words):
        return None  # slower ones of the same name
    return next((gpu for name, gpu in GPUS.items() if name in words), None)
