"""How long prompts may be that are handed over."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvferry.doctor.handoffs import HandoffPlan, Lengths, lengths_of
from tests.unit.doctor.deployment_facts import LAYOUT, info_of, instance_of, with_http


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "wanted", "expected"),
    [
        (16, 1000, 1024, Lengths(short=81, long=1025)),
        (128, 1000, 1024, Lengths(short=129, long=1025)),
        (16, 100, 1024, Lengths(short=81, long=321)),
        (16, 20, 1024, None),
    ],
    ids=["small blocks", "vLLM's blocks", "small pool", "too small a pool"],
)
def test_whole_blocks_and_one_token_that_fit_the_pool(
    block_size: int, num_blocks: int, wanted: int, expected: Lengths | None
) -> None:
    layout = msgspec.structs.replace(LAYOUT, block_size_tokens=block_size)
    source = instance_of(info_of("prefill", layout))
    target = instance_of(info_of("decode", layout, num_blocks=num_blocks))
    for one, other in ((source, target), (target, source)):
        assert lengths_of(HandoffPlan(num_tokens=wanted), one, other) == expected


def test_prompts_leave_room_for_an_answer() -> None:
    instance = instance_of(info_of("prefill"))
    short = with_http(instance, replace(instance.http, max_model_len=200))
    assert lengths_of(HandoffPlan(), short, instance) == Lengths(short=81, long=193)
