from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvferry.observe.metrics import Metrics

ENGINE = {
    "kvferry_num_requests_running": (),
    "kvferry_num_requests_waiting": (),
    "kvferry_kv_cache_usage_perc": (),
    "kvferry_prompt_tokens_total": (),
    "kvferry_generation_tokens_total": (),
    "kvferry_num_preemptions_total": (),
    "kvferry_request_success_total": ("finished_reason",),
    "kvferry_read_back_tokens_total": (),
    "kvferry_recomputed_tokens_total": ("reason",),
    "kvferry_retained_blocks": (),
    "kvferry_retained_share": (),
    "kvferry_retained_evicted_total": (),
    "kvferry_retention_ends_total": ("reason",),
    "kvferry_time_to_first_token_seconds": (),
    "kvferry_inter_token_latency_seconds": (),
    "kvferry_e2e_request_latency_seconds": (),
}
EXCHANGE = {
    "kvferry_receives_total": ("mode", "outcome"),
    "kvferry_transfer_bytes_total": ("direction", "mode"),
    "kvferry_transfer_seconds": ("mode",),
    "kvferry_handoffs_held": (),
    "kvferry_leased_blocks": (),
    "kvferry_quarantined_blocks": (),
    "kvferry_blind_links": (),
    "kvferry_resting_peers": (),
    "kvferry_history_leases_total": ("outcome",),
    "kvferry_handoffs_total": ("outcome",),
    "kvferry_control_malformed_total": ("reason",),
    "kvferry_dropped_events_total": ("role", "event"),
    "kvferry_verified_blocks_total": ("result",),
    "kvferry_control_requests_total": ("type", "result"),
    "kvferry_unsigned_params_total": (),
}
ROUTER = {
    "kvferry_router_requests_total": ("outcome",),
    "kvferry_router_inflight": (),
    "kvferry_router_leg_seconds": ("leg",),
    "kvferry_router_instance_healthy": ("instance", "role"),
    "kvferry_router_client_gone_total": ("when",),
}


def declared(metrics: Metrics) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for attribute in ("engine", "exchange", "router"):
        for metric in vars(getattr(metrics, attribute)).values():
            family = next(iter(metric.describe()))
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = metric._labelnames
    return found


def test_every_metric_has_its_name_and_labels() -> None:
    assert declared(Metrics()) == {**ENGINE, **EXCHANGE, **ROUTER}


def test_only_groups_in_use_are_exposed() -> None:
    metrics = Metrics()
    assert metrics.render() == b""
    metrics.router.inflight.inc()
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert "kvferry_router_inflight" in families
    assert all(name.startswith("kvferry_router_") for name in families)


def test_a_group_registers_once() -> None:
    metrics = Metrics()
    assert metrics.engine is metrics.engine
    assert metrics.exchange is metrics.exchange
    assert metrics.router is metrics.router


def test_values_reach_the_exposition() -> None:
    metrics = Metrics()
    metrics.exchange.receives.labels(mode="pull", outcome="received").inc(3)
    metrics.exchange.transfer_bytes.labels(direction="in", mode="pull").inc(1024)
    metrics.engine.time_to_first_token_s.observe(0.05)
    text = metrics.render().decode()
    assert 'kvferry_receives_total{mode="pull",outcome="received"} 3.0' in text
    assert 'kvferry_transfer_bytes_total{direction="in",mode="pull"} 1024.0' in text
    assert "kvferry_time_to_first_token_seconds_count 1.0" in text


def test_two_instances_in_one_process_do_not_share_anything() -> None:
    one, two = Metrics(), Metrics()
    one.engine.prompt_tokens.inc(5)
    two.engine.prompt_tokens.inc(7)
    assert "kvferry_prompt_tokens_total 5.0" in one.render().decode()
    assert "kvferry_prompt_tokens_total 7.0" in two.render().decode()
    assert not any(family.name.startswith("kvferry") for family in REGISTRY.collect()), (
        "nothing is in the library's global registry"
    )


def test_a_given_registry_is_used() -> None:
    registry = CollectorRegistry()
    Metrics(registry).engine.num_requests_running.set(2)
    assert registry.get_sample_value("kvferry_num_requests_running") == 2.0


@pytest.mark.parametrize("heavy", ["torch", "transformers", "zmq", "numpy"])
def test_importing_metrics_is_light(heavy: str) -> None:
    code = f"import sys, kvferry.observe.metrics; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
