"""How far the ranks of a ring are with their graphs, which takes minutes: each tells it, and the head shows it."""

from __future__ import annotations

from typing import NoReturn

from tqdm import tqdm

from streamdiff.pipeline.distributed.rendezvous import RankContext


class Progress:
    """One rank's view. Rank 0, also where it is alone (`context` is None), draws a bar of all `stages` on stderr."""

    def __init__(self, context: RankContext | None, stages: int) -> None:
        self._context, self._stages = context, stages
        self._own = 0
        self._bar: tqdm[NoReturn] | None = None

    def report(self, made: int, of: int) -> None:
        """This rank has the graphs of `made` chunks, of `of`, as many as every rank makes. Mutates: self, the store."""
        self._own = made
        if self._context is not None:
            self._context.send_made(made)
        if self._bar is None and (self._context is None or self._context.rank == 0):
            self._bar = tqdm(total=of * self._stages, desc="compiling", unit="graph", dynamic_ncols=True)
        self.made()

    def made(self) -> int:
        """What all ranks together have made so far; drawn, if it is more than before. Mutates: self."""
        made = self._own if self._context is None else sum(self._context.receive_made(self._stages))
        if self._bar is not None and made > self._bar.n:
            self._bar.update(made - self._bar.n)
            self._bar.refresh()
            if made == self._bar.total:
                self._bar.close()
        return made
