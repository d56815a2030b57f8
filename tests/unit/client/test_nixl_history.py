"""Which blocks of an answer's handle are used: whole ones of the prompt, once."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvferry.client.nixl_history import (
    MIN_BLOCKS,
    SEAM_TOKENS,
    NixlHistory,
    ReadOnce,
    block_size,
    history_in,
    is_plain_prompt,
)


def _answer(num_prompt_tokens: int, num_tokens: int, ids: object, **changed: object) -> bytes:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": ids,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": 12.5,
        "future": {"a": 1},
        **changed,
    }
    return json.dumps(
        {"usage": {"prompt_tokens": num_prompt_tokens}, "kv_transfer_params": params}
    ).encode()


def _kept(answer: bytes) -> dict[str, Any] | None:
    kept = history_in(answer)
    return None if kept is None else dict(json.loads(bytes(kept.params)))


def test_whole_blocks_of_the_prompt_are_kept_and_all_else_is_relayed() -> None:
    kept = _kept(_answer(130, 199, [list(range(13))]))
    assert kept is not None
    assert kept["remote_block_ids"] == [[0, 1, 2, 3, 4, 5, 6]]
    assert kept["remote_num_tokens"] == 7 * 16
    assert kept["remote_blocks_expiry_time"] == 12.5
    assert kept["future"] == {"a": 1}


def test_a_block_with_the_prompts_last_tokens_is_left_out() -> None:
    blocks = [list(range(13))]
    at_seam, after_it = (
        _kept(_answer(n, 199, blocks)) for n in (128 + SEAM_TOKENS - 1, 128 + SEAM_TOKENS)
    )
    assert at_seam is not None
    assert after_it is not None
    assert (at_seam["remote_num_tokens"], after_it["remote_num_tokens"]) == (112, 128)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b'{"kv_transfer_params": null, "usage": {"prompt_tokens": 1}}',
        _answer(10, 199, [list(range(13))]),  # not one block
        _answer(130, 199, [list(range(13)), [1]]),  # two groups of layers
        _answer(130, 199, []),
        _answer(130, 199, None),
        _answer(130, 199, [list(range(13))], do_remote_decode=False),
        _answer(130, 199, [list(range(20))]),  # no block size fits
    ],
)
def test_nothing_else_is_kept(answer: bytes) -> None:
    assert history_in(answer) is None


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("num_spare", [0, 1, 2])
def test_the_block_size_is_right_or_not_known(size: int, num_spare: int) -> None:
    for num_tokens in range(1, 20 * size):
        num_blocks = -(-num_tokens // size) + num_spare
        assert block_size(num_tokens, num_blocks) in (size, None)


@pytest.mark.parametrize("size", [16, 128])
def test_the_block_size_of_a_long_prompt_is_known(size: int) -> None:
    for num_blocks in range(MIN_BLOCKS, 20):
        assert block_size(num_blocks * size, num_blocks) == size
        assert block_size((num_blocks - 1) * size + 1, num_blocks) == size


def test_blocks_are_given_out_once() -> None:
    blocks = NixlHistory(msgspec.Raw(b"{}"))
    once = ReadOnce(blocks)
    assert [once.take(), once.take()] == [blocks, None]


@pytest.mark.parametrize(
    ("body", "is_plain"),
    [
        (b'{"prompt": "a", "max_tokens": 1, "tools": []}', True),
        (b'{"prompt": "a", "truncate_prompt_tokens": 5}', False),
        (b'{"messages": [], "continue_final_message": true}', False),
    ],
)
def test_prompts_that_are_cut_or_added_to_are_told_apart(body: bytes, is_plain: bool) -> None:
    assert is_plain_prompt(json.loads(body)) is is_plain
