"""What runs, and where, as keyword arguments of `streamdiff.open`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from pydantic import ValidationError

from streamdiff.config import RENAMED, ModelConfig
from streamdiff.errors import ConfigError


class ModelOptions(TypedDict, total=False):
    """What runs, and where.

    model: `tiny`, the embedded model (default), a name that `streamdiff models` lists, a hub id, or a folder.
    weights, lora, vae, text_encoder: paths of parts in place of the model's own; `vae` may be a name such as `taew2_1`.
    text_device: where a large text encoder runs, `cpu` or `cuda`; default: on a GPU that has three times its size free.
    dtype: `float32` or `bfloat16`; default: bfloat16 on CUDA.
    preset: `plain`: none of the fast paths that CUDA has by default; `fast`: also the small autoencoder and the fewest
        steps. Other options win over it.
    attention: kernel that `streamdiff doctor` lists, tried out when the model is loaded; default: on CUDA the fastest.
    quantize: the blocks' linear layers in 8 bits, `none`, `fp8` (recent NVIDIA GPUs), `int8`, or `auto`: fp8 where it
        is faster; needs torchao.
    offload: `blocks` keeps the transformer's blocks in host memory and copies them one ahead, for cards that are too
        small; default `none`.
    compile: `on` makes graphs of the transformer first, or finds those of an earlier start on disk, and runs these;
        default: `on` with CUDA, else `off`.
    size: `WIDTHxHEIGHT` in pixels; default: the model's own.
    device: `auto`, `cpu` or `cuda`.
    steps: denoise steps per chunk, of those the model has; default: what it was made for. The embedded one has 4 and 2.
    timesteps, chunk_latents: of a model that the catalogue does not know, what it is told at each step, and the latent
        frames of a chunk; window, sink and rope have to be said too then.
    kv_context: what a chunk sees of earlier chunks: `clean`, `staircase` or `same_step`; default: what it was made for.
    window, sink: latent frames a chunk can see, the sink and itself included, and those of the beginning that stay in
        sight; `rope`: `absolute` or `relative` positions. Default: the model's own.
    threads: CPU threads of the transformer.
    stages: ranks over which the transformer is split. With more than one this process must be rank 0 of as many
        (torchrun starts them), and the others must call `run_worker` with the same options.
    parallel: `PxC`, P stages that C ranks share each, as `2x2`; in place of `stages`.
    decode_rank: which rank decodes: `head`, `last`, or `dedicated`, which takes one rank more.
    """

    model: str
    weights: str
    lora: str
    vae: str
    text_encoder: str
    text_device: str
    preset: str
    dtype: str
    attention: str
    quantize: str
    offload: str
    compile: str
    size: str
    device: str
    steps: int | None
    timesteps: tuple[float, ...]
    chunk_latents: int
    kv_context: str
    window: int
    sink: int
    rope: str
    threads: int
    stages: int
    parallel: str
    decode_rank: str


def model_config(options: Mapping[str, object]) -> ModelConfig:
    """Raises ConfigError for a value out of range, TypeError for an option that there is not."""
    for option in options:
        if (new := RENAMED.get(f"model.{option}")) is not None:
            raise TypeError(f"the option {option} is called {new.removeprefix('model.')} now")
    if unknown := set(options) - ModelOptions.__annotations__.keys():
        raise TypeError(
            f"there is no option {', '.join(sorted(unknown))}; known are {', '.join(ModelOptions.__annotations__)}"
        )
    values = {"name" if option == "model" else option: value for option, value in options.items()}
    from streamdiff.models.resolve import completed

    try:
        return completed(ModelConfig.model_validate(values))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{option} is {first['input']!r:.80}: {first['msg']}") from error
