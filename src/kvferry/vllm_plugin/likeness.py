"""What must be alike in two vLLMs: KV tensors and their regions, weights, configuration, tokenizer
and chat template. Pure but for reading files; knows shapes, not torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.protocol.compatibility import Compatibility, content_digest
from kvferry.transport.base import MemoryKind, MemoryRegion

_WHOLE_FILE_BYTES = 512 << 20
_SAMPLE_BYTES = 1 << 20
_SAMPLES_PER_FILE = 64
_NOT_COMPARED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
_FP8_NAMES = {"fp8": "fp8_e4m3"}
"""vLLM's short name of one kind."""
_VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
    "added_tokens.json",
)  # fmt: skip
_RUNTIME_PARTS = ("truncation", "padding")
"""Of ``tokenizer.json``: what whoever uses it sets as it likes."""
_ENCODING_SETTINGS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "bos_token", "eos_token",
)  # fmt: skip
"""Of ``tokenizer_config.json``: what the tokens of a text depend on."""
_ROPE_KINDS_OF_ANY_LENGTH = {
    "", "default", "linear", "llama3", "mllama4", "yarn", "deepseek_yarn", "deepseek_llama_scaling",
    "dynamic", "ntk", "mrope", "bailing_mrope", "openpangu", "proportional",
}  # fmt: skip
"""Rotary scalings that vLLM computes alike whatever the longest sequence is."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One layer's cache as it lies in memory; strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int


@dataclass(frozen=True, slots=True)
class LayerKind:
    """By what and as what a layer's KV is kept."""

    backend: str
    instruction_set: str
    """Empty where the backend lays memory out alike on all processors."""
    cache_dtype: str


def regions_of(
    tensors: Mapping[str, TensorShape],
    num_blocks: int,
    kind: MemoryKind = MemoryKind.DRAM,
    device_index: int = 0,
) -> list[MemoryRegion]:
    """Return one region for each run that a block has in each tensor, in the tensors' order.

    A tensor whose first dimension is the blocks is one region; one whose second is (keys and values
    apart) is as many as its first dimension says. Tensors at one address count once. Raises
    ``ConfigError`` for a tensor in which a block is not one run of bytes.
    """
    regions: list[MemoryRegion] = []
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.address in seen:
            continue
        seen.add(tensor.address)
        for address, shape, strides in _parts(name, tensor, num_blocks):
            run = _run_elements(shape[1:], strides[1:])
            per_block = shape[0] // num_blocks
            if run is None or (per_block > 1 and strides[0] != run):
                raise ConfigError(
                    f"a block of layer {name} is not one run of memory: shape {shape}, strides "
                    f"{strides}"
                )
            regions.append(
                MemoryRegion(
                    address=address,
                    block_bytes=run * per_block * tensor.element_bytes,
                    stride_bytes=strides[0] * per_block * tensor.element_bytes,
                    num_blocks=num_blocks,
                    kind=kind,
                    device_index=device_index,
                )
            )
    if not regions:
        raise ConfigError("vLLM has given no KV caches")
    return regions


def cache_dtype_name(configured: str, tensor_dtype: str) -> str:
    """Return one name for one kind of cache, whichever way it was asked for."""
    if configured in ("", "auto"):
        return tensor_dtype
    return _FP8_NAMES.get(configured, configured)


def cache_compatibility(
    tensors: Mapping[str, TensorShape],
    kinds: Mapping[str, LayerKind],
    num_blocks: int,
    layout_name: str,
) -> Compatibility:
    """Return what peers compare of the KV tensors: by name, and all of it as a digest, in the
    tensors' order and whatever the number of blocks."""
    described = [
        (
            name,
            *_without_blocks(tensor, num_blocks),
            tensor.element_bytes,
            kinds[name].backend,
            kinds[name].instruction_set,
            kinds[name].cache_dtype,
        )
        for name, tensor in tensors.items()
    ]
    return Compatibility(
        attention_backend=_names(kind.backend for kind in kinds.values()),
        instruction_set=_names(kind.instruction_set for kind in kinds.values()),
        kv_cache_layout=layout_name,
        kv_cache_dtype=_names(kind.cache_dtype for kind in kinds.values()),
        kv_tensors_digest=content_digest(json.dumps([layout_name, described]).encode()),
    )


def config_digest(config: Mapping[str, object], more: Sequence[str]) -> str:
    """Return a digest of a model's effective configuration and of whatever else changes its KV.

    The names of folders and versions in it are left out.
    """
    kept = {name: value for name, value in config.items() if name not in _NOT_COMPARED}
    encoded = json.dumps([kept, list(more)], sort_keys=True, default=str)
    return hashlib.blake2b(encoded.encode(), digest_size=16).hexdigest()


def weights_digest(model: str, revision: str | None) -> str:
    """Return a digest of the safetensors files in the folder ``model``.

    Files up to 512 MiB are read whole, of larger ones evenly spread samples. A model that is no
    folder with such files is known by its name and revision.
    """
    folder = Path(model)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return f"{model}@{revision or ''}"
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name}:{size};".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE_BYTES:
                while part := stream.read(_SAMPLE_BYTES):
                    state.update(part)
                continue
            for index in range(_SAMPLES_PER_FILE):
                stream.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES_PER_FILE - 1))
                state.update(stream.read(_SAMPLE_BYTES))
    return state.hexdigest()


def rope_max_model_len(config: Mapping[str, object], max_model_len: int) -> int:
    """Return ``max_model_len`` if the model's rotary positions may depend on it, else 0."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = _rope_kinds(parameters) if isinstance(parameters, Mapping) else {"unknown"}
    return 0 if kinds <= _ROPE_KINDS_OF_ANY_LENGTH else max_model_len


def tokenizer_digest(tokenizer: str, revision: str | None) -> str:
    """Return a digest of the tokenizer's files in the folder ``tokenizer``.

    One that is no folder with such files is known by its name and revision.
    """
    folder = Path(tokenizer)
    parts = [_vocabulary(folder / name) for name in _VOCABULARY_FILES]
    if not any(parts):
        return content_digest(f"{tokenizer}@{revision or ''}".encode())
    config = _json_of(folder / "tokenizer_config.json")
    settings = {name: config[name] for name in _ENCODING_SETTINGS if name in config}
    return content_digest(*parts, json.dumps(settings, sort_keys=True).encode())


def chat_template_digest(tokenizer: str) -> str:
    """Return a digest of the chat template beside the tokenizer; empty where there is none."""
    folder = Path(tokenizer)
    file = folder / "chat_template.jinja"
    if file.is_file():
        return content_digest(file.read_bytes())
    template = _json_of(folder / "tokenizer_config.json").get("chat_template")
    if not template:
        return ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return content_digest(text.encode())


def _parts(
    name: str, tensor: TensorShape, num_blocks: int
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    shape, strides = tensor.shape, tensor.strides
    if len(shape) >= 2 and shape[0] >= num_blocks and shape[0] % num_blocks == 0:
        return [(tensor.address, shape, strides)]
    if len(shape) >= 3 and shape[1] >= num_blocks and shape[1] % num_blocks == 0:
        step_bytes = strides[0] * tensor.element_bytes
        return [
            (tensor.address + index * step_bytes, shape[1:], strides[1:])
            for index in range(shape[0])
        ]
    raise ConfigError(f"layer {name} has shape {shape}, in which {num_blocks} blocks are not found")


def _run_elements(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """How many elements the dimensions span if they are dense, in whatever order; else None."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return expected


def _without_blocks(
    tensor: TensorShape, num_blocks: int
) -> tuple[Sequence[int | str], Sequence[float]]:
    """Return shape and strides, the number of blocks left out.

    A dimension that counts blocks says into how many each is split; a stride over all blocks, how
    long it is for one.
    """
    sizes, strides = tensor.shape, tensor.strides
    at = next((i for i, size in enumerate(sizes) if size and size % num_blocks == 0), None)
    if at is None:
        return sizes, strides
    shape = [f"blocks*{size // num_blocks}" if i == at else size for i, size in enumerate(sizes)]
    whole = strides[at] * sizes[at]
    return shape, [stride / num_blocks if stride >= whole else stride for stride in strides]


def _names(values: Iterable[str]) -> str:
    return ",".join(sorted({value for value in values if value}))


def _rope_kinds(parameters: Mapping[str, object]) -> set[str]:
    """Return the kinds of scaling; a model may have one for each kind of layer."""
    kind = parameters.get("rope_type", parameters.get("type"))
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    own = {str(kind)} if kind is not None else set()
    return own.union(*(_rope_kinds(value) for value in nested))


def _vocabulary(file: Path) -> bytes:
    if not file.is_file():
        return b""
    if file.name != "tokenizer.json":
        return file.read_bytes()
    content = _json_of(file)
    kept = {name: value for name, value in content.items() if name not in _RUNTIME_PARTS}
    return json.dumps(kept, sort_keys=True).encode()


def _json_of(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
