"""The engine's options: sizes, limits and switches.

Checks that each value makes sense by itself; knows no model and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.blocks.retention import RetentionLimits
from kvferry.connector.config import DEFAULT_RECOMPUTE_THRESHOLD_TOKENS
from kvferry.errors import ConfigError
from kvferry.options import check_options, option, same_as

_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Raises ``ConfigError`` for a value that cannot work."""

    dtype: str = option(
        "auto",
        "Type of weights and KV; auto is the model's own.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    num_threads: int | None = option(
        None,
        "Compute threads.",
        flag="--threads",
        minimum=1,
        default_text="the cores that this process may use",
    )
    """None leaves the tensor library its own choice."""
    num_blocks: int | None = option(None, "Blocks in the KV pool.", minimum=1)
    """Takes precedence over ``kv_cache_gib``."""
    kv_cache_gib: float = option(
        1.0, "Size of the KV pool where --num-blocks is not given.", above=0
    )
    block_size_tokens: int = option(16, "Tokens in a block.", flag="--block-size", minimum=1)
    max_model_len: int | None = option(
        None,
        "Most tokens of prompt and answer.",
        minimum=1,
        default_text="the model's context",
    )
    max_num_sequences: int = option(
        16, "Requests that run at once.", flag="--max-num-seqs", minimum=1
    )
    prefill_chunk_tokens: int = option(
        512,
        "Most tokens in one forward: the size of a prefill chunk.",
        flag="--max-num-batched-tokens",
        minimum=1,
    )
    """Decodes are among them."""
    prefix_caching: bool = option(
        True, "Never reuse the KV of earlier prompts.", flag="--no-prefix-caching"
    )
    recompute_threshold_tokens: int | None = option(
        DEFAULT_RECOMPUTE_THRESHOLD_TOKENS,
        "Fewer missing prompt tokens than this are computed, not moved; auto: what costs "
        "less, by what moving and computing have cost in the last minute.",
        minimum=0,
        none_word="auto",
    )
    retention_s: float = same_as(RetentionLimits, "duration_s")
    max_retained_share: float = same_as(RetentionLimits, "max_share")
    retention_renews: bool = same_as(RetentionLimits, "renews_on_use")
    prepack_linears: bool = True
    """Keep bfloat16 weights in the CPU library's own order where that works."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.prefill_chunk_tokens < self.max_num_sequences:
            raise ConfigError(
                f"prefill_chunk_tokens ({self.prefill_chunk_tokens}) must be at least "
                f"max_num_sequences ({self.max_num_sequences}), so that all can decode at once"
            )

    def retention_limits(self) -> RetentionLimits:
        """Return the options of retention."""
        return RetentionLimits(self.retention_s, self.max_retained_share, self.retention_renews)

    def pool_num_blocks(self, block_bytes: int) -> int:
        """Return how many blocks of ``block_bytes`` the pool has.

        Raises ``ConfigError`` if ``kv_cache_gib`` is less than one block.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        size_bytes = int(self.kv_cache_gib * _GIB)
        if size_bytes < block_bytes:
            raise ConfigError(
                f"kv_cache_gib is {size_bytes} bytes, less than one block of {block_bytes} bytes"
            )
        return size_bytes // block_bytes
