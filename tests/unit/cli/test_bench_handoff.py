"""The deployment is sized so that prefill keeps every prompt and decode cannot."""

from __future__ import annotations

import pytest

from kvferry.bench.background import BackgroundPlan
from kvferry.cli.bench_handoff import sized_for_background
from kvferry.cluster.topology import InstanceGroup, Topology


@pytest.mark.parametrize("length_tokens", [128, 512, 2048, 4096])
@pytest.mark.parametrize("num_streams", [1, 4, 12])
def test_decode_has_no_room_for_the_prompts_that_take_turns(
    length_tokens: int, num_streams: int
) -> None:
    asked = BackgroundPlan(length_tokens=length_tokens, num_streams=num_streams)
    sized, plan = sized_for_background(Topology(), asked)
    prompt_blocks = length_tokens // 16
    prefill, decode = sized.prefill[0].num_blocks, sized.decode[0].num_blocks
    assert prefill is not None
    assert decode is not None
    assert prefill > (plan.num_moving + plan.num_held) * prompt_blocks
    stream_blocks = plan.num_streams * plan.stream_tokens // 16
    assert decode > stream_blocks + (plan.num_held + 2) * prompt_blocks
    assert decode < (plan.num_moving - 1) * (prompt_blocks + 2)


def test_there_is_one_of_each_and_the_rest_is_kept() -> None:
    group = InstanceGroup(count=3, kv_cache_gib=2.0, arguments=("--verify-transfers",))
    topology = Topology(prefill=(group, group), decode=(group,), transport="shm")
    sized, _ = sized_for_background(topology, BackgroundPlan())
    assert (len(sized.prefill), sized.prefill[0].count, sized.decode[0].count) == (1, 1, 1)
    assert sized.prefill[0].arguments == ("--verify-transfers",)
    assert sized.prefill[0].kv_cache_gib is None
    assert sized.transport == "shm"
