"""Which vLLMs and which of their configurations are refused, by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry.vllm_plugin.engine_facts import check_engine, check_version

FullAttentionSpec = type("FullAttentionSpec", (SimpleNamespace,), {})
MambaSpec = type("MambaSpec", (SimpleNamespace,), {})


def _supported() -> dict[str, Any]:
    """Return a configuration as vLLM has it, in parts that a test may change."""
    return {
        "transfer": SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        "cache": SimpleNamespace(enable_prefix_caching=True),
        "parallel": SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1
        ),
        "model": SimpleNamespace(is_multimodal_model=False),
        "whole": SimpleNamespace(speculative_config=None),
        "spec": FullAttentionSpec(block_size=128),
        "memory": SimpleNamespace(num_groups=1),
    }


def _check(parts: dict[str, Any]) -> None:
    config = parts["whole"]
    config.kv_transfer_config, config.cache_config = parts["transfer"], parts["cache"]
    config.parallel_config, config.model_config = parts["parallel"], parts["model"]
    group = SimpleNamespace(kv_cache_spec=parts["spec"])
    check_engine(config, SimpleNamespace(kv_cache_groups=[group] * parts["memory"].num_groups))


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.32.5"])
def test_supported_versions_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "1.0", "dev"])
def test_other_versions_are_refused_in_one_message(version: str) -> None:
    with pytest.raises(ConfigError, match=r"from 0\.30 to below 0\.33"):
        check_version(version)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_supported_configuration_is_taken(num_ranks: int) -> None:
    parts = _supported()
    parts["parallel"].tensor_parallel_size = num_ranks
    _check(parts)


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("transfer", {"kv_load_failure_policy": "fail"}, "kv_load_failure_policy 'fail'"),
        ("transfer", {"kv_role": "kv_producer"}, "kv_role 'kv_producer'"),
        ("cache", {"enable_prefix_caching": False}, "prefix caching off"),
        ("cache", {"calculate_kv_scales": True}, "scales"),
        ("parallel", {"pipeline_parallel_size": 2}, "pipeline"),
        ("parallel", {"nnodes": 2}, "several hosts"),
        ("parallel", {"prefill_context_parallel_size": 2}, "context"),
        ("parallel", {"decode_context_parallel_size": 2}, "context"),
        ("parallel", {"data_parallel_size": 2}, "data parallel"),
        ("memory", {"num_groups": 2}, "hybrid"),
        ("spec", {"sliding_window": 1024}, "sliding-window"),
        ("spec", {"block_size": 0}, "block size"),
        ("whole", {"speculative_config": object()}, "speculative"),
        ("model", {"enable_sleep_mode": True}, "sleep"),
        ("model", {"is_multimodal_model": True}, "multimodal"),
        ("model", {"enable_prompt_embeds": True}, "prompt embeddings"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    part: str, change: dict[str, object], named: str
) -> None:
    parts = _supported()
    vars(parts[part]).update(change)
    with pytest.raises(ConfigError, match=named) as caught:
        _check(parts)
    told = str(caught.value)
    assert ";" not in told, "it names more than what was changed"
    assert re.search(r"\(.+\)$", told), "it does not say what to do"


def test_a_cache_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="MambaSpec"):
        _check({**_supported(), "spec": MambaSpec(block_size=128)})


def test_everything_that_is_not_supported_is_named_at_once() -> None:
    parts = _supported()
    parts["transfer"].kv_role, parts["parallel"].data_parallel_size = "kv_consumer", 2
    with pytest.raises(ConfigError, match=r"kv_role .*; data parallel"):
        _check(parts)
