"""Index of captured graphs: which there are, when one is captured, when it is dropped. Calls no device.

*Home*: address of a session's cache. *Place*: graph key plus the addresses of the caches that a forward uses, which may
be of several homes. An entry keeps its caches alive, so an address cannot be reused while listed; `forget` drops a
home's entries before its caches are freed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Graph = TypeVar("Graph")
GraphLocation = Hashable
Homes = tuple[int, ...]

HOMES = 4
"""Sessions that have graphs at a time; each costs its graphs' outputs, and a short stall when one is captured."""


class GraphCache(Generic[Graph]):
    """CUDA graphs of at most `most` homes, first come, first served; further sessions run without."""

    def __init__(self, most: int = HOMES) -> None:
        self._most = most
        self._graphs: dict[GraphLocation, tuple[Homes, Graph]] = {}
        self._met: dict[GraphLocation, Homes] = {}

    @property
    def places(self) -> frozenset[GraphLocation]:
        """Places that have a graph."""
        return frozenset(self._graphs)

    @property
    def homes(self) -> frozenset[int]:
        """Homes that have a graph."""
        return frozenset(home for homes, _ in self._graphs.values() for home in homes)

    def find(self, place: GraphLocation) -> Graph | None:
        """The graph of this place, if there is one."""
        return self._graphs[place][1] if place in self._graphs else None

    def should_capture(self, place: GraphLocation, homes: Homes, *, learning: bool) -> bool:
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

    def keep(self, place: GraphLocation, homes: Homes, graph: Graph) -> None:
        """Add the graph of a place; it keeps the caches of `homes` alive. Mutates: self."""
        self._graphs[place] = homes, graph

    def count(self, home: int) -> int:
        """Number of graphs of a home."""
        return sum(home in homes for homes, _ in self._graphs.values())

    def forget(self, home: int) -> None:
        """Drop the graphs of a home before its memory is freed. Mutates: self."""
        self._graphs = {place: kept for place, kept in self._graphs.items() if home not in kept[0]}
        self._met = {place: homes for place, homes in self._met.items() if home not in homes}
