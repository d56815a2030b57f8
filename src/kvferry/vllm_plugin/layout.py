"""From vLLM's real KV tensors to kvferry's regions and layout. Pure; knows shapes, not torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.transport.base import MemoryKind, MemoryRegion

_WHOLE_FILE_BYTES = 512 << 20
_SAMPLE_BYTES = 1 << 20
_SAMPLES_PER_FILE = 64
_NOT_COMPARED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One layer's cache as it lies in memory; strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int


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
