"""One forward pass: chunks of several sequences in, one row of logits per sampling chunk out.

Owns the way from block tables to the tensors that attention needs. Knows no queue and no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.attention import MAX_SCORED_TOKENS, ChunkSegment, DecodeGroup, PagedBatch
from kvferry.engine.live_request import Chunk
from kvferry.engine.paged_cache import KEY_AND_VALUE, PagedCache

if TYPE_CHECKING:
    from kvferry.engine.model import LoadedModel

Logits = npt.NDArray[np.float32]

# Sequences share one padded decode product while the shortest has this share of the longest.
_MIN_FILL = 0.75
# A past of so many times the chunk is attended to by whole products, else by a fused kernel: the
# products compute the chunk's own upper triangle too, and win by their larger tiles.
_LONG_PAST = 3


@dataclass(frozen=True, slots=True)
class _Row:
    """A chunk and its rank in the caller's list."""

    rank: int
    chunk: Chunk

    @property
    def end(self) -> int:
        return self.chunk.start + self.chunk.count


class ModelForward:
    """Runs a model over a paged cache. Called from one thread at a time."""

    def __init__(self, model: LoadedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        halves = np.arange(cache.shape.num_layers * KEY_AND_VALUE, dtype=np.int64)
        self._halves = halves.reshape(cache.shape.num_layers, KEY_AND_VALUE, 1)

    def __call__(self, chunks: Sequence[Chunk]) -> Logits:
        """Compute ``chunks``; return logits ``[sampling chunks, vocabulary]`` in their order.

        When it returns, the KV of every token of ``chunks`` is in the pool.
        """
        rows = [_Row(rank, chunk) for rank, chunk in enumerate(chunks)]
        singles = sorted((r for r in rows if r.chunk.count == 1), key=lambda r: -r.end)
        longer = [r for r in rows if r.chunk.count > 1]
        ordered = singles + longer
        batch = self._describe(singles, longer)
        token_ids = np.concatenate([_token_ids(row.chunk) for row in ordered])
        positions = np.concatenate([np.arange(r.chunk.start, r.end) for r in ordered])
        ends = np.cumsum([row.chunk.count for row in ordered]) - 1
        last = [
            (row.rank, int(end))
            for row, end in zip(ordered, ends, strict=True)
            if row.chunk.samples
        ]
        last.sort()
        logits = self._model.logits(
            self._to_device(token_ids[None]),
            self._to_device(positions[None]),
            self._to_device(np.array([end for _, end in last], dtype=np.int64)),
            batch,
        )
        return logits.float().cpu().numpy()

    def _describe(self, singles: Sequence[_Row], longer: Sequence[_Row]) -> PagedBatch:
        size = self._cache.shape.block_size_tokens
        written = []
        for row in (*singles, *longer):
            blocks = np.asarray(row.chunk.request.blocks, dtype=np.int64)
            positions = np.arange(row.chunk.start, row.end)
            written.append((blocks[positions // size], positions % size))
        pages = self._page_rows(np.concatenate([blocks for blocks, _ in written]))
        slots = pages * size + np.concatenate([offsets for _, offsets in written])
        first = len(singles)
        segments = []
        for row in longer:
            segments.append(self._segment(row, first))
            first += row.chunk.count
        return PagedBatch(
            pages=self._cache.pages,
            slots=self._cache.slots,
            write=self._to_device(slots),
            decodes=self._decode_groups(singles),
            chunks=tuple(segments),
        )

    def _segment(self, row: _Row, first_token: int) -> ChunkSegment:
        past, count = row.chunk.start, row.chunk.count
        if past == 0:
            return ChunkSegment(first_token, count, past, None, samples=row.chunk.samples)
        scratch = self._scratch(row)
        if scratch is None:
            gather = self._gather_rows([self._blocks_until(row, past)])
        else:
            gather = self._gather_head_rows(row)
        return ChunkSegment(first_token, count, past, gather, scratch, samples=row.chunk.samples)

    def _scratch(self, row: _Row) -> torch.Tensor | None:
        """Return memory for the scores of a chunk that is short against its past, else None."""
        dtype = self._cache.shape.dtype
        on_cpu = self._model.device.type == "cpu"
        if (
            not on_cpu
            or dtype is not torch.bfloat16
            or row.chunk.start < _LONG_PAST * row.chunk.count
        ):
            return None
        num_rows = (
            self._model.num_heads
            // self._model.num_kv_heads
            * min(row.chunk.count, MAX_SCORED_TOKENS)
        )
        return torch.empty(2, num_rows * row.end, dtype=dtype)

    def _decode_groups(self, singles: Sequence[_Row]) -> tuple[DecodeGroup, ...]:
        """Group neighbours of ``singles``, which come longest first."""
        groups: list[DecodeGroup] = []
        begin = 0
        for index in range(1, len(singles) + 1):
            if index < len(singles) and singles[index].end >= _MIN_FILL * singles[begin].end:
                continue
            groups.append(self._decode_group(singles[begin:index], begin))
            begin = index
        return tuple(groups)

    def _decode_group(self, rows: Sequence[_Row], first_token: int) -> DecodeGroup:
        longest = rows[0].end
        tables = [self._blocks_until(row, row.end) for row in rows]
        mask = None
        if rows[-1].end != longest:
            ends = np.array([row.end for row in rows])
            mask = self._to_device((np.arange(longest) < ends[:, None])[:, None, None, :])
        gather = self._gather_rows(tables)
        return DecodeGroup(first_token, len(rows), longest, gather, mask)

    def _blocks_until(self, row: _Row, num_tokens: int) -> list[int]:
        num_blocks = -(-num_tokens // self._cache.shape.block_size_tokens)
        return list(row.chunk.request.blocks[:num_blocks])

    def _gather_rows(self, tables: Sequence[list[int]]) -> torch.Tensor:
        """Return ``[layers, 2 * sequences * blocks]`` pages; short tables repeat their last."""
        longest = max(len(table) for table in tables)
        padded = [[*table, *table[-1:] * (longest - len(table))] for table in tables]
        pages = self._page_rows(np.array(padded, dtype=np.int64).reshape(-1))
        return self._to_device(pages.reshape(pages.shape[0], -1))

    def _gather_head_rows(self, row: _Row) -> torch.Tensor:
        """Return ``[layers, 2 * kv_heads * tokens]`` rows of ``slots`` cut into heads."""
        shape = self._cache.shape
        size, positions = shape.block_size_tokens, np.arange(row.end)
        blocks = np.asarray(row.chunk.request.blocks, dtype=np.int64)[positions // size]
        slots = self._page_rows(blocks) * size + positions % size
        heads = np.arange(shape.num_kv_heads).reshape(-1, 1)
        rows = slots[:, :, None] * shape.num_kv_heads + heads
        return self._to_device(rows.reshape(shape.num_layers, -1))

    def _page_rows(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ``[layers, 2, blocks]`` rows of ``PagedCache.pages``."""
        return blocks * (self._cache.shape.num_layers * KEY_AND_VALUE) + self._halves

    def _to_device(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)


def _token_ids(chunk: Chunk) -> npt.NDArray[np.int64]:
    tokens = chunk.request.token_ids[chunk.start : chunk.start + chunk.count]
    return np.asarray(tokens, dtype=np.int64)
