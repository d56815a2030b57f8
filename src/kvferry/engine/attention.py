"""Paged attention, as an attention function of the ``transformers`` library.

A forward is one flat batch ``[1, tokens]`` of several sequences: first those that add one token,
then longer chunks. Its geometry comes as the keyword argument ``paged`` (a ``PagedBatch``), so that
nothing is global. Each layer writes its new keys and values into the pool, then attends. Knows
blocks by number; knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvferry.errors import ConfigError

ATTENTION_NAME = "kvferry_paged"
# Arguments that change nothing for a causal model without dropout, or that models always pass.
_HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"}
    | {"position_embeddings", "output_hidden_states", "return_dict"}
)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length that each add one token, padded to the longest of them.

    ``gather[layer]`` are the pages of keys, then of values, sequence by sequence.
    ``mask`` is ``[sequences, 1, 1, padded tokens]``, true where there is a token; None: all.
    """

    first_token: int
    num_sequences: int
    num_kv_tokens: int
    gather: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkSegment:
    """One sequence that adds ``num_tokens`` tokens after ``num_past_tokens`` in the pool.

    ``gather[layer]`` are the pages of the past's keys, then values; None without a past.
    """

    first_token: int
    num_tokens: int
    num_past_tokens: int
    gather: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Geometry of one forward.

    ``pages`` and ``slots`` are the pool's views (see ``PagedCache``); ``write[layer]`` are the
    slots of the new tokens' keys, then of their values.
    """

    pages: Tensor
    slots: Tensor
    write: Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkSegment, ...]


def register_paged_attention() -> None:
    """Make ``ATTENTION_NAME`` known to the ``transformers`` library; safe to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class _Heads:
    """One layer's new queries, keys and values, ``[1, heads or kv_heads, tokens, head_size]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float

    @property
    def group(self) -> int:
        """Query heads that share one head of keys."""
        return self.query.shape[1] // self.key.shape[1]

    def tokens(self, first: int, count: int) -> _Heads:
        """Return the part of ``count`` tokens from ``first`` on."""
        span = slice(first, first + count)
        return _Heads(
            self.query[:, :, span], self.key[:, :, span], self.value[:, :, span], self.scaling
        )


def paged_attention(  # noqa: PLR0913 - the signature is the library's
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged: PagedBatch,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend for one layer: ``[1, heads, tokens, size]`` in, ``[1, tokens, heads, size]`` out.

    Raises ``ConfigError`` for an argument whose effect is not implemented (a window, a soft cap).
    """
    refused = [n for n, v in others.items() if v is not None and n not in _HARMLESS_ARGUMENTS]
    if refused or dropout:
        raise ConfigError(
            f"this model's attention needs {', '.join(refused) or 'dropout'}, "
            "which the paged attention does not support"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    heads = _Heads(query, key, value, scaling)
    _write(paged, heads, layer)
    parts = [_attend_decodes(paged, group, heads, layer) for group in paged.decodes]
    attend = _attend_chunk_on_cpu if query.device.type == "cpu" else _attend_chunk
    for chunk in paged.chunks:
        past = None
        if chunk.gather is not None:
            past = _gather(paged, chunk.gather[layer], heads, 1)[..., : chunk.num_past_tokens, :]
        parts.append(attend(heads.tokens(chunk.first_token, chunk.num_tokens), past))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _write(paged: PagedBatch, heads: _Heads, layer: int) -> None:
    """Put the new tokens' keys and values into the pool."""
    for slots, new in zip(paged.write[layer], (heads.key, heads.value), strict=True):
        rows = new[0].transpose(0, 1)
        paged.slots.index_copy_(0, slots, rows.reshape(rows.shape[0], -1))


def _gather(paged: PagedBatch, pages: Tensor, heads: _Heads, num_sequences: int) -> Tensor:
    """Copy pages into ``[keys or values, sequences, kv_heads, tokens, head_size]``."""
    rows = torch.index_select(paged.pages, 0, pages)
    num_kv_heads, head_size = heads.key.shape[1], heads.key.shape[3]
    return rows.view(2, num_sequences, -1, num_kv_heads, head_size).transpose(2, 3)


def _attend_decodes(paged: PagedBatch, group: DecodeGroup, heads: _Heads, layer: int) -> Tensor:
    """One token a sequence: the heads that share keys become the rows of one product."""
    count, num_heads, head_size = group.num_sequences, heads.query.shape[1], heads.query.shape[3]
    past = _gather(paged, group.gather[layer], heads, count)[..., : group.num_kv_tokens, :]
    span = slice(group.first_token, group.first_token + count)
    rows = heads.query[0, :, span].transpose(0, 1)
    rows = rows.reshape(count, num_heads // heads.group, heads.group, head_size)
    attended = scaled_dot_product_attention(rows, past[0], past[1], group.mask, scale=heads.scaling)
    return attended.reshape(1, count, num_heads, head_size)


def _attend_chunk(heads: _Heads, past: Tensor | None) -> Tensor:
    """Any device: one product over past and chunk, with an explicit mask."""
    keys, values, mask = heads.key, heads.value, None
    if past is not None:
        keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        shape = (heads.key.shape[2], keys.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=keys.device).tril(past.shape[3])
    attended = scaled_dot_product_attention(
        heads.query,
        keys,
        values,
        mask,
        is_causal=mask is None,
        scale=heads.scaling,
        enable_gqa=True,
    )
    return attended.transpose(1, 2)


def _attend_chunk_on_cpu(heads: _Heads, past: Tensor | None) -> Tensor:
    """CPU: past and chunk apart, merged by their log-sum-exps, so that nothing masked is computed.

    The past needs no mask, so the heads that share keys become rows of one longer product.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    group = heads.group
    keys, values = heads.key, heads.value
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    own: Tensor
    own, own_lse = flash(heads.query, keys, values, 0.0, True, scale=heads.scaling)
    if past is None:
        return own.transpose(1, 2)
    rows = heads.query.reshape(1, heads.key.shape[1], -1, heads.query.shape[3])
    old, old_lse = flash(rows, past[0], past[1], scale=heads.scaling)
    share = torch.sigmoid(old_lse.reshape(own_lse.shape) - own_lse)
    return own.lerp_(old.reshape(own.shape), share.unsqueeze(-1).to(own.dtype)).transpose(1, 2)
