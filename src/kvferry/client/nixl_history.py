"""A decode instance's blocks as vLLM's NixlConnector names them, for one read. Pure.

These are bare block numbers: whoever reads them does not check what they hold. So only what is
known to return is read: whole blocks of the prompt that was answered, never of the answer, whose
tokens may come back otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

LIFETIME_S = 450.0
"""vLLM keeps them for 480 s by default, and declines a read shortly before."""
SEAM_TOKENS = 8
"""The last tokens of a prompt may change where more text follows."""
MIN_BLOCKS = 6
"""With fewer, the block size can't be told from the numbers of tokens and blocks: vLLM may have
added one or two that are empty."""

# With these the prompt is not made of the messages alone, or not all of it is computed.
_RESHAPING_FIELDS = frozenset(
    (
        "add_generation_prompt", "add_special_tokens", "continue_final_message", "echo",
        "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds", "prompt_logprobs",
        "reasoning_effort", "suffix", "truncate_prompt_tokens", "truncation_side",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NixlHistory:
    """The transfer parameters that a prefill leg reads them by."""

    params: msgspec.Raw


class ReadOnce:
    """Gives its blocks out once: vLLM reuses them as soon as they have been read."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: NixlHistory) -> None:
        self._blocks: NixlHistory | None = blocks

    def take(self) -> NixlHistory | None:
        """Return the blocks the first time, None from then on."""
        blocks, self._blocks = self._blocks, None
        return blocks


_Count = Annotated[int, Meta(ge=0)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count


class _Params(msgspec.Struct):
    do_remote_decode: bool
    remote_block_ids: tuple[list[_Count]]
    """One group of layers."""
    remote_num_tokens: _Count


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw
    usage: _Usage


_answer_decoder = msgspec.json.Decoder(_Answer)
_params_decoder = msgspec.json.Decoder(_Params)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_plain_prompt(fields: Mapping[str, object]) -> bool:
    """Whether a body's prompt follows from its messages or text and their template alone."""
    return _RESHAPING_FIELDS.isdisjoint(fields)


def history_in(answer: bytes) -> NixlHistory | None:
    """Return what a decode answer says is kept of its prompt; None where nothing can be used."""
    try:
        found = _answer_decoder.decode(answer)
        params = _params_decoder.decode(found.kv_transfer_params)
        fields = _fields_decoder.decode(found.kv_transfer_params)
    except (msgspec.DecodeError, RecursionError):
        return None
    block_ids = params.remote_block_ids[0]
    block_size_tokens = block_size(params.remote_num_tokens, len(block_ids))
    num_prompt_tokens = min(found.usage.prompt_tokens, params.remote_num_tokens)
    if not params.do_remote_decode or block_size_tokens is None:
        return None
    num_blocks = max(0, num_prompt_tokens - SEAM_TOKENS) // block_size_tokens
    if not num_blocks:
        return None
    fields["remote_block_ids"] = _raw([block_ids[:num_blocks]])
    fields["remote_num_tokens"] = _raw(num_blocks * block_size_tokens)
    return NixlHistory(_raw(fields))


def block_size(num_tokens: int, num_blocks: int) -> int | None:
    """Return the only power of two for which ``num_tokens`` fill ``num_blocks``, if there is one.

    That of vLLM's common models; others are not read.
    """
    if num_blocks < MIN_BLOCKS:
        return None
    least, most = -(-num_tokens // num_blocks), (num_tokens - 1) // (num_blocks - 1)
    size = 1 << max(0, least - 1).bit_length()
    return size if least <= size <= most else None


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
