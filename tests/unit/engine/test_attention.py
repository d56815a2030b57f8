"""Paged attention against attention computed in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvferry.engine.attention import (
    MAX_SCORED_TOKENS,
    ChunkSegment,
    DecodeGroup,
    PagedBatch,
    _attend_chunk_anywhere,
    _attend_chunk_on_cpu,
    _attend_long_past,
    _Heads,
    paged_attention,
)
from kvferry.errors import ConfigError

HEADS, KV_HEADS, SIZE = 6, 2, 8


def naive(query: Tensor, key: Tensor, value: Tensor, before: int) -> Tensor:
    """``[1, heads, tokens, size]`` over past and chunk; ``[1, tokens, heads, size]`` out."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) * 0.3
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(before)
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values).transpose(1, 2)


@pytest.mark.parametrize(("count", "before"), [(5, 0), (5, 1), (1, 7), (70, 33), (33, 200)])
@pytest.mark.parametrize("attend", [_attend_chunk_anywhere, _attend_chunk_on_cpu])
def test_chunks_with_and_without_a_past(count: int, before: int, attend: object) -> None:
    assert callable(attend)
    torch.manual_seed(count)
    query = torch.randn(1, count, HEADS, SIZE).transpose(1, 2)
    key = torch.randn(1, before + count, KV_HEADS, SIZE).transpose(1, 2)
    value = torch.randn(1, before + count, KV_HEADS, SIZE).transpose(1, 2)
    heads = _Heads(query, key[:, :, before:], value[:, :, before:], 0.3)
    past = torch.stack((key[:, :, :before], value[:, :, :before])) if before else None
    found = attend(heads, past)
    assert torch.allclose(found, naive(query, key, value, before), atol=1e-5)


@pytest.mark.parametrize(
    ("count", "before"),
    [(1, 64), (20, 300), (64, 200), (65, 700), (150, 450), (128, 384), (129, 400)],
)
def test_a_short_chunk_after_a_long_past_in_bfloat16(count: int, before: int) -> None:
    """Its error is at most three times the fused kernel's, and half that of plain scores."""
    torch.manual_seed(count)
    query = (3 * torch.randn(1, count, HEADS, SIZE)).bfloat16().transpose(1, 2)
    everything = torch.randn(2, 1, before + count, KV_HEADS, SIZE).bfloat16().transpose(2, 3)
    heads = _Heads(query, everything[0, :, :, before:], everything[1, :, :, before:], 0.3)
    scratch = torch.full(
        (2, HEADS // KV_HEADS * min(count, MAX_SCORED_TOKENS) * (before + count)), torch.nan
    )
    found = _attend_long_past(heads, everything[:, 0].contiguous(), scratch.bfloat16())
    exact = naive(query.double(), everything[0].double(), everything[1].double(), before)
    fused = _attend_chunk_on_cpu(heads, everything[..., :before, :])
    plain = naive(query, everything[0], everything[1], before)
    assert error(found, exact) < min(0.5 * error(plain, exact), 3 * error(fused, exact) + 1e-4)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).pow(2).mean().sqrt())


def module(layer: int = 0) -> torch.nn.Module:
    result = torch.nn.Module()
    result.layer_idx = layer  # type: ignore[assignment]
    return result


def test_padded_decodes_see_their_own_tokens_only() -> None:
    """Two sequences of 5 and 3 tokens in blocks of 2, scattered; one new token each."""
    torch.manual_seed(0)
    tables, lengths, block_size = ((3, 0, 5), (4, 1)), (5, 3), 2
    pages = torch.full((2 * 6, block_size * KV_HEADS * SIZE), float("nan"))
    pages.nan_to_num_(nan=77.0)
    slots = pages.view(-1, KV_HEADS * SIZE)
    sequences = [torch.randn(2, length, KV_HEADS * SIZE) for length in lengths]
    write = torch.empty(1, 2, 2, dtype=torch.int64)
    for index, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        for position in range(length):
            for half in range(2):
                slot = (table[position // 2] * 2 + half) * block_size + position % 2
                if position == length - 1:
                    write[0, half, index] = slot
                else:
                    slots[slot] = sequences[index][half, position]
    padded = [[*tables[0]], [*tables[1], tables[1][-1]]]
    gather = torch.tensor(padded).view(1, 1, -1) * 2 + torch.tensor([0, 1]).view(1, 2, 1)
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None])[:, None, None, :]
    group = DecodeGroup(0, 2, 5, gather.view(1, -1), mask)
    batch = PagedBatch(pages, slots, write, (group,), ())
    query = torch.randn(1, HEADS, 2, SIZE)
    new = torch.stack([sequence[:, -1] for sequence in sequences], 1).view(2, 1, 2, KV_HEADS, SIZE)
    found, _ = paged_attention(
        module(),
        query,
        new[0].transpose(1, 2),
        new[1].transpose(1, 2),
        None,
        scaling=0.3,
        paged=batch,
    )
    for index, sequence in enumerate(sequences):
        key, value = sequence.view(2, 1, -1, KV_HEADS, SIZE).transpose(2, 3)
        expected = naive(query[:, :, index : index + 1], key, value, lengths[index] - 1)
        assert torch.allclose(found[:, index : index + 1], expected, atol=1e-5)


@pytest.mark.parametrize(("before", "is_scored"), [(0, False), (6, False), (6, True)])
def test_of_the_last_layer_only_the_last_token_counts(before: int, is_scored: bool) -> None:
    """Two layers of the same content: the first attends for every token."""
    torch.manual_seed(before)
    count, layers = 2, 2
    total, width = before + count, KV_HEADS * SIZE
    everything = torch.randn(2, total, KV_HEADS, SIZE).bfloat16()
    # Blocks of one token: page ``(token * layers + layer) * 2 + half`` is also the slot.
    pages = torch.zeros(total * layers * 2, width).bfloat16()
    pages.view(total, layers, 2, width)[:before] = (
        everything[:, :before].transpose(0, 1).reshape(before, 1, 2, width)
    )
    rows = torch.arange(total * layers * 2).view(total, layers, 2).permute(1, 2, 0)
    by_head = rows[:, :, None] * KV_HEADS + torch.arange(KV_HEADS)[:, None]
    gather = (by_head if is_scored else rows[..., :before]).reshape(layers, -1)
    scratch = torch.empty(2, HEADS // KV_HEADS * MAX_SCORED_TOKENS * total).bfloat16()
    new = everything[:, before:].transpose(1, 2).unsqueeze(1)
    query = torch.randn(1, HEADS, count, SIZE).bfloat16()

    def attend(layer: int, *, samples: bool) -> Tensor:
        chunk = ChunkSegment(
            0,
            count,
            before,
            gather if before else None,
            scratch if is_scored else None,
            samples=samples,
        )
        batch = PagedBatch(pages, pages, rows[..., before:], (), (chunk,))
        return paged_attention(
            module(layer), query, new[0], new[1], None, scaling=0.3, paged=batch
        )[0].float()

    key, value = everything.float().transpose(1, 2).unsqueeze(1)
    expected = naive(query.float(), key, value, before)
    assert torch.allclose(attend(0, samples=False), expected, atol=0.03)
    last = attend(1, samples=True)
    assert torch.allclose(last[:, -1], expected[:, -1], atol=0.03)
    assert not last[:, :-1].any()
    assert not attend(1, samples=False).any()
    assert torch.equal(
        pages.view(total, layers, 2, -1)[:, 0], pages.view(total, layers, 2, -1)[:, 1]
    )


@pytest.mark.parametrize("argument", ["sliding_window", "softcap", "s_aux"])
def test_an_argument_with_an_unknown_effect_is_refused(argument: str) -> None:
    empty = torch.empty(0)
    batch = PagedBatch(empty, empty, empty, (), (ChunkSegment(0, 1, 0, None),))
    key = torch.zeros(1, KV_HEADS, 1, SIZE)
    with pytest.raises(ConfigError, match=argument):
        paged_attention(module(), key, key, key, None, scaling=1.0, paged=batch, **{argument: 3})
