"""A tiny random model in a folder, for tests that need real forwards but no meaning.

Two layers, grouped-query attention, 8192 positions; a byte-level tokenizer is written beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TINY_VOCABULARY_SIZE = 320
TINY_EOS_TOKEN_ID = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """Sizes of a tiny model's attention."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    hidden_size: int = 96


WIDE_SHAPE = TinyShape(num_heads=128, num_kv_heads=128, head_size=128, hidden_size=128)
"""128 KiB of KV a token and layer in float32: short prompts whose handoffs take long."""
_NORMAL_SHAPE = TinyShape()


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    max_positions: int = 8192,
    shape: TinyShape = _NORMAL_SHAPE,
) -> Path:
    """Write a random Llama-like model (float32) and its tokenizer into ``folder``; return it.

    Different ``seed`` values give different weights in the same layout.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    num_heads, num_kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
        max_position_embeddings=max_positions,
        bos_token_id=1,
        eos_token_id=TINY_EOS_TOKEN_ID,
        pad_token_id=0,
        tie_word_embeddings=False,
        # Wide weights, so that the two best logits of a random model are rarely near a tie.
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32).eval()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Special tokens 0 to 2, then one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    wrapped.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    wrapped.save_pretrained(folder)
