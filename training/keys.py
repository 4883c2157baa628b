"""Random keys: control vectors of streams, chunk by chunk, as somebody plays.

Keys are pressed and released at chunk boundaries, mostly; in some chunks a tap lasts for the first latent frame, and
seldom keys change later in the chunk. A camera pans for whole chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.windows import CHUNK
from training.world.tracks import CONTROLS

PLAYED = 0.7
"""Share of the streams that somebody plays; the others never have a key."""
CHANGE = 0.5
"""Share of the chunks at whose beginning other keys are held."""
KINDS = {"none": 0.2, "move": 0.25, "stop": 0.1, "pan": 0.3, "both": 0.15}
"""Which keys are held then; `both` moves and pans."""
TAP, LATE = 0.15, 0.05
"""Shares of the chunks with a tap, and with keys that change at a later latent frame."""
STRAIGHT, HALF = 0.7, 0.1
"""Shares of the moves along one axis, and of those at half the speed, as a stick can say."""
PAN, STOP = CONTROLS.index("pan_x"), CONTROLS.index("stop")


def draw_keys(count: int, generator: torch.Generator, kinds: tuple[str, ...] = tuple(KINDS)) -> Tensor:
    """Control vectors `[count, K]` of one of `kinds` each."""

    def chance(share: float) -> Tensor:
        return torch.rand(count, generator=generator) < share

    def side(*shape: int) -> Tensor:
        return torch.randint(2, (count, *shape), generator=generator).float() * 2 - 1

    shares = torch.tensor([KINDS[kind] for kind in kinds])
    kind = torch.multinomial(shares, count, replacement=True, generator=generator)

    def is_any(*names: str) -> Tensor:
        return sum((kind == i for i, name in enumerate(kinds) if name in names), torch.zeros(count, dtype=torch.bool))

    move = side(2)
    one = torch.nn.functional.one_hot(torch.randint(2, (count,), generator=generator), 2)
    move = torch.where(chance(STRAIGHT)[:, None], move * one, move) * torch.where(chance(HALF), 0.5, 1.0)[:, None]
    keys = torch.zeros(count, len(CONTROLS))
    keys[:, :2] = move * is_any("move", "both")[:, None]
    keys[:, PAN] = side() * is_any("pan", "both")
    keys[:, STOP] = is_any("stop").float()
    return keys


@dataclass
class Player:
    """Somebody who plays N streams: `held` are the keys that are held, `[N, K]`; `plays` bool `[N]`: in the others none
    ever is."""

    held: Tensor
    plays: Tensor

    @staticmethod
    def of(count: int, generator: torch.Generator, share: float = PLAYED) -> Player:
        """One that has not begun: no key is held."""
        return Player(torch.zeros(count, len(CONTROLS)), torch.rand(count, generator=generator) < share)

    def next_chunk(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """The controls `[n, CHUNK, K]` of the next chunk of the streams `rows` `[n]`. Mutates: self."""
        count = len(rows)

        def chance(share: float) -> Tensor:
            return (torch.rand(count, generator=generator) < share) & self.plays[rows]

        held = torch.where(chance(CHANGE)[:, None], draw_keys(count, generator), self.held[rows])
        controls = held[:, None].repeat(1, CHUNK, 1)
        tap = draw_keys(count, generator, ("move", "stop")) * chance(TAP)[:, None]
        controls[:, 0] = torch.where(tap != 0, tap, controls[:, 0])
        late, at = chance(LATE), torch.randint(1, CHUNK, (count,), generator=generator)
        fresh = draw_keys(count, generator)
        fresh[:, PAN] = held[:, PAN]
        changed = late[:, None] & (torch.arange(CHUNK) >= at[:, None])
        controls = torch.where(changed[:, :, None], fresh[:, None], controls)
        self.held[rows] = controls[:, -1]
        return controls


def draw_controls(count: int, chunks: int, generator: torch.Generator) -> Tensor:
    """Controls `[count, chunks, CHUNK, K]` of windows, some of which begin with keys that are held already."""
    player, every = Player.of(count, generator), torch.arange(count)
    return torch.stack([player.next_chunk(every, generator) for _ in range(chunks)], 1)
