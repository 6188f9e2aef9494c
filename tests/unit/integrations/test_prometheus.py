"""Metrics for Prometheus, by its real client library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from builders import TIMEOUT, broken, save, weights
from gated_storage import gated_engine
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import ConfigError
from aio_ckpt.integrations import prometheus

STAGES = ("wait", "plan", "capture", "write", "agree", "commit")


def value(registry: CollectorRegistry, name: str, root: Path, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"root": str(root), "rank": "0", **labels})


def test_a_scrape_shows_what_stats_shows(root: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with gated_engine(root, when_busy="skip") as (engine, storage):
        prometheus.register(engine, registry=registry)
        assert value(registry, "aio_ckpt_saves_total", root, outcome="committed") == 0
        assert value(registry, "aio_ckpt_newest_step", root) is None
        engine.save(weights(1)).result(TIMEOUT)
        storage.fail("sync", "*.distcp", broken())
        engine.save(weights(2)).exception(TIMEOUT)
        engine.save(weights(2)).result(TIMEOUT)
        gate = storage.hold("rename")
        engine.save(weights(3))
        gate.wait_reached()
        assert engine.save(weights(4)).skipped
        stats = engine.stats()
        shown = {
            "aio_ckpt_bytes_total": stats.committed_bytes,
            "aio_ckpt_blocked_seconds_total": stats.blocked_secs,
            "aio_ckpt_pending_saves": 1,
            "aio_ckpt_memory_bytes": stats.memory_bytes,
            "aio_ckpt_newest_step": 2,
        }
        assert {name: value(registry, name, root) for name in shown} == shown
        outcomes = {"committed": 2, "failed": 1, "skipped": 1}
        assert {each: value(registry, "aio_ckpt_saves_total", root, outcome=each) for each in outcomes} == outcomes
        assert {
            stage: value(registry, "aio_ckpt_stage_seconds_total", root, stage=stage) for stage in STAGES
        } == stats.stage_secs
        plans = {"hit": stats.plan_hits, "miss": stats.plan_misses}
        assert {each: value(registry, "aio_ckpt_plans_total", root, result=each) for each in plans} == plans
        age_secs = value(registry, "aio_ckpt_newest_commit_age_seconds", root)
        assert age_secs is not None
        assert stats.newest_age_secs is not None
        assert age_secs >= stats.newest_age_secs


def test_two_engines_are_told_apart_by_their_roots_in_one_valid_exposition(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with SyncCheckpointEngine(tmp_path / "a") as one, SyncCheckpointEngine(tmp_path / "b") as other:
        prometheus.register(one, other, registry=registry)
        save(one, 1)
        save(other, 1, 2)
        assert value(registry, "aio_ckpt_saves_total", tmp_path / "a", outcome="committed") == 1
        assert value(registry, "aio_ckpt_saves_total", tmp_path / "b", outcome="committed") == 2
        text = generate_latest(registry).decode()
        assert text.count("# TYPE aio_ckpt_saves_total counter") == 1
        families = list(text_string_to_metric_families(generate_openmetrics(registry).decode()))
    assert {family.name for family in families} >= {"aio_ckpt_saves", "aio_ckpt_newest_step"}
    assert all(family.documentation for family in families)


def test_after_unregister_nothing_is_exported_and_the_engine_may_be_registered_again(root: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with SyncCheckpointEngine(root) as engine:
        exported = prometheus.register(engine, registry=registry)
        with pytest.raises(ConfigError, match=r"unregister\(\) those, or give all in one call"):
            prometheus.register(engine, registry=registry)
        exported.unregister()
        assert generate_latest(registry) == b""
        prometheus.register(engine, registry=registry)


def test_without_the_library_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "aio_ckpt.integrations.prometheus")
    with pytest.raises(ImportError, match=r"pip install 'aio-ckpt\[prometheus\]'"):
        import aio_ckpt.integrations.prometheus  # noqa: F401
