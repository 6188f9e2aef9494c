"""Metrics of engines for Prometheus, by its client library.

    from aio_ckpt.integrations import prometheus

    exported = prometheus.register(engine)
    ...
    exported.unregister()

Each scrape reads ``engine.stats()``, which never waits. Between scrapes, this costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from aio_ckpt.engine.engine import BaseEngine
from aio_ckpt.errors import ConfigError

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise ImportError(
        "aio_ckpt.integrations.prometheus needs prometheus_client: pip install 'aio-ckpt[prometheus]'"
    ) from missing

__all__ = ["EngineCollector", "register"]

_LABELS = ("root", "rank")


def register(*engines: BaseEngine, registry: CollectorRegistry = REGISTRY) -> EngineCollector:
    """Export the statistics of ``engines``, labelled with the root and the rank of each.

    The registry keeps the engines until :meth:`EngineCollector.unregister`. A closed engine shows its last numbers.

    Raises:
        ConfigError: engines are registered there already: give all engines of a process in one call.
    """
    collector = EngineCollector(engines, registry)
    try:
        registry.register(collector)
    except ValueError as error:
        raise ConfigError(
            f"register(): the registry exports engines already: unregister() those, or give all in one call ({error})"
        ) from error
    return collector


class EngineCollector(Collector):
    """Collector of the statistics of engines, in one registry."""

    def __init__(self, engines: tuple[BaseEngine, ...], registry: CollectorRegistry) -> None:
        self._engines = engines
        self._registry = registry

    def unregister(self) -> None:
        """Export these engines no more.

        Raises:
            KeyError: it was called before.
        """
        self._registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all engines, as they are now."""
        saves = CounterMetricFamily("aio_ckpt_saves", "Saves by outcome.", labels=(*_LABELS, "outcome"))
        nbytes = CounterMetricFamily("aio_ckpt_bytes", "Bytes of data files in committed saves.", labels=_LABELS)
        blocked = CounterMetricFamily(
            "aio_ckpt_blocked_seconds", "Time that save() kept its caller, in committed saves.", labels=_LABELS
        )
        stages = CounterMetricFamily(
            "aio_ckpt_stage_seconds", "Time in each stage, in committed saves.", labels=(*_LABELS, "stage")
        )
        plans = CounterMetricFamily("aio_ckpt_plans", "Plans reused and made anew.", labels=(*_LABELS, "result"))
        pending = GaugeMetricFamily("aio_ckpt_pending_saves", "Saves that are not settled.", labels=_LABELS)
        memory = GaugeMetricFamily("aio_ckpt_memory_bytes", "Host memory held for images.", labels=_LABELS)
        step = GaugeMetricFamily("aio_ckpt_newest_step", "Newest committed step.", labels=_LABELS)
        age = GaugeMetricFamily(
            "aio_ckpt_newest_commit_age_seconds", "Time since the commit of the newest step.", labels=_LABELS
        )
        for engine in self._engines:
            stats = engine.stats()
            labels = (str(engine.root), str(stats.rank))
            for outcome in ("committed", "failed", "skipped"):
                saves.add_metric((*labels, outcome), getattr(stats, outcome))
            nbytes.add_metric(labels, stats.committed_bytes)
            blocked.add_metric(labels, stats.blocked_secs)
            for stage, secs in stats.stage_secs.items():
                stages.add_metric((*labels, stage), secs)
            plans.add_metric((*labels, "hit"), stats.plan_hits)
            plans.add_metric((*labels, "miss"), stats.plan_misses)
            pending.add_metric(labels, stats.pending)
            memory.add_metric(labels, stats.memory_bytes)
            if stats.newest_step is not None:
                step.add_metric(labels, stats.newest_step)
            if stats.newest_age_secs is not None:
                age.add_metric(labels, stats.newest_age_secs)
        yield from (saves, nbytes, blocked, stages, plans, pending, memory, step, age)
