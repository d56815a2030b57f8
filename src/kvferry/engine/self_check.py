"""Compare the paged forward of a freshly loaded model with the unmodified model's own.

Models may carry a feature that no configuration field betrays; wrong logits betray it at start-up
rather than in answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from kvferry.engine.attention import ATTENTION_NAME
from kvferry.engine.forward import ModelForward
from kvferry.engine.live_request import LiveRequest
from kvferry.engine.paged_cache import PagedCache
from kvferry.engine.plan import Chunk
from kvferry.engine.request import EngineRequest
from kvferry.errors import ConfigError
from kvferry.protocol.hashing import chain_root
from kvferry.protocol.ids import BlockNumber, RequestId

if TYPE_CHECKING:
    from kvferry.engine.model import LoadedModel

_BLOCK_SIZE_TOKENS = 4
_NUM_TOKENS = 20
# Chunks end within and at the end of a block, one is a single token, the last is longer.
_CHUNK_ENDS = (6, 7, 12, 20)
_MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


@torch.inference_mode()
def reference_logits(module: nn.Module) -> Tensor:
    """Return the last token's logits for a short fixed prompt, by the library's own attention."""
    settings = module.config
    token_ids = torch.tensor([_prompt(settings.vocab_size)])  # type: ignore[union-attr, arg-type]
    device = next(module.parameters()).device
    module.set_attn_implementation("sdpa")  # type: ignore[operator]
    try:
        output = module(token_ids.to(device), use_cache=False)
    finally:
        module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    logits: Tensor = output.logits[0, -1].float().cpu()
    return logits


def require_equal_logits(model: LoadedModel, expected: Tensor) -> None:
    """Compute the same prompt in chunks through a paged cache; raise ``ConfigError`` if it differs.

    Leaves nothing behind.
    """
    shape = model.cache_shape(_BLOCK_SIZE_TOKENS)
    num_blocks = -(-_NUM_TOKENS // _BLOCK_SIZE_TOKENS)
    memory = torch.zeros(num_blocks * shape.block_bytes, dtype=torch.uint8, device=model.device)
    forward = ModelForward(model, PagedCache(shape, memory))
    request = _request(_prompt(model.vocabulary_size))
    request.blocks = [BlockNumber(block) for block in reversed(range(num_blocks))]
    start = 0
    for end in _CHUNK_ENDS:
        logits = forward([Chunk(request, start, end - start, samples=end == _NUM_TOKENS)])
        start = end
    difference = np.linalg.norm(logits[0] - expected.numpy()) / np.linalg.norm(expected.numpy())
    if not difference <= _MAX_RELATIVE_ERROR[model.dtype]:
        raise ConfigError(
            f"{type(model.module).__name__} is not supported: paged attention gives logits that "
            f"differ by {difference:.3g} from the model's own"
        )


def _prompt(vocabulary_size: int) -> list[int]:
    return [(7 + 31 * index) % vocabulary_size for index in range(_NUM_TOKENS)]


def _request(prompt: list[int]) -> LiveRequest:
    return LiveRequest(
        request=EngineRequest(request_id=RequestId("self-check"), prompt_token_ids=tuple(prompt)),
        on_output=lambda output: None,
        arrival=0,
        arrived_s=0.0,
        seed=0,
        root=chain_root(b""),
        stop_token_ids=frozenset(),
        max_total_tokens=len(prompt) + 1,
        token_ids=prompt,
    )
