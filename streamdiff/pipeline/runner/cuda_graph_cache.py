"""Which captured graphs there are, for whose caches, when one is made, and when it is forgotten. Bookkeeping only: what
is kept may be anything that holds its tensors, and no device is called.

A graph reads and writes the addresses that it was captured with. A *home* is the memory of one session's caches, known
by its address; a *place* is a key with the addresses of the caches that a forward uses, which may be of several homes.
An address says nothing about whose memory it is once that was freed. So two things hold: what is kept for a place holds
the place's caches, thus nobody else can be given their addresses while they stand here; and `forget` drops a home's
graphs when its caches are given up, so that the memory is free and nothing here names it any more. A graph that is
found was therefore captured with the very memory of who asks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Graph = TypeVar("Graph")
Place = Hashable
Homes = tuple[int, ...]

HOMES = 4
"""Sessions that have graphs at a time; each costs its graphs' outputs, and a short stall when one is captured."""


class GraphCache(Generic[Graph]):
    """The graphs of at most `most` homes, whoever comes first; sessions beyond that go without."""

    def __init__(self, most: int = HOMES) -> None:
        self._most = most
        self._graphs: dict[Place, tuple[Homes, Graph]] = {}
        self._met: dict[Place, Homes] = {}

    @property
    def places(self) -> frozenset[Place]:
        """What there are graphs for."""
        return frozenset(self._graphs)

    @property
    def homes(self) -> frozenset[int]:
        """Whose memory there are graphs for."""
        return frozenset(home for homes, _ in self._graphs.values() for home in homes)

    def find(self, place: Place) -> Graph | None:
        """The graph of this place."""
        found = self._graphs.get(place)
        return found[1] if found is not None else None

    def is_due(self, place: Place, homes: Homes, *, learning: bool) -> bool:
        """Whether a graph that is not there shall be captured now: while learning always, later when the place is met
        for the second time, since what is met once is not worth it, and where no home is one too many. Mutates: self.
        """
        if learning:
            return True
        if len(self.homes.union(homes)) > self._most:
            return False
        if place in self._met:
            del self._met[place]
            return True
        self._met[place] = homes
        return False

    def keep(self, place: Place, homes: Homes, graph: Graph) -> None:
        """From now on `graph` is this place's; it holds the caches of `homes`. Mutates: self."""
        self._graphs[place] = homes, graph

    def count(self, home: int) -> int:
        """How many graphs this memory has."""
        return sum(home in homes for homes, _ in self._graphs.values())

    def forget(self, home: int) -> None:
        """Drop all that has to do with this memory, which is about to be freed. Mutates: self."""
        self._graphs = {place: kept for place, kept in self._graphs.items() if home not in kept[0]}
        self._met = {place: homes for place, homes in self._met.items() if home not in homes}
