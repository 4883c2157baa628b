"""How far the ranks of a ring are with their graphs, which takes minutes: each tells it, and the head shows it."""

from __future__ import annotations

from typing import NoReturn

from tqdm import tqdm

from streamdiff.pipeline.distributed.rendezvous import RankContext


class Progress:
    """One rank's view. The head, and who is alone (`member` is None), draws a bar of all `stages` on standard error."""

    def __init__(self, member: RankContext | None, stages: int) -> None:
        self._member, self._stages = member, stages
        self._own = 0
        self._bar: tqdm[NoReturn] | None = None

    def told(self, made: int, of: int) -> None:
        """This rank has the graphs of `made` chunks, of `of`, as many as every rank makes. Mutates: self, the store."""
        self._own = made
        if self._member is not None:
            self._member.tell_made(made)
        if self._bar is None and (self._member is None or self._member.rank == 0):
            self._bar = tqdm(total=of * self._stages, desc="compiling", unit="graph", dynamic_ncols=True)
        self.made()

    def made(self) -> int:
        """What all ranks together have made so far; drawn, if it is more than before. Mutates: self."""
        made = self._own if self._member is None else sum(self._member.hear_made(self._stages))
        if self._bar is not None and made > self._bar.n:
            self._bar.update(made - self._bar.n)
            self._bar.refresh()
            if made == self._bar.total:
                self._bar.close()
        return made
