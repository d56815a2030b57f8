"""What must be alike in two vLLMs beyond the layout: KV tensors, tokenizer, template. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.protocol.compatibility import Compatibility, content_digest
from kvferry.vllm_plugin.layout import TensorShape

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
_ROPE_KINDS_OF_ANY_LENGTH = frozenset(
    {
        "",
        "default",
        "linear",
        "llama3",
        "mllama4",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
    }
    | {"dynamic", "ntk", "mrope", "bailing_mrope", "openpangu", "proportional"}
)
"""Rotary scalings that vLLM computes alike whatever the longest sequence is."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """By what and as what a layer's KV is kept."""

    backend: str
    instruction_set: str
    """Empty where the backend lays memory out alike on all processors."""
    cache_dtype: str


def cache_dtype_name(configured: str, tensor_dtype: str) -> str:
    """Return one name for one kind of cache, whichever way it was asked for."""
    if configured in ("", "auto"):
        return tensor_dtype
    return _FP8_NAMES.get(configured, configured)


def tensors_digest(
    tensors: Mapping[str, TensorShape],
    kinds: Mapping[str, LayerKind],
    num_blocks: int,
    layout_name: str,
) -> str:
    """Return a digest of all KV tensors, in their order, whatever the number of blocks."""
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
    return content_digest(json.dumps([layout_name, described]).encode())


def cache_compatibility(
    tensors: Mapping[str, TensorShape],
    kinds: Mapping[str, LayerKind],
    num_blocks: int,
    layout_name: str,
) -> Compatibility:
    """Return what peers compare of the KV tensors: by name, and all of it as a digest."""
    return Compatibility(
        attention_backend=_names(kind.backend for kind in kinds.values()),
        instruction_set=_names(kind.instruction_set for kind in kinds.values()),
        kv_cache_layout=layout_name,
        kv_cache_dtype=_names(kind.cache_dtype for kind in kinds.values()),
        kv_tensors_digest=tensors_digest(tensors, kinds, num_blocks, layout_name),
    )


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
