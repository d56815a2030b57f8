"""Paged attention, as an attention function of the ``transformers`` library.

A forward is one flat batch ``[1, tokens]`` of several sequences: first those that add one token,
then longer chunks. Its geometry comes as the keyword argument ``paged`` (a ``PagedBatch``), so that
nothing is global. Each layer writes its new keys and values into the pool, then attends. Knows
blocks by number; knows no request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvferry.errors import ConfigError

ATTENTION_NAME = "kvferry_paged"
MAX_SCORED_TOKENS = 128
"""Tokens whose scores against a long past are in the scratch memory at once."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
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

    ``gather[layer]`` are the pages of the past's keys, then values; None without a past. With
    ``scratch``, ``[2, at least heads that share keys * MAX_SCORED_TOKENS * all tokens]``, they are
    the rows (one head's part of a slot) of past and chunk together: keys, then values, head by
    head. ``samples``: the logits of its last token are wanted.
    """

    first_token: int
    num_tokens: int
    num_past_tokens: int
    gather: Tensor | None
    scratch: Tensor | None = None
    samples: bool = True


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Geometry of one forward.

    ``pages`` and ``slots`` are the pool's views (see ``PagedCache``); ``write[layer]`` are the
    slots of the new tokens' keys, then of their values, for each of the model's layers.
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
    attend = _attend_chunk if layer < paged.write.shape[0] - 1 else _attend_last_token
    parts += [attend(paged, chunk, heads, layer) for chunk in paged.chunks]
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


def _gather_past(paged: PagedBatch, chunk: ChunkSegment, pages: Tensor, heads: _Heads) -> Tensor:
    """Copy the pages of a chunk's past, without what stands after it in the last of them."""
    return _gather(paged, pages, heads, 1)[..., : chunk.num_past_tokens, :]


def _gather_by_head(paged: PagedBatch, rows: Tensor, heads: _Heads) -> Tensor:
    """Copy rows into ``[keys or values, kv_heads, tokens, head_size]``, each head contiguous.

    Whole products want it so; one copy does it, where gathering pages needs another for the order.
    """
    num_kv_heads, head_size = heads.key.shape[1], heads.key.shape[3]
    gathered = torch.index_select(paged.slots.view(-1, head_size), 0, rows)
    return gathered.view(2, num_kv_heads, -1, head_size)


def _attend_decodes(paged: PagedBatch, group: DecodeGroup, heads: _Heads, layer: int) -> Tensor:
    """One token a sequence: the heads that share keys become the rows of one product."""
    count, num_heads, head_size = group.num_sequences, heads.query.shape[1], heads.query.shape[3]
    past = _gather(paged, group.gather[layer], heads, count)[..., : group.num_kv_tokens, :]
    span = slice(group.first_token, group.first_token + count)
    rows = heads.query[0, :, span].transpose(0, 1)
    rows = rows.reshape(count, num_heads // heads.group, heads.group, head_size)
    attended = scaled_dot_product_attention(rows, past[0], past[1], group.mask, scale=heads.scaling)
    return attended.reshape(1, count, num_heads, head_size)


def _attend_chunk(paged: PagedBatch, chunk: ChunkSegment, heads: _Heads, layer: int) -> Tensor:
    """Attend for all tokens of one chunk, by what suits the device and the lengths."""
    own = heads.tokens(chunk.first_token, chunk.num_tokens)
    if chunk.gather is not None and chunk.scratch is not None:
        everything = _gather_by_head(paged, chunk.gather[layer], heads)
        return _attend_long_past(own, everything, chunk.scratch)
    past = None
    if chunk.gather is not None:
        past = _gather_past(paged, chunk, chunk.gather[layer], heads)
    on_cpu = own.query.device.type == "cpu"
    return (_attend_chunk_on_cpu if on_cpu else _attend_chunk_anywhere)(own, past)


def _attend_last_token(paged: PagedBatch, chunk: ChunkSegment, heads: _Heads, layer: int) -> Tensor:
    """The last layer: nobody reads what it makes of a token whose logits are not wanted.

    The others' rows are zero.
    """
    own = heads.tokens(chunk.first_token, chunk.num_tokens)
    attended = torch.zeros_like(own.query.transpose(1, 2))
    if not chunk.samples:
        return attended
    keys, values = own.key, own.value
    if chunk.gather is not None and chunk.scratch is not None:
        keys, values = _gather_by_head(paged, chunk.gather[layer], heads).unsqueeze(1)
    elif chunk.gather is not None:
        past = _gather_past(paged, chunk, chunk.gather[layer], heads)
        keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
    rows = own.query[:, :, -1].reshape(1, keys.shape[1], own.group, -1)
    last = scaled_dot_product_attention(rows, keys, values, scale=own.scaling)
    attended[:, -1] = last.reshape(attended[:, -1].shape)
    return attended


def _attend_chunk_anywhere(heads: _Heads, past: Tensor | None) -> Tensor:
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
    own, own_lse = _attend_own(heads)
    if past is None:
        return own.transpose(1, 2)
    rows = heads.query.reshape(1, heads.key.shape[1], -1, heads.query.shape[3])
    old, old_lse = _flash(rows, past[0], past[1], scale=heads.scaling)
    share = torch.sigmoid(old_lse.reshape(own_lse.shape) - own_lse)
    return own.lerp_(old.reshape(own.shape), share.unsqueeze(-1).to(own.dtype)).transpose(1, 2)


def _attend_own(heads: _Heads) -> tuple[Tensor, Tensor]:
    """Attend within the chunk; also return the log-sum-exps, ``[1, heads, tokens]``."""
    keys, values = heads.key, heads.value
    if heads.group > 1:
        keys, values = (half.repeat_interleave(heads.group, 1) for half in (keys, values))
    own, lse = _flash(heads.query, keys, values, 0.0, True, scale=heads.scaling)
    return own, lse


def _own_peaks(queries: Tensor, heads: _Heads, later: Tensor) -> Tensor:
    """Return about the largest score of each row within the chunk, ``[..., tokens, 1]``.

    A log-sum-exp is as good, and the fused kernel finds it sooner in a long chunk.
    """
    shape = (*queries.shape[:-1], 1)
    if heads.query.shape[2] > MAX_SCORED_TOKENS:
        return _attend_own(heads)[1].reshape(shape).to(queries.dtype)
    rows = queries.reshape(queries.shape[0], -1, queries.shape[-1])
    scores = torch.bmm(rows, heads.key[0].transpose(1, 2)).view(*queries.shape[:-1], -1)
    return scores.masked_fill_(later, -math.inf).amax(-1, keepdim=True).mul_(heads.scaling)


def _attend_long_past(heads: _Heads, everything: Tensor, scratch: Tensor) -> Tensor:
    """CPU, bfloat16: a short chunk after a long past, by whole products in ``scratch``.

    ``everything`` is ``[2, kv_heads, tokens, head_size]``, the chunk's own tokens last.

    Scores are rounded to bfloat16, so they are taken less each row's peak within the chunk itself:
    what counts in the softmax is then near zero, where the rounding is finest.
    """
    num_kv_heads, count, size = heads.key.shape[1:]
    later = torch.ones((count, count), dtype=torch.bool).triu(1)
    queries = heads.query.reshape(num_kv_heads, heads.group, count, size)
    shifts = _own_peaks(queries, heads, later)
    attended = torch.empty(queries.shape, dtype=queries.dtype)
    # A head at a time: the scores of all of them at once do not fit into a core's cache.
    for head in range(num_kv_heads):
        keys, values = everything[:, head : head + 1]
        for first in range(0, count, MAX_SCORED_TOKENS):
            piece = slice(first, first + MAX_SCORED_TOKENS)
            rows, offsets = (each[head, :, piece] for each in (queries, shifts))
            scored = (1, rows.shape[0] * rows.shape[1], keys.shape[1])
            scores, weights = (half[: math.prod(scored)].view(scored) for half in scratch)
            torch.baddbmm(
                offsets.reshape(1, -1, 1),
                rows.reshape(1, -1, size),
                keys.transpose(1, 2),
                beta=-1,
                alpha=heads.scaling,
                out=scores,
            )
            own_columns = scores.view(heads.group, -1, keys.shape[1])[..., -count:]
            own_columns.masked_fill_(later[piece], -math.inf)
            torch.softmax(scores, -1, out=weights)
            attended[head, :, piece] = torch.bmm(weights, values).view(rows.shape)
    return attended.view(1, -1, count, size).transpose(1, 2)
