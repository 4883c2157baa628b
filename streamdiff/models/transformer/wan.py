"""Forward pass of a causal Wan transformer, cut into pieces that a pipeline stage can own.

The weights are a diffusers `WanTransformer3DModel`; its modules are used, its `forward` is not. A *row* is one chunk at
one noise level: rows of different sessions, chunks and steps share a forward, and only the self-attention callback
knows which keys each row may see. Nothing here holds the state of a stream.

Shapes: R rows, F latent frames per chunk, C channels, h x w latent pixels, L = F * tokens-per-frame, D model width,
H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from torch import Tensor, nn

from streamdiff.models.camera import camera_channels
from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer.attention_backend import Attend, AttendParts, Merge, merge_attention_states
from streamdiff.models.transformer.attention_backend import attend as attend
from streamdiff.models.transformer.lora import Branch
from streamdiff.models.transformer.rope import gelu, multiply_add
from streamdiff.session_state.fields import session_state


@session_state("key-value")
class KeyValue(NamedTuple):
    """Keys and values `[R, tokens, H, d]` of one layer."""

    key: Tensor
    value: Tensor


class SteeredText(NamedTuple):
    """As `KeyValue`, and what a camera does to the block's hidden states, `hidden * scale + shift`, `[R, L, D]`."""

    key: Tensor
    value: Tensor
    scale: Tensor
    shift: Tensor


BlockText = KeyValue | SteeredText
"""What a block is given beside hidden states."""


SelfAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Self-attention callback: selects the cached keys that each row sees, and writes new ones to the cache. It gets the
layer's number, then query, key and value, all `[R, L, H, d]`, normalised but not rotated, and returns the attention
output of the same shape."""

Act = Callable[[int, WanTransformerBlock, Tensor], Tensor]
"""What stands between the cross-attention and the feed-forward of a block: the layer's number, the block and hidden
states `[R, L, D]`, to hidden states."""


class TokenStates(NamedTuple):
    """What travels from stage to stage: hidden states `[R, L, D]`, the time embedding `[R, F, D]` and, where the model
    has such, rows of actions `[R, rows, K]`, float32."""

    hidden: Tensor
    time: Tensor
    actions: Tensor | None = None


class Fused(NamedTuple):
    """Weights `[3D, D]` and biases `[3D]` of a block's query, key and value as one layer."""

    weight: Tensor
    bias: Tensor


class FoldedPatchEmbedding(NamedTuple):
    """The patch embedding of a model with position planes as one linear layer over latents: weight `[C * patch, D]`,
    and a bias of each token of a frame `[1, L / F, D]`, into which the planes are folded; `control` `[D, K]` as of
    `WanDenoiser.control_weight`."""

    weight: Tensor
    bias: Tensor
    control: Tensor | None


class BlockWeights(NamedTuple):
    """A block's modules, its `fused` weights where there are any, and the LoRAs that rows of a forward have."""

    block: WanTransformerBlock
    fused: Fused | None
    branches: Sequence[Branch] = ()


class BlockSource(Protocol):
    """Provides the weights of blocks that are not all on the device (offloading)."""

    def weights(self, layer: int) -> BlockWeights:
        """Those of block `layer`, on the device for the work that is given to it until the next call."""

    def part(self, first: int, last: int) -> BlockSource:
        """The same of blocks `first` to `last` (exclusive) only."""


# In a graph they are the very numbers that the plain path has.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def position_planes(
    count: int, height: int, width: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32,
    frames: int | None = None,
) -> Tensor:  # fmt: skip
    """`count` fixed planes `[count, h, w]` that encode each latent pixel's position, an input beside the latents. With
    `frames`: `[1, count, F, h, w]`, the same for each.

    Rotary positions are relative, so a small model cannot know the picture's borders without them. They use the same
    door as the condition channels of Wan's image-to-video models: more input than output channels. Not to be written.
    """
    return _position_planes(count, height, width, device, dtype, frames)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _position_planes(
    count: int, height: int, width: int, device: torch.device | None, dtype: torch.dtype, frames: int | None
) -> Tensor:
    planes: list[Tensor] = []
    y = (torch.arange(height) + 0.5) / height
    x = (torch.arange(width) + 0.5) / width
    for order in range(1, count // 4 + 2):
        for wave in (torch.cos, torch.sin):
            planes.append(wave(torch.pi * order * y)[:, None].expand(height, width))
            planes.append(wave(torch.pi * order * x)[None, :].expand(height, width))
    made = (torch.stack(planes[:count]) if count else torch.zeros(0, height, width)).to(device, dtype)
    return made if frames is None else made[None, :, None].expand(-1, -1, frames, -1, -1)


CAMERA_PATCHES = "patch_embedding_wancamctrl"
"""The layer that camera channels enter by, in models that have one (LingBot-World)."""
_CAMERA_TOP = ("c2ws_hidden_states_layer1", "c2ws_hidden_states_layer2")
_CAMERA_BLOCK = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")


def make_transformer(architecture: Mapping[str, Any]) -> WanTransformer3DModel:
    """diffusers' model of this architecture, the arguments of its class; with `camera_channels`, the inputs of
    `CAMERA_PATCHES`, it and its blocks have the layers of a camera too."""
    sizes = {**architecture}
    channels, width = sizes.pop("camera_channels", None), sizes["num_attention_heads"] * sizes["attention_head_dim"]
    model: WanTransformer3DModel = WanTransformer3DModel.from_config(sizes)
    if channels is not None:
        model.add_module(CAMERA_PATCHES, nn.Linear(channels, width))
        for owner, names in ((model, _CAMERA_TOP), *((block, _CAMERA_BLOCK) for block in model.blocks)):
            for name in names:
                owner.add_module(name, nn.Linear(width, width))
    return model


class WanDenoiser:
    """A `WanTransformer3DModel` in parts: text, embedding, blocks, output layer. Holds weights and constants only."""

    def __init__(self, model: WanTransformer3DModel, controls: int = 0, condition: int = 0) -> None:
        """`controls`: the last input channels of the patch embedding are one plane for each of so many controls.
        `condition`: so many input channels behind the latents' come with these, see `ModelSpec.condition_channels`."""
        self.model = model
        self.controls = controls
        config: Any = model.config
        self.patch: tuple[int, int, int] = tuple(config.patch_size)
        self.heads: int = config.num_attention_heads
        self.head_dim: int = config.attention_head_dim
        self.latent_channels: int = config.out_channels
        self.extra_channels: int = config.in_channels - config.out_channels - controls - condition
        """Position planes, see `position_planes`."""
        self.blocks = cast("list[WanTransformerBlock]", list(model.blocks))
        self.attention = "auto"
        """The kernel that attention runs with, see `models.transformer.attention_backend`."""
        self.fused: list[Fused] = []
        """One per block after `fuse`, else empty."""
        self.tables: Tensor | None = None
        """The blocks' modulation tables `[blocks, 1, 1, 6, D]` after `fuse`."""
        self.block_source: BlockSource | None = None
        """Where weights of `blocks` are taken from, if not from the modules: these lie in host memory then."""

    def part(self, first: int, last: int) -> WanDenoiser:
        """The same weights with blocks `first` to `last` (exclusive) only: what a stage runs."""
        part = copy(self)
        part.blocks, part.fused = self.blocks[first:last], self.fused[first:last]
        part.tables = self.tables[first:last] if self.tables is not None else None
        part.block_source = self.block_source.part(first, last) if self.block_source is not None else None
        return part

    def fuse(self) -> WanDenoiser:
        """Let query, key and value be one product, all blocks' modulation one sum, and the norm before text one kernel,
        which takes its weights in the model's dtype, as the models' own code has them. Nothing is held twice: the
        modules' own weights become views of the fused ones, so both ways of running go on. Not to be moved afterwards.
        Weights in 8 bits (`models.transformer.quantization`) stay three products. Mutates: self, the memory of the
        model's weights.
        Returns self."""
        self.fused, self.tables = [], None
        for block in self.blocks:
            layers = block.attn1.to_q, block.attn1.to_k, block.attn1.to_v
            if any(type(layer.weight) is not nn.Parameter for layer in layers):
                break
            weight = torch.cat([layer.weight.detach() for layer in layers])
            bias = torch.cat([layer.bias.detach() for layer in layers])
            for layer, own, own_bias in zip(layers, weight.chunk(3), bias.chunk(3), strict=True):
                layer.weight.data, layer.bias.data = own, own_bias
            self.fused.append(Fused(weight, bias))
        self.tables = torch.stack([block.scale_shift_table.detach() for block in self.blocks])[:, None]
        for block, table in zip(self.blocks, self.tables, strict=True):
            block.scale_shift_table.data = table[0]
            for weight in block.norm2.parameters():
                weight.data = weight.data.to(self.dtype)
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, and of everything that travels between stages."""
        return self.blocks[0].attn1.to_q.weight.dtype

    @property
    def width(self) -> int:
        """Model width D."""
        return self.heads * self.head_dim

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """TokenStates of a chunk of (F, h, w) latent pixels."""
        return prod(size // patch for size, patch in zip(grid, self.patch, strict=True))

    def text(self, embeddings: Tensor, branches: Sequence[Sequence[Branch]] = ()) -> list[KeyValue]:
        """Cross-attention keys and values of each of the blocks for text embeddings `[R, T, text_dim]`, or for a
        picture's features of a model that has these in their place; `branches` are the rows', block by block."""
        embedder = self.model.condition_embedder
        context: Tensor = (embedder.image_embedder or embedder.text_embedder)(embeddings)
        result = []
        for layer in range(len(self.blocks)):
            cross, own = self.weights(layer).block.attn2, branches[layer] if branches else ()
            key = cross.norm_k(add_branches(own, "attn2.to_k", context, cross.to_k(context)))
            value = add_branches(own, "attn2.to_v", context, cross.to_v(context))
            result.append(KeyValue(self._split(key), self._split(value)))
        return result

    def embed(self, latents: Tensor, timestep: Tensor, controls: Tensor | None = None) -> TokenStates:
        """Latents `[R, C, F, h, w]`, timesteps in [0, 1000] `[R, F]` and controls as in `patches` to tokens."""
        hidden = self.patches(latents, controls=controls)
        return TokenStates(hidden, self.time_embedding(timestep).type_as(hidden))

    def patches(
        self, latents: Tensor, folded: FoldedPatchEmbedding | None = None, controls: Tensor | None = None
    ) -> Tensor:
        """Latents `[R, C, F, h, w]` and `controls` `[R, F, K]`, one vector per latent frame (None: all 0), to hidden
        states `[R, L, D]`. `folded` is what `fold_position_planes` returns; without it the layer runs as in the
        original, over latents and position planes."""
        if folded is not None:
            hidden = _row_by_row(partial(self._folded_patches, folded), latents)
            return hidden if controls is None else add_controls(hidden, controls, folded.control)
        if self.extra_channels:
            rows, _, frames, height, width = latents.shape
            planes = position_planes(self.extra_channels, height, width, latents.device, latents.dtype, frames)
            latents = torch.cat([latents, planes.expand(rows, -1, -1, -1, -1) if rows > 1 else planes], 1)
        layer: Callable[[Tensor], Tensor] = self.model.patch_embedding
        if self.controls:
            own = self.model.patch_embedding
            layer = partial(F.conv3d, weight=own.weight[:, : -self.controls], bias=own.bias, stride=self.patch)
        hidden = _row_by_row(layer, latents).flatten(2).transpose(1, 2).contiguous()
        return hidden if controls is None else add_controls(hidden, controls, self.control_weight())

    def control_weight(self) -> Tensor | None:
        """The patch embedding of the control planes, each the same all over a latent frame, as a linear layer `[D, K]`;
        None where the model has no controls."""
        return self.model.patch_embedding.weight[:, -self.controls :].sum((2, 3, 4)) if self.controls else None

    @torch.no_grad()
    def fold_position_planes(self, height: int, width: int) -> FoldedPatchEmbedding | None:
        """The patch embedding for latents of this size, with its position planes folded into the bias; None where the
        model has none, or its patches are not square. Weights must not change afterwards."""
        layer, square = self.model.patch_embedding, self.patch == (1, self.patch[1], self.patch[1])
        if not self.extra_channels or not square:
            return None
        channels = self.latent_channels, self.latent_channels + self.extra_channels
        ours, rest, _ = layer.weight.tensor_split(channels, 1)
        planes = position_planes(self.extra_channels, height, width, ours.device, ours.dtype, 1)
        bias = F.conv3d(planes, rest, layer.bias, self.patch)
        tokens = bias.flatten(2).transpose(1, 2).contiguous()
        return FoldedPatchEmbedding(ours.flatten(1).t().contiguous(), tokens, self.control_weight())

    def _folded_patches(self, folded: FoldedPatchEmbedding, latents: Tensor) -> Tensor:
        """`patches` of rows `[R, C, F, h, w]`: products of latents alone, and no planes copied beside them."""
        frames = F.pixel_unshuffle(latents.transpose(1, 2).flatten(0, 1), self.patch[1]).flatten(2).transpose(1, 2)
        hidden = torch.baddbmm(folded.bias, frames, folded.weight.expand(len(frames), -1, -1))
        return hidden.reshape(len(latents), -1, self.width)

    @property
    def has_camera(self) -> bool:
        """Whether blocks are steered by a camera."""
        return hasattr(self.model, CAMERA_PATCHES)

    def camera_embedding(self, cameras: Tensor, height: int, width: int) -> Tensor:
        """Cameras `[R, F, VALUES]` (see `models.camera`) of `height` x `width` latent pixels to what all blocks make
        their own of, `[R, L, D]`, row by row."""
        model: Any = self.model
        return torch.cat([self._camera_row(model, own, height, width) for own in cameras])

    def _camera_row(self, model: Any, own: Tensor, height: int, width: int) -> Tensor:
        patches = F.pixel_unshuffle(camera_channels(own, height, width), self.patch[1]).flatten(2).transpose(1, 2)
        embedded = getattr(model, CAMERA_PATCHES)(patches.flatten(0, 1)[None].to(self.dtype))
        first, second = (getattr(model, name) for name in _CAMERA_TOP)
        result: Tensor = embedded + second(F.silu(first(embedded)))
        return result

    def steered(self, weights: BlockWeights, text: BlockText, embedding: Tensor) -> SteeredText:
        """`text` of a block with its scale and shift from the camera embedding `[R, L, D]`, which is made row by
        row."""
        first, second, scale, shift = (getattr(weights.block, name) for name in _CAMERA_BLOCK)

        def of_row(row: Tensor) -> tuple[Tensor, Tensor]:
            own = row + second(F.silu(first(row)))
            return 1 + scale(own), shift(own)

        rows = [of_row(row) for row in embedding.split(1)]
        made = [torch.cat(parts) if len(rows) > 1 else parts[0] for parts in zip(*rows, strict=True)]
        return SteeredText(text.key, text.value, *made)

    def time_embedding(self, timestep: Tensor) -> Tensor:
        """Timesteps in [0, 1000] `[R, F]` to time embeddings `[R, F, D]`, in the dtype of the layer that makes them."""
        embedder = self.model.condition_embedder
        waves = embedder.timesteps_proj(timestep.flatten()).unflatten(0, timestep.shape)
        time: Tensor = embedder.time_embedder(waves.to(embedder.time_embedder.linear_1.weight.dtype))
        return time

    def modulation(self, time: Tensor) -> Tensor:
        """Shift, scale and gate of both halves of a block, before the block's own table: `[R, F, 6, D]`."""
        embedder = self.model.condition_embedder
        return cast(Tensor, _row_by_row(embedder.time_proj, embedder.act_fn(time)).unflatten(-1, (6, -1)))

    def run_blocks(
        self, tokens: TokenStates, text: Iterable[BlockText], self_attention: SelfAttention, act: Act | None = None,
        camera: Tensor | None = None, branches: Sequence[Sequence[Branch]] = (),
    ) -> TokenStates:  # fmt: skip
        """Run the blocks. `text` holds one entry per block; what the camera embedding `camera` `[R, L, D]` is to a
        block is made here, None: there is none, or `text` has it. `branches` are the rows', block by
        block; `text` has its own.

        What a block computes reads nothing of its own but from arguments, so that one compiled graph does for all.
        """
        modulation = self._modulation_of_blocks(self.modulation(tokens.time).float())
        hidden, attend = tokens.hidden, self.attend
        for layer, own in zip(range(len(self.blocks)), text, strict=True):
            weights = self.weights(layer)
            weights = weights._replace(branches=branches[layer]) if branches else weights
            mixed = self_attention(layer, *self.before_attention(weights, hidden, modulation[layer]))
            own_act = None if act is None else partial(act, layer)
            own = own if camera is None else self.steered(weights, own, camera)
            hidden = self.after_attention(weights, hidden, modulation[layer], own, mixed, attend, own_act)
        return tokens._replace(hidden=hidden)

    @property
    def attend(self) -> Attend:
        """The kernel that attention runs with."""
        return attention_backend.kernel(self.attention)

    def attend_parts(self, merge: Merge = merge_attention_states) -> AttendParts:
        """The same over keys and values in pieces, whose results are put together by `merge`."""
        return attention_backend.attention_over_segments(self.attention, merge)

    def weights(self, layer: int) -> BlockWeights:
        """Weights of a block, valid until the next call."""
        if self.block_source is not None:
            return self.block_source.weights(layer)
        return BlockWeights(self.blocks[layer], self.fused[layer] if self.fused else None)

    def output_layer(self, tokens: TokenStates, grid: tuple[int, int, int]) -> Tensor:
        """TokenStates to the predicted flow `[R, C, F, h, w]`; `grid` is (F, h, w) in latent units."""
        return self.unpatch(self.output(tokens), grid)

    def output(self, tokens: TokenStates) -> Tensor:
        """TokenStates, or some of each latent frame, to the flow of each one's patch `[R, L, patch * C]`."""
        shift, scale = (self.model.scale_shift_table.unsqueeze(0) + tokens.time.unsqueeze(2)).unbind(2)
        normal = _modulate(self.model.norm_out(tokens.hidden.float()), shift, 1 + scale, tokens.hidden.dtype)
        flow: Tensor = self.model.proj_out(normal)
        return flow

    def unpatch(self, flow: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The flow `[R, C, F, h, w]` from that of all tokens' patches, see `output`."""
        (frames, height, width), (pt, ph, pw) = grid, self.patch
        flow = flow.reshape(-1, frames // pt, height // ph, width // pw, pt, ph, pw, self.latent_channels)
        return flow.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(-1, self.latent_channels, frames, height, width)

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, self.head_dim))
        return heads

    def _modulation_of_blocks(self, modulation: Tensor) -> Sequence[Tensor]:
        """The modulation `[R, F, 6, D]` of each block, see `block_modulation`, once per forward."""
        if self.tables is not None:
            return block_modulation(self.tables, modulation).unbind()
        return [block_modulation(block.scale_shift_table, modulation) for block in self.blocks]

    def before_attention(
        self, weights: BlockWeights, hidden: Tensor, modulation: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A block up to its self-attention: queries, keys and values `[R, L, H, d]`, not rotated."""
        block, fused, branches = weights
        shift, scale, _, _, _, _ = modulation.unbind(2)
        normal = _modulate(_norm(block.norm1, hidden), shift, scale, hidden.dtype)
        query, key, value = _query_key_value(block.attn1, fused, normal, branches)
        return self._split(query), self._split(key), self._split(value)

    def after_attention(
        self, weights: BlockWeights, hidden: Tensor, modulation: Tensor, text: BlockText, mixed: Tensor, attend: Attend,
        act: Callable[[WanTransformerBlock, Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The rest of a block, from `mixed`, what its self-attention returned, and `hidden`, what came into it; `act`
        as of `run_blocks`."""
        hidden = self.to_cross_attention(weights, hidden, modulation, text, mixed, attend)
        if act is not None:
            hidden = act(weights.block, hidden)
        return self.feed_forward(weights, hidden, modulation)

    def to_cross_attention(
        self, weights: BlockWeights, hidden: Tensor, modulation: Tensor, text: BlockText, mixed: Tensor, attend: Attend
    ) -> Tensor:
        """`after_attention`, cross-attention included."""
        block, _, branches = weights
        gate, mixed = modulation[:, :, 2], mixed.flatten(2)
        hidden = _gated(hidden, add_branches(branches, "attn1.to_out.0", mixed, block.attn1.to_out[0](mixed)), gate)
        if isinstance(text, SteeredText):
            hidden = torch.addcmul(text.shift, hidden, text.scale)

        cross = block.attn2
        normal = _norm(block.norm2, hidden)
        query = self._split(cross.norm_q(add_branches(branches, "attn2.to_q", normal, cross.to_q(normal))))
        mixed = attend(query, text.key, text.value).flatten(2)
        return hidden + add_branches(branches, "attn2.to_out.0", mixed, cross.to_out[0](mixed))

    def feed_forward(self, weights: BlockWeights, hidden: Tensor, modulation: Tensor) -> Tensor:
        """The end of a block, after cross-attention and actions."""
        block, _, branches = weights
        _, _, _, ff_shift, ff_scale, ff_gate = modulation.unbind(2)
        normal = _modulate(_norm(block.norm3, hidden), ff_shift, ff_scale, hidden.dtype)
        widen, _, narrow = cast(Any, block.ffn.net)
        wide = gelu(add_branches(branches, "ffn.net.0.proj", normal, widen.proj(normal)))
        return _gated(hidden, add_branches(branches, "ffn.net.2", wide, narrow(wide)), ff_gate)


def concat_rows(texts: Sequence[BlockText]) -> BlockText:
    """Concatenate what one layer is given for several rows; that of one row is returned without a copy."""
    kind = type(texts[0])
    return texts[0] if len(texts) == 1 else kind(*(torch.cat(parts) for parts in zip(*texts, strict=True)))


def _row_by_row(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`layer` of `rows` `[R, ...]`, on a CPU of one after the other: there a convolution, and a product with few
    tokens, sum in another order when there are more rows, and a row's result must not depend on the rows beside it."""
    if len(rows) == 1 or rows.device.type != "cpu":
        return layer(rows)
    return torch.cat([layer(row) for row in rows.split(1)])


def add_controls(hidden: Tensor, controls: Tensor, weight: Tensor | None) -> Tensor:
    """Hidden states `[R, L, D]`, each latent frame's tokens with its vector of `controls` `[R, F, K]`, by `weight`
    `[D, K]`, None of a model without controls."""
    assert weight is not None, "only what a model has is given"
    frames = hidden.unflatten(1, (controls.shape[1], -1))
    steered = _row_by_row(partial(F.linear, weight=weight), controls.to(hidden.dtype))
    result: Tensor = (frames + steered[:, :, None]).flatten(1, 2)
    return result


def block_modulation(table: Tensor, modulation: Tensor) -> Tensor:
    """A block's shift, scale and gate of both halves `[R, F, 6, D]` from its table and what all blocks have in common;
    one is added to the scales, so that a normalised activation is multiplied by them as they are."""
    own = table + modulation
    own[..., 1::3, :] += 1
    return own


def _query_key_value(
    own: Any, fused: Fused | None, normal: Tensor, branches: Sequence[Branch]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normalised, and values of self-attention `own`, all `[R, L, D]`."""
    if fused is None:
        query, key, value = own.to_q(normal), own.to_k(normal), own.to_v(normal)
    else:
        query, key, value = F.linear(normal, *fused).chunk(3, -1)
    for name, each in zip(("to_q", "to_k", "to_v") if branches else (), (query, key, value), strict=False):
        add_branches(branches, f"attn1.{name}", normal, each)
    return own.norm_q(query), own.norm_k(key), value


def add_branches(branches: Sequence[Branch], layer: str, given: Tensor, result: Tensor) -> Tensor:
    """What the linear layer `layer` of a block has made of `given`, both `[R, ...]`, with its branches. Mutates:
    result."""
    for first, end, factors, scale in branches:
        if (pair := factors.get(layer)) is not None:
            result[first:end] += F.linear(F.linear(given[first:end], pair.down) * scale, pair.up)
    return result


def _norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    """A layer norm of `hidden` in its dtype by one kernel, which computes in float32 inside: where it has no weights,
    or has them in that dtype, as that before cross-attention after `fuse`. Some models have none there."""
    own = norm.weight if isinstance(norm, nn.LayerNorm) else None
    if not isinstance(norm, nn.LayerNorm) or (own is not None and own.dtype != hidden.dtype):
        return cast(Tensor, norm(hidden))
    return F.layer_norm(hidden, norm.normalized_shape, own, norm.bias, norm.eps)


def _modulate(normal: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`normal * scale + shift` with one shift and scale `[R, F, D]` per latent frame, in `dtype`."""
    frames: Tensor = normal.unflatten(1, (shift.shape[1], -1))
    return multiply_add(shift.unsqueeze(2), frames, scale.unsqueeze(2), dtype).flatten(1, 2)


def _gated(hidden: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """`hidden + update * gate` with one gate `[R, F, D]` per latent frame."""
    frames = hidden.unflatten(1, (gate.shape[1], -1))
    return multiply_add(frames, update.unflatten(1, frames.shape[1:3]), gate.unsqueeze(2), hidden.dtype).flatten(1, 2)
