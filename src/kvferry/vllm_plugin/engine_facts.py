"""Reads vLLM's configuration objects: facts to check, and what identifies a model's KV.

Every attribute of vLLM's that may have another name in another version is looked up here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import ConfigError
from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.ids import Epoch, new_epoch
from kvferry.protocol.layout import KVLayout
from kvferry.transport.base import MemoryKind, MemoryRegion
from kvferry.vllm_plugin.compat import EngineFacts
from kvferry.vllm_plugin.layout import TensorShape, config_digest, regions_of, weights_digest
from kvferry.vllm_plugin.likeness import (
    LayerKind,
    cache_compatibility,
    cache_dtype_name,
    chat_template_digest,
    rope_max_model_len,
    tokenizer_digest,
)
from kvferry.vllm_plugin.settings import WorkerRank

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def read_facts(config: VllmConfig, cache: KVCacheConfig) -> EngineFacts:
    """Return what ``compat`` has to know."""
    parallel, model, transfer = (
        config.parallel_config,
        config.model_config,
        config.kv_transfer_config,
    )
    groups = cache.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    return EngineFacts(
        load_failure_policy=transfer.kv_load_failure_policy if transfer else "fail",
        role=str(transfer.kv_role) if transfer else "",
        has_prefix_caching=bool(config.cache_config.enable_prefix_caching),
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        num_hosts=getattr(parallel, "nnodes", 1),
        context_parallel_size=max(
            getattr(parallel, "prefill_context_parallel_size", 1),
            getattr(parallel, "decode_context_parallel_size", 1),
        ),
        data_parallel_size=parallel.data_parallel_size,
        num_cache_groups=len(groups),
        cache_kind=type(spec).__name__,
        has_sliding_window=getattr(spec, "sliding_window", None) is not None,
        has_speculation=config.speculative_config is not None,
        has_dynamic_scales=bool(getattr(config.cache_config, "calculate_kv_scales", False)),
        has_sleep_mode=bool(getattr(model, "enable_sleep_mode", False)),
        is_multimodal=bool(model.is_multimodal_model),
        takes_prompt_embeds=bool(getattr(model, "enable_prompt_embeds", False)),
        block_size_tokens=spec.block_size if spec is not None else 0,
    )


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


def read_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorShape]:
    """Return how each layer's KV lies in memory. Raises ``ConfigError``."""
    for name, tensor in tensors.items():
        if not hasattr(tensor, "data_ptr"):
            raise ConfigError(f"layer {name} has no single KV tensor")
    return {
        name: TensorShape(
            tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
        )
        for name, tensor in tensors.items()
    }


def read_regions(tensors: Mapping[str, torch.Tensor], cache: KVCacheConfig) -> list[MemoryRegion]:
    """Return the regions of the real KV tensors. Raises ``ConfigError``."""
    shapes = read_shapes(tensors)
    first = next(iter(tensors.values()), None)
    device = first.device if first is not None else None
    on_host = device is None or device.type == "cpu"
    return regions_of(
        shapes,
        cache.num_blocks,
        MemoryKind.DRAM if on_host else MemoryKind.VRAM,
        0 if device is None or device.index is None else device.index,
    )


def read_layout(
    config: VllmConfig,
    cache: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    regions: list[MemoryRegion],
    rank: WorkerRank,
) -> KVLayout:
    """Return what peers compare before they move blocks."""
    model, spec = config.model_config, cache.kv_cache_groups[0].kv_cache_spec
    first = next(iter(tensors.values()))
    more = (str(model.quantization), str(getattr(model, "hf_overrides", None)))
    return KVLayout(
        model_name=str(model.model),
        weights_digest=weights_digest(str(model.model), model.revision),
        config_digest=config_digest(model.hf_text_config.to_dict(), more),
        kv_dtype=_dtype_name(first),
        num_layers=len(cache.kv_cache_groups[0].layer_names),
        num_kv_heads=getattr(spec, "num_kv_heads", 1),
        head_size=getattr(spec, "head_size", 0),
        block_size_tokens=spec.block_size,
        block_bytes=sum(region.block_bytes for region in regions),
        attention_backend=f"vllm/{first.device.type}/{'x'.join(map(str, first.shape[1:]))}",
        region_strides=tuple(sorted({region.stride_bytes for region in regions})),
        num_regions=len(regions),
        tensor_parallel_size=rank.num_ranks,
        tensor_parallel_rank=rank.rank,
    )


def read_compatibility(
    config: VllmConfig, cache: KVCacheConfig, tensors: Mapping[str, torch.Tensor]
) -> Compatibility:
    """Return what peers compare beyond the layout.

    Of the chat template only the one beside the tokenizer is known here: ``--chat-template`` is an
    option of vLLM's HTTP server, which is another process.
    """
    model = config.model_config
    layers = config.compilation_config.static_forward_context
    kinds = {
        name: _layer_kind(layers.get(name), config, tensor) for name, tensor in tensors.items()
    }
    layout_name = getattr(cache, "kv_cache_layout", None) or getattr(
        config.cache_config, "kv_cache_layout", None
    )
    tokenizer = str(model.tokenizer)
    return msgspec.structs.replace(
        cache_compatibility(read_shapes(tensors), kinds, cache.num_blocks, str(layout_name or "")),
        rope_max_model_len=rope_max_model_len(
            model.hf_text_config.to_dict(), int(model.max_model_len)
        ),
        tokenizer_digest=tokenizer_digest(tokenizer, model.tokenizer_revision),
        chat_template_digest=chat_template_digest(tokenizer),
        max_model_len=int(model.max_model_len),
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
