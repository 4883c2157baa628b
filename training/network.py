"""The embedded model in training: its transformer over whole windows at once, and its text encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.models.tiny import prompts
from streamdiff.models.tiny.model import TinyText
from streamdiff.models.transformer import rope
from streamdiff.models.transformer.attention_backend import Attend
from streamdiff.models.transformer.wan import BlockWeights, KeyValue, TokenStates, WanDenoiser, add_controls, attend
from training.autoencoder import AUTOENCODER
from training.embedded import WIDTH
from training.model_folder import build_text
from training.rows import Rows
from training.scene_rows import FIELD_SIZES, from_row
from training.windows import CHUNK
from training.world.tracks import CONTROLS

TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "in_channels": AUTOENCODER.latent_channels + 32,
    "out_channels": AUTOENCODER.latent_channels,
    "text_dim": WIDTH,
    "freq_dim": 128,
    "ffn_dim": 768,
    "num_layers": 6,
    "cross_attn_norm": True,
}


@dataclass(frozen=True)
class Forward:
    """Input of the network: noisy latents `[B * rows, C, F, h, w]`, their sigma `[B, rows]`, token ids
    `[B * rows, tokens]`, controls `[B * rows, F, K]`, and which rows each row attends to."""

    latents: Tensor
    sigma: Tensor
    ids: Tensor
    controls: Tensor
    rows: Rows


@dataclass(frozen=True)
class Lesson(Forward):
    """A forward with its training target: the flow, like `latents`, and loss weights `[B, rows, 1, F, h, w]`."""

    wanted: Tensor
    weight: Tensor

    def loss(self, flow: Tensor) -> Tensor:
        """Weighted mean squared error of `flow` over the rows that have a target."""
        target = self.rows.target.to(flow.device, non_blocking=True)
        error = self.weight * (flow.float() - self.wanted).square().unflatten(0, self.sigma.shape)
        error = error.mean((2, 3, 4, 5)) / self.weight.mean()
        loss: Tensor = (error * target).sum() / target.sum().clamp(min=1)
        return loss


class BlockCausal:
    """Self-attention over whole windows at once: rows are chunks, `visible[i]` lists the rows that row i sees.

    Stands in for the cache that a stream uses, so that training and streaming run the same transformer code.
    """

    def __init__(self, windows: int, rows: Rows, latents: int = CHUNK) -> None:
        """`latents`: latent frames of a row."""
        self.shape, self.rows, self.latents = (windows, len(rows.visible)), rows, latents

    @property
    def count(self) -> int:
        """Rows of all windows."""
        return self.shape[0] * self.shape[1]

    def factors(self, tokens: tuple[int, int], head_dim: int, device: torch.device) -> Tensor:
        """Rotary factors of every row, see `rope.table`, `[count, L, 1, head_dim / 2]`; on a GPU as `rope.matrices` has
        them, `[count, 2, L, 1, head_dim / 2, 2]`."""
        frames = torch.tensor(self.rows.chunk)[:, None] * self.latents + torch.arange(self.latents)
        table = rope.table(frames.to(device, non_blocking=True), *tokens, head_dim)
        if device.type == "cuda":
            table = rope.matrices(table).transpose(0, 1)
        return table.expand(self.shape[0], *table.shape).flatten(0, 1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys, values = (each.unflatten(0, self.shape).unbind(1) for each in (query, key, value))
        mixed = []
        for own, seen in zip(queries, self.rows.visible, strict=True):
            mixed.append(_attend(own, *(torch.cat([each[row] for row in seen], 1) for each in (keys, values))))
        return torch.stack(mixed, 1).flatten(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend`; written out in bfloat16 on a CPU, where torch's own takes twice as long forwards and backwards."""
    if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return attend(query, key, value)
    query, key, value = (each.bfloat16().transpose(1, 2) for each in (query, key, value))
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    with torch.autocast("cpu", enabled=False):
        return (torch.softmax(scores, -1) @ value).transpose(1, 2)


def _mark_rows_dynamic(*tensors: Tensor) -> None:
    """Tell the compiler that the number of rows, the first axis of each, differs from call to call."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


class TrainedDenoiser(WanDenoiser):
    """A denoiser in training: its cross-attention, too, runs by `_attend`, and its blocks may be compiled."""

    def __init__(self, model: WanTransformer3DModel) -> None:
        super().__init__(model)
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._rotated
        self._after: Callable[..., Tensor] = self.after_attention

    def compile(self, backend: str = "inductor") -> None:
        """Compile what a block does before and after its self-attention, forwards and backwards; one graph for all
        blocks and any number of rows. Mutates: self."""
        self._before = torch.compile(self._rotated, backend=backend)
        self._after = torch.compile(self.after_attention, backend=backend)

    def run_rows(self, tokens: TokenStates, text: Sequence[KeyValue], factors: Tensor, mix: Attend) -> TokenStates:
        """Run the blocks over whole windows: `mix` is their self-attention; factors as of `BlockCausal`."""
        modulation = self._modulation_of_blocks(self.modulation(tokens.time).float())
        hidden = tokens.hidden
        for layer in range(len(self.blocks)):
            weights, own = self.weights(layer), modulation[layer]
            _mark_rows_dynamic(hidden, own, factors, *text[layer])
            query, key, value = self._before(weights, hidden, own, factors)
            mixed = mix(query, key, value)
            _mark_rows_dynamic(mixed)
            hidden = self._after(weights, hidden, own, text[layer], mixed, _attend)
        return TokenStates(hidden, tokens.time)

    def _rotated(
        self, weights: BlockWeights, hidden: Tensor, modulation: Tensor, factors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`before_attention`, with queries and keys rotated, in the dtype that attention runs in."""
        query, key, value = self.before_attention(weights, hidden, modulation)
        turns = factors if factors.is_complex() else factors.transpose(0, 1)
        query, key = rope.rotate(query, turns), rope.rotate(key, turns)
        if torch.is_autocast_enabled(hidden.device.type):
            query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
        return query, key, value


class Network(nn.Module):
    """Text encoder and transformer, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.text = build_text()
        self.encoder = self.text.encoder
        self.transformer = WanTransformer3DModel(**TRANSFORMER)
        self.denoiser = TrainedDenoiser(self.transformer)
        self.reader = nn.Linear(WIDTH, sum(FIELD_SIZES))  # used in training only
        self.control = nn.Linear(len(CONTROLS), self.denoiser.width, bias=False)
        """Input channels of the patch embedding in the `finished` model; apart, it learns at its own rate."""
        nn.init.zeros_(self.control.weight)

    def tokens(self, scenes: Tensor) -> Tensor:
        """The ids `[..., tokens]` of the sentences of `scenes` `[..., fields]`."""
        texts = [prompts.canonical(from_row(row)) for row in scenes.flatten(0, -2).tolist()]
        ids: Tensor = self.text.tokens(texts).unflatten(0, scenes.shape[:-1])
        return ids

    def load_model(self, model: Model) -> tuple[Tensor, Tensor]:
        """Load the weights of `model`; returns the mean and the deviation of the latents that it was trained on.

        The reader, which no model has, begins at zero, where it changes nothing yet. Mutates: self.
        """
        assert isinstance(model.text, TinyText) and model.decoder is not None
        normalisation = model.decoder.network.normalisation
        assert normalisation is not None, "a folder always says it"
        state, controls = model.denoiser.model.state_dict(), model.denoiser.controls
        if controls:
            self.control.load_state_dict({"weight": model.denoiser.control_weight()})
            state["patch_embedding.weight"] = state["patch_embedding.weight"][:, :-controls]
        self.transformer.load_state_dict(state)
        self.encoder.load_state_dict(model.text.encoder.state_dict())
        nn.init.zeros_(self.reader.weight)
        return normalisation.mean.flatten(), normalisation.std.flatten()

    def finished(self) -> WanTransformer3DModel:
        """The transformer with the controls as the last input channels of its patch embedding."""
        made: WanTransformer3DModel = WanTransformer3DModel(
            **TRANSFORMER | {"in_channels": TRANSFORMER["in_channels"] + len(CONTROLS)}
        )
        state = self.transformer.state_dict()
        kernel = state["patch_embedding.weight"]
        planes = self.control.weight.detach()[:, :, None, None, None] / kernel[0, 0].numel()
        state["patch_embedding.weight"] = torch.cat([kernel, planes.expand(-1, -1, *kernel.shape[2:])], 1)
        made.load_state_dict(state)
        return made

    def flow(self, forward: Forward) -> Tensor:
        """Predicted flow, in the shape of the latents."""
        return self.flows([forward])[0]

    def flows(self, forwards: Sequence[Forward]) -> list[Tensor]:
        """The flow of each, all of chunks of one length, by one pass of the blocks, as starting a pass costs a GPU more
        than what it computes."""
        latents = torch.cat([each.latents for each in forwards])
        _, _, frames, height, width = latents.shape
        patch = self.denoiser.patch
        tokens = (height // patch[1], width // patch[2])
        timestep = torch.cat([(each.sigma * sampling.TIMESTEPS).flatten() for each in forwards])[:, None]
        text: list[KeyValue] = self.denoiser.text(self.text.embed(torch.cat([each.ids for each in forwards])))
        state = self.denoiser.embed(latents, timestep.expand(-1, frames))
        controls = torch.cat([each.controls for each in forwards])
        state = TokenStates(add_controls(state.hidden, controls, self.control.weight), state.time)
        parts = [BlockCausal(len(each.sigma), each.rows, frames) for each in forwards]
        counts = [part.count for part in parts]
        factors = torch.cat([part.factors(tokens, self.denoiser.head_dim, latents.device) for part in parts])

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own = zip(parts, query.split(counts), key.split(counts), value.split(counts), strict=True)
            return torch.cat([part(*rest) for part, *rest in own])

        state = self.denoiser.run_rows(state, text, factors, attention)
        return list(self.denoiser.output_layer(state, (frames, height, width)).split(counts))

    def losses(self, lessons: Mapping[str, Lesson]) -> dict[str, Tensor]:
        """The loss of each lesson."""
        found: dict[str, Tensor] = {}
        for length in sorted({lesson.latents.shape[2] for lesson in lessons.values()}):
            alike = {kind: lesson for kind, lesson in lessons.items() if lesson.latents.shape[2] == length}
            flows = self.flows(list(alike.values()))
            found |= {kind: lesson.loss(flow) for (kind, lesson), flow in zip(alike.items(), flows, strict=True)}
        return found
