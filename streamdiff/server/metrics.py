"""Prometheus text for `/metrics`: few figures, each counted where it happens. Knows nothing about HTTP."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector


class Metrics:
    """The figures of one server, as `metrics.yaml` lists them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._figures: list[tuple[tuple[str, ...], Any]] = []  # with their labels
        table = yaml.safe_load((resources.files("streamdiff.server") / "metrics.yaml").read_text(encoding="utf-8"))
        for attribute, facts in table["figures"].items():
            name, labels = facts.get("name", attribute), facts.get("labels", ())
            bounds = {"buckets": table["buckets"][facts["buckets"]]} if "buckets" in facts else {}
            kind = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[facts["kind"]]
            figure = kind(name, facts["help"], labels, namespace="streamdiff", registry=self._registry, **bounds)
            setattr(self, attribute, figure)
            self._figures.append((tuple(labels), figure))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forget(self, label: str, value: str) -> None:
        """Take away the figures of a session or an output that has ended."""
        for labels, figure in self._figures:
            if labels == (label,):
                figure.labels(value)  # `remove` wants it to be there
                figure.remove(value)

    def text(self, sessions: Collection[str] | None = None) -> bytes:
        """Everything in Prometheus' text format; of figures by session those of `sessions`, None: of all."""
        return generate_latest(self._registry if sessions is None else _VisibleFigures(self._registry, sessions))


class _VisibleFigures(Collector):
    """The figures of a registry, without the samples of other sessions."""

    def __init__(self, registry: CollectorRegistry, sessions: Collection[str]) -> None:
        self._registry, self._visible = registry, {None, *sessions}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each for each in metric.samples if each.labels.get("session") in self._visible]
            yield metric


class CounterDelta:
    """Turns a cumulative total into increases; a total that falls has started again from 0. Sans-IO."""

    def __init__(self) -> None:
        self._last = 0.0

    def increase(self, total: float) -> float:
        """What was added since the last call, 0 or more. Mutates: self."""
        increase = total - self._last if total >= self._last else total
        self._last = total
        return increase
