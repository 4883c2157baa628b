"""Matrix-Game 2's modules by which a world obeys keyboard and mouse: in some blocks, between cross-attention and
feed-forward. Each latent frame sees a window of rows, one for each frame of the video; attention is over time, token by
token, so that earlier latent frames are kept as keys and values of their own (`pipeline.kv_cache.over_time`).

After `wan/modules/action_module.py` of github.com/SkyworkAI/Matrix-Game (MIT). Its norms of queries and keys are stored
and not used, here as there.

Shapes: R rows, F latent frames of a chunk, S tokens of a latent frame, D model width, H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamdiff.device import upload
from streamdiff.models.spec import ActionModules
from streamdiff.models.transformer.rope import gelu

ACTION_MODEL = "action_model"
"""The name of a block's module."""
_QK_EPS = 1e-6


AttendOverTime = Callable[[str, int, Tensor, Tensor, Tensor], Tensor]
"""Attention over the latent frames that each row sees, of the `mouse` or the `keyboard`, in a layer: queries
`[R, F, S, H, d]`, keys and values `[R, F, S, H, d]`, or `[R, F, 1, H, d]` where all tokens see the same, none of them
rotated, to what is mixed `[R, F, S, H, d]`. Mutates: the caches."""


class ActionModule(nn.Module):
    """The module of one block; its names are those of published files."""

    def __init__(self, sizes: ActionModules, width: int) -> None:
        super().__init__()
        inner, hidden = sizes.heads * sizes.head_dim, sizes.hidden
        self.sizes = sizes
        self.keyboard_embed = nn.Sequential(nn.Linear(sizes.keyboard, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.mouse_attn_q = nn.Linear(width, inner, bias=False)
        self.keyboard_attn_kv = nn.Linear(sizes.rows.window * hidden, 2 * inner, bias=False)
        self.proj_keyboard = nn.Linear(inner, width, bias=False)
        if sizes.mouse:
            wide = width + sizes.rows.window * sizes.mouse
            layers = nn.Linear(wide, inner), nn.Identity(), nn.Linear(inner, inner), nn.LayerNorm(inner)
            self.mouse_mlp = nn.Sequential(*layers)
            self.t_qkv = nn.Linear(inner, 3 * inner, bias=False)
            self.proj_mouse = nn.Linear(inner, width, bias=False)

    def forward(self, layer: int, hidden: Tensor, actions: Tensor, attend: AttendOverTime) -> Tensor:
        """Hidden states `[R, L, D]` that obey `actions` `[R, rows, K]`: keyboard columns, then the mouse's."""
        sizes, stride = self.sizes, self.sizes.rows.stride
        count = (actions.shape[1] - sizes.rows.window) // stride + 1
        actions = actions.to(hidden.dtype)
        keyboard, mouse = actions.split((sizes.keyboard, sizes.mouse), -1)
        x = hidden.unflatten(1, (count, -1))
        if sizes.mouse:
            window = self._windows(mouse)[:, :, None].expand(-1, -1, x.shape[2], -1)
            first, _, second, norm = self.mouse_mlp
            mixed = norm(second(gelu(first(torch.cat([x, window], -1)))))
            query, key, value = (self._heads(each) for each in self.t_qkv(mixed).chunk(3, -1))
            mixed = attend("mouse", layer, _unit(query), _unit(key), value)
            x = x + self.proj_mouse(mixed.flatten(-2))
        rows = [self.keyboard_embed(each) for each in keyboard]  # few tokens: one row's must not depend on others
        windows = [self.keyboard_attn_kv(self._windows(each[None])) for each in rows]
        key, value = (self._heads(each)[:, :, None] for each in torch.cat(windows).chunk(2, -1))
        mixed = attend("keyboard", layer, _unit(self._heads(self.mouse_attn_q(x))), _unit(key), value)
        result: Tensor = x + self.proj_keyboard(mixed.flatten(-2))
        return result.flatten(1, 2)

    def _windows(self, rows: Tensor) -> Tensor:
        """Rows `[R, rows, n]` as what each latent frame sees, row after row: `[R, F, window * n]`."""
        seen: Tensor = rows.unfold(1, self.sizes.rows.window, self.sizes.rows.stride)
        return seen.transpose(2, 3).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.sizes.heads, -1))
        return heads


def _unit(x: Tensor) -> Tensor:
    """`x` divided by its root mean square over the head."""
    return F.rms_norm(x, x.shape[-1:], eps=_QK_EPS)


def attach(blocks: nn.ModuleList, sizes: ActionModules, width: int) -> None:
    """Give blocks their modules, without weights. Mutates: blocks."""
    for number in sizes.blocks:
        setattr(blocks[number], ACTION_MODEL, ActionModule(sizes, width))


def frame_factors(first: int, frames: int, sizes: ActionModules, device: torch.device) -> Tensor:
    """Rotary factors of latent frames, complex64 `[F, 1, 1, d / 2]`: only the first `rope_dim` channels turn, as row
    and column are 0 for every token. Never waits for the device."""
    steps = torch.arange(0, sizes.rope_dim, 2, dtype=torch.float64) / sizes.rope_dim
    angle = torch.arange(first, first + frames, dtype=torch.float64)[:, None] * sizes.theta**-steps
    angle = F.pad(angle, (0, (sizes.head_dim - sizes.rope_dim) // 2))[:, None, None]
    factors = torch.complex(angle.cos().float(), angle.sin().float())
    return upload(factors, device)
