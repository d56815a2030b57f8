"""Steps are taken on the deployment of their arm, and count only if they were what they say."""

from __future__ import annotations

import contextlib
import random

import pytest

from kvferry.bench.legs_client import LegsClient
from kvferry.bench.vllm import (
    VllmArm,
    VllmBench,
    VllmDeployment,
    VllmPlan,
    VllmSample,
    VllmStep,
)
from kvferry.client.engine_kinds import EngineKind
from kvferry.errors import MeasurementError
from tests.unit.bench.scripted_vllm import ScriptedPair, serving_pair

_PLAN = VllmPlan(lengths_tokens=(20,), history_tokens=40, new_tokens=5, repeats=1, rounds=1)


class _Stage:
    """Deployments that are all there."""

    def __init__(self, pairs: dict[VllmDeployment, ScriptedPair]) -> None:
        self._pairs = pairs

    async def use(self, deployment: VllmDeployment) -> LegsClient:
        return self._pairs[deployment].client


async def _run(
    arms: list[VllmArm], **decode: bool
) -> tuple[list[VllmSample], dict[VllmDeployment, ScriptedPair]]:
    async with contextlib.AsyncExitStack() as stack:
        pairs = {
            deployment: await stack.enter_async_context(serving_pair(deployment.engine, **decode))
            for deployment in VllmDeployment
        }
        if "holds" in decode:
            pairs[VllmDeployment.FERRY].prefill.holds = decode["holds"]
        bench = VllmBench(_Stage(pairs), _PLAN, random.Random(1))
        steps = [VllmStep(arm, 40 if arm.has_turns else 20, 0) for arm in arms]
        return await bench.run(steps), pairs


async def test_a_sample_adds_up() -> None:
    (sample,), _ = await _run([VllmArm.NIXL_PULL])
    assert (sample.num_prompt_tokens, sample.num_moved_tokens) == (20, 20)
    assert sample.prefill_s + sample.after_prefill_s == pytest.approx(sample.ttft_s)
    assert sample.extra_after_prefill_s == sample.after_prefill_s - sample.decode_step_s


async def test_every_arm_asks_its_deployment_for_its_mode() -> None:
    arms = [arm for arm in VllmArm if not arm.has_turns]
    samples, pairs = await _run(arms)
    assert [sample.arm for sample in samples] == arms
    asked = [
        body["kv_transfer_params"]["mode"]
        for body in pairs[VllmDeployment.FERRY].prefill.bodies
        if len(body["prompt"]) == 20
    ]
    assert asked == ["pull", "push"]


async def test_where_others_ran_before_a_request_does_not_count() -> None:
    arms = [VllmArm.NIXL_PULL, VllmArm.FERRY_PULL, VllmArm.FERRY_PULL, VllmArm.NIXL_PULL]
    _, pairs = await _run(arms)
    lengths = [len(body["prompt"]) for body in pairs[VllmDeployment.NIXL].prefill.bodies]
    assert lengths == [512, 128, 20, 128, 20]
    ferry = [len(body["prompt"]) for body in pairs[VllmDeployment.FERRY].prefill.bodies]
    assert ferry[-3:] == [128, 20, 20]


async def test_second_turns_contain_the_first_and_its_answer() -> None:
    arms = [VllmArm.FERRY_RECOMPUTE, VllmArm.FERRY_READ_BACK]
    samples, pairs = await _run(arms)
    assert [s.num_history_tokens for s in samples] == [40, 40]
    assert [s.num_prompt_tokens for s in samples] == [45, 45]
    assert [s.num_read_back_tokens for s in samples] == [0, 45]
    pair = pairs[VllmDeployment.FERRY]
    firsts = [b["prompt"] for b in pair.decode.bodies if len(b["prompt"]) == 40 - 12]
    seconds = [b for b in pair.prefill.bodies if len(b["prompt"]) == 45]
    assert [b["prompt"][:40] for b in seconds] == [[*f, *range(12)] for f in firsts]
    # Prefill has never seen the first turn.
    assert not any(len(b["prompt"]) == 28 for b in pair.prefill.bodies)
    assert ["history" in b["kv_transfer_params"] for b in seconds] == [False, True]


async def test_a_stream_of_stock_vllm_carries_no_handle() -> None:
    (sample,), pairs = await _run([VllmArm.NIXL_READ_BACK])
    assert sample.num_read_back_tokens == 0
    told = pairs[VllmDeployment.NIXL_BIDIRECTIONAL].prefill.bodies[-1]["kv_transfer_params"]
    assert told["remote_block_ids"] is None


@pytest.mark.parametrize(
    ("arm", "decode", "words"),
    [
        (VllmArm.FERRY_PUSH, {"moves": False}, "ferry-push: nothing was moved for 20 tokens"),
        (VllmArm.FERRY_READ_BACK, {"holds": False}, "nothing was read back: gone"),
    ],
)
async def test_what_is_not_its_arm_s_ends_the_run(
    arm: VllmArm, decode: dict[str, bool], words: str
) -> None:
    with pytest.raises(MeasurementError, match=words):
        await _run([arm], **decode)


def test_each_deployment_is_asked_in_its_own_words() -> None:
    assert {d: d.engine for d in VllmDeployment} == {
        VllmDeployment.NIXL: EngineKind.VLLM_NIXL,
        VllmDeployment.NIXL_PUSH: EngineKind.VLLM_NIXL_PUSH,
        VllmDeployment.NIXL_BIDIRECTIONAL: EngineKind.VLLM_NIXL,
        VllmDeployment.FERRY: EngineKind.VLLM,
    }


async def test_no_step_begins_when_time_is_over() -> None:
    async with serving_pair(EngineKind.VLLM_NIXL) as pair:
        bench = VllmBench(_Stage({VllmDeployment.NIXL: pair}), _PLAN, random.Random(1))
        done: list[VllmStep] = []
        steps = [VllmStep(VllmArm.NIXL_PULL, 20, repeat) for repeat in range(5)]
        samples = await bench.run(steps, is_over=lambda: len(done) == 2, on_step=done.append)
    assert [sample.repeat for sample in samples] == [0, 1]
