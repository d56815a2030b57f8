"""Which vLLM the plugin works in, and which of its configurations it refuses, by name. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvferry.errors import ConfigError

MIN_VERSION = (0, 30)
END_VERSION = (0, 33)
"""The first that is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the plugin has to know of an engine's configuration."""

    load_failure_policy: str
    role: str
    """``kv_role``."""
    has_prefix_caching: bool
    pipeline_parallel_size: int
    tensor_parallel_size: int
    num_hosts: int
    context_parallel_size: int
    data_parallel_size: int
    num_cache_groups: int
    cache_kind: str
    """Class name of the group's cache specification."""
    has_sliding_window: bool
    has_speculation: bool
    has_dynamic_scales: bool
    has_sleep_mode: bool
    is_multimodal: bool
    takes_prompt_embeds: bool
    block_size_tokens: int


SUPPORTED_CACHE_KINDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


def check_version(version: str) -> None:
    """Raise ``ConfigError`` unless vLLM ``version`` is one that the plugin was made for."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if not MIN_VERSION <= found < END_VERSION:
        low, high = ".".join(map(str, MIN_VERSION)), ".".join(map(str, END_VERSION))
        raise ConfigError(
            f"kvferry's connector works in vLLM from {low} to below {high}; this is {version}: "
            "install one of those"
        )


def check_engine(facts: EngineFacts) -> None:
    """Raise ``ConfigError`` that names everything which is not supported."""
    problems = unsupported(facts)
    if problems:
        raise ConfigError("kvferry's connector does not support: " + "; ".join(problems))


def unsupported(facts: EngineFacts) -> list[str]:
    """Return what of ``facts`` the plugin refuses, each with what to do about it."""
    policy = facts.load_failure_policy
    checks = (
        (
            policy != "recompute",
            f"kv_load_failure_policy {policy!r} (set it to 'recompute' in --kv-transfer-config)",
        ),
        (
            # With asynchronous scheduling vLLM takes less care of blocks in flight for another.
            facts.role != "kv_both",
            f"kv_role {facts.role!r} (set it to 'kv_both': the router gives out the roles)",
        ),
        (not facts.has_prefix_caching, "prefix caching off (leave it on)"),
        *_parallelism(facts),
        *_caches(facts),
        (facts.has_speculation, "speculative decoding (start without --speculative-config)"),
        (facts.has_sleep_mode, "sleep mode (start without --enable-sleep-mode)"),
        (
            facts.is_multimodal,
            "multimodal inputs (start with --language-model-only where the model has it)",
        ),
        (
            facts.takes_prompt_embeds,
            "prompt embeddings as inputs (start without --enable-prompt-embeds)",
        ),
    )
    return [message for is_refused, message in checks if is_refused]


def _parallelism(facts: EngineFacts) -> tuple[tuple[bool, str], ...]:
    return (
        (
            facts.pipeline_parallel_size > 1,
            "pipeline parallelism (start without --pipeline-parallel-size)",
        ),
        (
            facts.num_hosts > 1,
            "one instance on several hosts (start without --nnodes, one instance on each)",
        ),
        (
            facts.context_parallel_size > 1,
            "context parallelism (start without --prefill-context-parallel-size and "
            "--decode-context-parallel-size)",
        ),
        (facts.data_parallel_size > 1, "data parallelism (run one instance for each replica)"),
    )


def _caches(facts: EngineFacts) -> tuple[tuple[bool, str], ...]:
    return (
        (
            facts.num_cache_groups != 1,
            "hybrid caches, more than one KV cache group (serve a model with attention of one kind "
            "in all layers)",
        ),
        (
            facts.cache_kind not in SUPPORTED_CACHE_KINDS,
            f"KV caches of kind {facts.cache_kind} (serve a model with full attention or MLA)",
        ),
        (
            facts.has_sliding_window,
            "sliding-window attention (start with --disable-sliding-window, which cuts the context "
            "to the window, or serve another model)",
        ),
        (
            facts.has_dynamic_scales,
            "KV scales that are calculated while running (start without --calculate-kv-scales)",
        ),
        (facts.block_size_tokens < 1, "a block size of nothing (set --block-size)"),
    )
