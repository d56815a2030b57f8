from __future__ import annotations

from typing import Any

import pytest

from kvferry.blocks.retention import RetentionLimits
from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size_tokens": 0}, "block_size_tokens"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"kv_cache_gib": -1.0}, "kv_cache_gib"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_threads": 0}, "num_threads"),
        ({"recompute_threshold_tokens": -1}, "recompute_threshold_tokens"),
        ({"retention_s": -1.0}, "retention_s"),
        ({"max_retained_share": 0.0}, "max_retained_share"),
        ({"max_retained_share": 1.5}, "max_retained_share"),
        ({"max_num_sequences": 32, "prefill_chunk_tokens": 31}, "prefill_chunk_tokens"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**options)


def test_what_is_retained_follows_the_options() -> None:
    assert EngineConfig().retention_limits() == RetentionLimits(480.0, 0.5, renews_on_use=False)
    config = EngineConfig(retention_s=0, max_retained_share=1, retention_renews=True)
    assert config.retention_limits() == RetentionLimits(0, 1, renews_on_use=True)


def test_number_of_blocks_wins_over_bytes() -> None:
    assert EngineConfig(num_blocks=3, kv_cache_gib=1.0).pool_num_blocks(10) == 3
    assert EngineConfig(kv_cache_gib=10_009 / 1024**3).pool_num_blocks(10) == 1000
    assert EngineConfig().pool_num_blocks(1024) == 1024 * 1024


def test_bytes_for_less_than_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"9 bytes, less than one block of 10"):
        EngineConfig(kv_cache_gib=9 / 1024**3).pool_num_blocks(10)
