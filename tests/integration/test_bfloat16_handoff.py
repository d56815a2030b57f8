"""The bundled model in bfloat16: moved blocks are bit-equal, a token that differs is a near tie.

Batch mixes alone change tokens in bfloat16, so equal tokens are no test there; equal bytes are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import KvTransferParams, Mode, Role
from tests.integration.push_rig import Side
from tests.unit.engine.rig import Answer

NUM_TOKENS = 12
LENGTHS = (100, 300, 513, 700)
NEAR_TIE = 0.5
"""Four steps of bfloat16 at the size of this model's logits, which is 16 to 32."""


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Side, Side, Side]]:
    from kvferry.engine.bundled_model import bundled_model_dir

    folder = bundled_model_dir()
    options: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 256, "prefill_chunk_tokens": 512}
    made = tuple(
        Side(name, folder, exchange={"max_held_share": 1.0}, **options)
        for name in ("plain", "prefill", "decode")
    )
    yield made  # type: ignore[misc]
    for side in made:
        side.close()


def hand_over(prefill: Side, decode: Side, prompt: Sequence[int], mode: Mode, name: str) -> Answer:
    """Begin one handoff; return decode's answer."""
    if mode is Mode.PUSH:
        prefill.send(prompt, name)
        return decode.take_from(prefill, prompt, name, max_tokens=NUM_TOKENS)
    role = KvTransferParams(transfer_id=TransferId(name), role=Role.PREFILL)
    handoff = prefill.submit(prompt, role).wait().outputs[-1].handoff
    assert handoff is not None
    return decode.submit(prompt, handoff, max_tokens=NUM_TOKENS)


def bytes_of(side: Side, prompt: Sequence[int]) -> list[bytes]:
    """Return the memory of the prompt's full blocks, found by content."""
    root = chain_root(side.engine.model.layout(16).fingerprint())
    hashes = block_hashes(root, prompt, 16)
    blocks = side.pool.acquire_cached(hashes)
    assert len(blocks) == len(hashes)
    rows = side.memory.reshape(-1, side.block_bytes)
    found = [rows[block].tobytes() for block in blocks]
    side.pool.drop(blocks)
    return found


def assert_near_tie(
    plain: Side, prompt: Sequence[int], expected: list[int], got: list[int]
) -> None:
    """The first token that differs was one of two that the model could hardly tell apart."""
    pairs = zip(expected, got, strict=True)
    where = next(index for index, (wanted, found) in enumerate(pairs) if wanted != found)
    history = [*prompt, *expected[:where]]
    logprob = plain.submit(history, max_tokens=1, logprobs=2).wait().outputs[0].logprob
    assert logprob is not None
    (first, best), (second, next_best) = logprob.top[:2]
    assert {first, second} == {expected[where], got[where]}
    assert best - next_best <= NEAR_TIE


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)  # the model may have to be converted first
@pytest.mark.parametrize("mode", list(Mode))
def test_moved_blocks_are_bit_equal(sides: tuple[Side, Side, Side], mode: Mode) -> None:
    plain, prefill, decode = sides
    source = random.Random(mode)
    prompts = [[source.randrange(3, 49_000) for _ in range(length)] for length in LENGTHS]
    expected = [plain.submit(p, max_tokens=NUM_TOKENS).wait().tokens for p in prompts]
    answers = [
        hand_over(prefill, decode, prompt, mode, f"{mode}-{number}")
        for number, prompt in enumerate(prompts)
    ]
    for prompt, tokens, answer in zip(prompts, expected, answers, strict=True):
        got = answer.wait().tokens
        report = answer.outputs[-1].report
        assert report is not None
        assert (report.receive_outcome, report.num_received_tokens) == ("received", len(prompt))
        moved = bytes_of(decode, prompt)
        assert moved == bytes_of(prefill, prompt)
        assert np.frombuffer(b"".join(moved), dtype=np.uint8).any()
        if got != tokens:
            assert_near_tie(plain, prompt, tokens, got)
