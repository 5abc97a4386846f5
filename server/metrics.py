"""Prometheus figures under ``paceline_``. Base units, ``_total`` on counters, no label that a client can choose.

Counters of the engine are read when somebody asks, so a step costs nothing extra. Accepted tokens count those that were
committed, not those that an end of text cut off; drafted tokens count nodes that a step scored.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.server.driver import EngineDriver

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_RUN_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)

_COUNTERS = {
    "engine_steps": ("num_steps", "forward passes of the target"),
    "engine_rows": ("num_rows", "packed rows of all forward passes"),
    "engine_step_seconds": ("step_seconds", "seconds spent in steps"),
    "prompt_tokens": ("num_prompt_tokens", "prompt tokens of generations that ran"),
    "prompt_cached_tokens": ("num_cached_tokens", "prompt tokens found in the prefix cache"),
    "generation_tokens": ("num_committed", "tokens committed"),
    "spec_decode_num_drafts": ("num_drafted_steps", "verifications of a tree with at least one node"),
    "spec_decode_num_draft_tokens": ("num_scored", "nodes scored"),
    "spec_decode_num_accepted_tokens": ("num_accepted", "nodes committed"),
    "stale_nodes": ("num_stale", "nodes that came too late"),
    "requests_opened": ("num_opened", "generations accepted"),
    "requests_finished": ("num_finished", "generations that ended by themselves"),
    "requests_cancelled": ("num_cancelled", "generations cancelled or abandoned"),
    "requests_failed": ("num_faults", "generations ended by an error"),
    "kv_moved_bytes": ("kv_bytes_moved", "bytes of KV moved by rollbacks"),
}


class _EngineCollector(Collector):
    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver

    def collect(self) -> Iterable[Metric]:
        """The engine's counters and gauges as of now; none while it loads."""
        engine = self._driver.engine
        yield GaugeMetricFamily("paceline_ready", "1 if the engine is ready", float(self._driver.health == "ready"))
        if engine is None:
            return
        for name, (attribute, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"paceline_{name}", text, float(getattr(engine.counters, attribute)))
        yield CounterMetricFamily("paceline_preemptions", "generations that lost their KV", float(engine.num_preempted))
        pool, step_time = engine.target.pool, engine.step_times.current
        gauges = {
            "requests_running": (engine.num_running, "generations that share steps"),
            "requests_waiting": (engine.num_waiting, "generations that wait for a place"),
            "kv_blocks_used": (pool.num_used_blocks, "KV blocks of live generations"),
            "kv_blocks_cached": (pool.num_cached_blocks, "KV blocks that only the prefix cache holds"),
            "kv_blocks_free": (pool.num_free_blocks, "KV blocks that hold nothing"),
            "step_base_seconds": (step_time.base_s, "fitted seconds of a step without rows"),
            "step_row_seconds": (step_time.per_row_s, "fitted seconds of a row"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"paceline_{name}", text, float(value))


class ServerMetrics:
    """All figures of one server, in a registry of its own."""

    def __init__(self, driver: EngineDriver) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(driver))
        registry = self._registry
        self.connections = Gauge("paceline_connections", "open websocket connections", registry=registry)
        self.wire_bytes = Counter("paceline_wire_bytes", "bytes of messages", ["direction"], registry=registry)
        self.ttft = Histogram(
            "paceline_time_to_first_token_seconds",
            "from opening to the first committed token",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.step = Histogram(
            "paceline_commit_step_seconds",
            "step time, once for each commit",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.run = Histogram("paceline_commit_tokens", "tokens of a commit", buckets=_RUN_BUCKETS, registry=registry)
        self.refused = Counter(
            "paceline_requests_refused", "requests turned away at the door", ["reason"], registry=registry
        )

    def render(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
