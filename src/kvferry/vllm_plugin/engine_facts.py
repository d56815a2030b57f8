"""Reads vLLM's configuration objects: what is refused by name, and what identifies a model's KV.

Every attribute of vLLM's that may have another name in another version is looked up here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import ConfigError
from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.ids import Epoch, new_epoch
from kvferry.transport.base import MemoryKind, MemoryRegion
from kvferry.vllm_plugin.likeness import (
    LayerKind,
    TensorShape,
    cache_compatibility,
    cache_dtype_name,
    chat_template_digest,
    config_digest,
    regions_of,
    rope_max_model_len,
    tokenizer_digest,
    weights_digest,
)
from kvferry.vllm_plugin.settings import WorkerRank

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

MIN_VERSION = (0, 30)
END_VERSION = (0, 33)
"""The first that is not supported."""
SUPPORTED_CACHE_KINDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Class names of a cache group's specification."""


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


def check_engine(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise ``ConfigError`` that names everything which is not supported, each with what to do."""
    problems = [*_engine_problems(config), *_parallelism_problems(config)]
    problems += _cache_problems(config, cache)
    if problems:
        raise ConfigError("kvferry's connector does not support: " + "; ".join(problems))


def _engine_problems(config: VllmConfig) -> Iterator[str]:
    model, transfer = config.model_config, config.kv_transfer_config
    policy, role = transfer.kv_load_failure_policy, transfer.kv_role
    if policy != "recompute":
        yield f"kv_load_failure_policy {policy!r} (set it to 'recompute' in --kv-transfer-config)"
    # With asynchronous scheduling vLLM takes less care of blocks in flight for another role.
    if role != "kv_both":
        yield f"kv_role {role!r} (set it to 'kv_both': the router gives out the roles)"
    if not config.cache_config.enable_prefix_caching:
        yield "prefix caching off (leave it on)"
    if config.speculative_config is not None:
        yield "speculative decoding (start without --speculative-config)"
    if getattr(model, "enable_sleep_mode", False):
        yield "sleep mode (start without --enable-sleep-mode)"
    if model.is_multimodal_model:
        yield "multimodal inputs (start with --language-model-only where the model has it)"
    if getattr(model, "enable_prompt_embeds", False):
        yield "prompt embeddings as inputs (start without --enable-prompt-embeds)"


def _parallelism_problems(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism (start without --pipeline-parallel-size)"
    if getattr(parallel, "nnodes", 1) > 1:
        yield "one instance on several hosts (start without --nnodes, one instance on each)"
    sizes = ("prefill_context_parallel_size", "decode_context_parallel_size")
    if any(getattr(parallel, size, 1) > 1 for size in sizes):
        flags = " and ".join(f"--{size.replace('_', '-')}" for size in sizes)
        yield f"context parallelism (start without {flags})"
    if parallel.data_parallel_size > 1:
        yield "data parallelism (run one instance for each replica)"


def _cache_problems(config: VllmConfig, cache: KVCacheConfig) -> Iterator[str]:
    groups = cache.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    kind = type(spec).__name__
    if len(groups) != 1:
        yield (
            "hybrid caches, more than one KV cache group (serve a model with attention of one kind "
            "in all layers)"
        )
    if kind not in SUPPORTED_CACHE_KINDS:
        yield f"KV caches of kind {kind} (serve a model with full attention or MLA)"
    if getattr(spec, "sliding_window", None) is not None:
        yield (
            "sliding-window attention (start with --disable-sliding-window, which cuts the context "
            "to the window, or serve another model)"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        yield "KV scales that are calculated while running (start without --calculate-kv-scales)"
    if getattr(spec, "block_size", 0) < 1:
        yield "a block size of nothing (set --block-size)"


def lora_kind(config: VllmConfig) -> str:
    """Return as what an adapter's weights are computed with; empty without LoRA."""
    return str(config.lora_config.lora_dtype) if config.lora_config is not None else ""


def read_rank(config: VllmConfig) -> WorkerRank:
    """Return which worker this process is. All of an engine's have to ask at the same time: they
    agree on the epoch that they share."""
    if config.parallel_config.tensor_parallel_size == 1:
        return WorkerRank()
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    epoch = torch.tensor([new_epoch()], dtype=torch.int64)
    torch.distributed.broadcast(epoch, src=group.ranks[0], group=group.cpu_group)
    return WorkerRank(group.rank_in_group, group.world_size, Epoch(int(epoch.item())))


def read_memory(
    config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, torch.Tensor], rank: WorkerRank
) -> tuple[list[MemoryRegion], KVLayout, Compatibility]:
    """Return the regions of the real KV tensors, and what peers compare before they move blocks:
    the layout, and what there is beyond it. Raises ``ConfigError``."""
    for name, tensor in tensors.items():
        if not hasattr(tensor, "data_ptr"):
            raise ConfigError(f"layer {name} has no single KV tensor")
    shapes = {
        name: TensorShape(
            tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
        )
        for name, tensor in tensors.items()
    }
    first = next(iter(tensors.values()), None)
    is_on_host = first is None or first.device.type == "cpu"
    regions = regions_of(
        shapes,
        cache.num_blocks,
        MemoryKind.DRAM if is_on_host else MemoryKind.VRAM,
        (first.device.index or 0) if first is not None else 0,
    )
    layout = _layout(config, cache, next(iter(tensors.values())), regions, rank)
    return regions, layout, _compatibility(config, cache, tensors, shapes)


def _layout(
    config: VllmConfig,
    cache: KVCacheConfig,
    tensor: torch.Tensor,
    regions: list[MemoryRegion],
    rank: WorkerRank,
) -> KVLayout:
    model, group = config.model_config, cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    more = (str(model.quantization), str(getattr(model, "hf_overrides", None)))
    return KVLayout(
        model_name=str(model.model),
        weights_digest=weights_digest(str(model.model), model.revision),
        config_digest=config_digest(model.hf_text_config.to_dict(), more),
        kv_dtype=_dtype_name(tensor),
        num_layers=len(group.layer_names),
        num_kv_heads=getattr(spec, "num_kv_heads", 1),
        head_size=getattr(spec, "head_size", 0),
        block_size_tokens=spec.block_size,
        block_bytes=sum(region.block_bytes for region in regions),
        attention_backend=f"vllm/{tensor.device.type}/{'x'.join(map(str, tensor.shape[1:]))}",
        region_strides=tuple(sorted({region.stride_bytes for region in regions})),
        num_regions=len(regions),
        tensor_parallel_size=rank.num_ranks,
        tensor_parallel_rank=rank.rank,
    )


def _compatibility(
    config: VllmConfig,
    cache: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, TensorShape],
) -> Compatibility:
    """Of the chat template only the one beside the tokenizer is known here: ``--chat-template`` is
    an option of vLLM's HTTP server, which is another process."""
    model, cache_config = config.model_config, config.cache_config
    layers = config.compilation_config.static_forward_context
    kinds = {
        name: _layer_kind(layers.get(name), config, tensor) for name, tensor in tensors.items()
    }
    layout_name = getattr(cache, "kv_cache_layout", None) or getattr(
        cache_config, "kv_cache_layout", None
    )
    tokenizer, max_model_len = str(model.tokenizer), int(model.max_model_len)
    return msgspec.structs.replace(
        cache_compatibility(shapes, kinds, cache.num_blocks, str(layout_name or "")),
        rope_max_model_len=rope_max_model_len(model.hf_text_config.to_dict(), max_model_len),
        tokenizer_digest=tokenizer_digest(tokenizer, model.tokenizer_revision),
        chat_template_digest=chat_template_digest(tokenizer),
        max_model_len=max_model_len,
    )


def _layer_kind(layer: object, config: VllmConfig, tensor: torch.Tensor) -> LayerKind:
    backend = getattr(layer, "attn_backend", None)
    configured = getattr(layer, "kv_cache_dtype", config.cache_config.cache_dtype)
    return LayerKind(
        backend=backend.get_name() if backend is not None else "",
        # Set by vLLM's CPU backend when it makes its metadata builders, before memory is given.
        instruction_set=str(getattr(layer, "isa", "") or ""),
        cache_dtype=cache_dtype_name(str(configured), _dtype_name(tensor)),
    )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
