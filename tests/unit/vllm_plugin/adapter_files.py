"""LoRA adapters as files, and as vLLM names them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass
class FakeAdapter:
    lora_path: str
    lora_name: str = "a"
    lora_int_id: int = 1
    load_inplace: bool = False


def write_adapter(folder: Path, weights: bytes, **config: object) -> str:
    """Write an adapter as a download does: each file in the place of the one before."""
    folder.mkdir(exist_ok=True)
    content = {"r": 8, "base_model_name_or_path": str(folder), **config}
    for name, data in (
        ("adapter_model.safetensors", weights),
        ("adapter_config.json", json.dumps(content).encode()),
    ):
        unfinished = folder / "unfinished"
        unfinished.write_bytes(data)
        unfinished.replace(folder / name)
    return str(folder)
