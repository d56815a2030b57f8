"""Random LoRA adapters for the tiny model, and questions to them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.tiny_model import TINY_VOCABULARY_SIZE, TinyShape, make_tiny_model
from tests.vllm.asking import Json, Question

ADAPTER = "a"
"""The name of every adapter here."""
_SHAPE = TinyShape(num_heads=4, num_kv_heads=2, head_size=32, hidden_size=128)
_NUM_LAYERS = 2
_RANK = 8


class AdapterQuestion(Question):
    """A question to the adapter rather than to the model itself."""

    def body(self, **fields: object) -> Json:
        return super().body(**{"model": ADAPTER, **fields})

    def again(self) -> AdapterQuestion:
        return AdapterQuestion(self.tokens, self.max_tokens)

    def continued(self, answer: Sequence[int], num_tokens: int, seed: int) -> AdapterQuestion:
        tokens = (*self.tokens, *answer, *_tiny_tokens(num_tokens, seed))
        return AdapterQuestion(tokens, self.max_tokens, self.salt)


def tiny_question(num_tokens: int, seed: int) -> Question:
    """A random prompt of the tiny model's tokens, to the model itself."""
    return Question(_tiny_tokens(num_tokens, seed))


def question(num_tokens: int, seed: int) -> AdapterQuestion:
    """The same to the adapter."""
    return AdapterQuestion(_tiny_tokens(num_tokens, seed))


def _tiny_tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randrange(3, TINY_VOCABULARY_SIZE) for _ in range(num_tokens))


def make_base_model(folder: Path) -> Path:
    """A tiny model with a head size that vLLM computes on a CPU."""
    return make_tiny_model(folder, num_layers=_NUM_LAYERS, shape=_SHAPE)


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter that changes keys and values much, other weights for another ``seed``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    size, num_out = _SHAPE.hidden_size, _SHAPE.num_kv_heads * _SHAPE.head_size
    weights = {}
    for layer in range(_NUM_LAYERS):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(_RANK, size, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(num_out, _RANK, generator=generator)
    unfinished = folder / "unfinished"
    save_file(weights, unfinished)
    unfinished.replace(folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
