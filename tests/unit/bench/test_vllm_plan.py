"""Which deployment serves what, and in which order steps run."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest

from kvferry.bench.vllm import VllmArm, VllmDeployment, VllmPlan, plan_steps
from kvferry.errors import ConfigError
from kvferry.protocol.params import Role

_PLAN = VllmPlan(lengths_tokens=(64, 512), repeats=4, rounds=2)


@pytest.mark.parametrize("all_at_once", [True, False])
def test_each_arm_runs_each_length_in_each_repeat(all_at_once: bool) -> None:
    steps = plan_steps(_PLAN, random.Random(1), all_at_once=all_at_once)
    counted = collections.Counter((step.arm, step.num_tokens, step.repeat) for step in steps)
    expected = {
        (arm, length, repeat)
        for arm in VllmArm
        for length in ((2048,) if arm.has_turns else (64, 512))
        for repeat in range(4)
    }
    assert set(counted) == expected
    assert set(counted.values()) == {1}


def test_arms_alternate_where_all_deployments_fit() -> None:
    steps = plan_steps(_PLAN, random.Random(1), all_at_once=True)
    first = [step.arm for step in steps if (step.repeat, step.num_tokens) == (0, 64)]
    assert steps[: len(first)] == [s for s in steps if (s.repeat, s.num_tokens) == (0, 64)]
    firsts = {next(s.arm for s in steps if (s.repeat, s.num_tokens) == (r, 64)) for r in range(4)}
    assert len(firsts) > 1


def test_deployments_are_started_once_a_round_where_they_do_not() -> None:
    steps = plan_steps(_PLAN, random.Random(1), all_at_once=False)
    runs = [(s.arm.deployment, s.repeat // 2) for s in steps]
    starts = [run for run, before in zip(runs, [None, *runs], strict=False) if run != before]
    assert len(starts) == 8
    first_round, second_round = starts[:4], starts[4:]
    assert {number for _, number in first_round} == {0}
    assert [d for d, _ in first_round] != [d for d, _ in second_round]


def test_only_the_deployments_of_the_arms_are_needed() -> None:
    plan = VllmPlan(arms=(VllmArm.FERRY_PULL, VllmArm.FERRY_PUSH, VllmArm.NIXL_PUSH))
    assert plan.deployments == (VllmDeployment.NIXL_PUSH, VllmDeployment.FERRY)


def test_only_bidirectional_nixl_needs_prefill_without_a_cache() -> None:
    arguments = {
        (deployment, role): deployment.arguments(role)
        for deployment in VllmDeployment
        for role in Role
        if deployment.arguments(role)
    }
    assert list(arguments) == [(VllmDeployment.NIXL_BIDIRECTIONAL, Role.PREFILL)]
    config = VllmDeployment.NIXL_BIDIRECTIONAL.transfer_config()
    assert config["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True}


@pytest.mark.parametrize(
    "wrong",
    [
        {"arms": ()},
        {"arms": (VllmArm.NIXL_PULL, VllmArm.NIXL_PULL)},
        {"lengths_tokens": ()},
        {"lengths_tokens": (0,)},
        {"repeats": 1, "rounds": 2},
        {"rounds": 0},
        {"max_tokens": 3},
        {"history_tokens": 12},
        {"new_tokens": 0},
    ],
)
def test_plans_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        VllmPlan(**wrong)
