"""The engine's options: sizes, limits and switches.

Checks that each value makes sense by itself; knows no model and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.blocks.retention import RetentionLimits
from kvferry.errors import ConfigError

DEFAULT_KV_CACHE_BYTES = 512 * 1024 * 1024
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Raises ``ConfigError`` for a value that cannot work."""

    block_size_tokens: int = 16
    num_blocks: int | None = None
    """Blocks in the pool; takes precedence over ``kv_cache_bytes``."""
    kv_cache_bytes: int | None = None
    """Size of the pool where ``num_blocks`` is not given; None is 512 MiB."""
    max_num_sequences: int = 16
    """Sequences that run at once."""
    prefill_chunk_tokens: int = 512
    """Most tokens in one forward, decodes included."""
    dtype: str = "auto"
    """Of weights and KV: ``auto`` takes the model folder's."""
    device: str = "cpu"
    max_model_len: int | None = None
    """Most tokens of prompt and answer; None takes the model's context."""
    recompute_threshold_tokens: int | None = 64
    """Fewer missing prompt tokens than this are computed, not moved; None: what costs less, by
    what moving and computing have cost lately."""
    prefix_caching: bool = True
    retention_s: float = 480.0
    """How long prompt and answer are kept for a later turn, as the last to go; 0 is off."""
    max_retained_share: float = 0.5
    """Share of the pool, above 0 and at most 1, that may be retained."""
    retention_renews: bool = False
    """Whether a later use starts the time again."""
    num_threads: int | None = None
    """Threads of the tensor library; None leaves its own choice."""
    prepack_linears: bool = True
    """Keep bfloat16 weights in the CPU library's own order where that works."""

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "max_num_sequences", "prefill_chunk_tokens"):
            _require_positive(name, getattr(self, name))
        for name in ("num_blocks", "kv_cache_bytes", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _require_positive(name, value)
        if self.recompute_threshold_tokens is not None and self.recompute_threshold_tokens < 0:
            raise ConfigError(
                "recompute_threshold_tokens must be 0 or more, "
                f"not {self.recompute_threshold_tokens}"
            )
        if self.prefill_chunk_tokens < self.max_num_sequences:
            raise ConfigError(
                f"prefill_chunk_tokens ({self.prefill_chunk_tokens}) must be at least "
                f"max_num_sequences ({self.max_num_sequences}), so that all can decode at once"
            )
        self.retention_limits()
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")

    def retention_limits(self) -> RetentionLimits:
        """Return the options of retention. Raises ``ConfigError`` for one that cannot work."""
        return RetentionLimits(self.retention_s, self.max_retained_share, self.retention_renews)

    def pool_num_blocks(self, block_bytes: int) -> int:
        """Return how many blocks of ``block_bytes`` the pool has.

        Raises ``ConfigError`` if ``kv_cache_bytes`` is less than one block.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        size_bytes = self.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
        if size_bytes < block_bytes:
            raise ConfigError(
                f"kv_cache_bytes is {size_bytes}, less than one block of {block_bytes} bytes"
            )
        return size_bytes // block_bytes


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
