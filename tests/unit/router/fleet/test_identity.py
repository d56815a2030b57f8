"""Who an instance says it is."""

from __future__ import annotations

import pytest

from kvferry.protocol.params import PeerAddress
from kvferry.router.fleet.identity import InstanceIdentity, parse_identity
from kvferry.router.fleet.registry import Fleet, Health

_ANSWER = (
    b'{"instance_id": "p", "epoch": 5, "control_address": "tcp://h:1", "layout": {"x": 1},'
    b'"capabilities": ["pull", "push"], "num_blocks": 8, "num_free_blocks": 2}'
)


def _identity(num_free_blocks: int = 0, *capabilities: str) -> InstanceIdentity:
    return InstanceIdentity(
        instance_id="p",  # type: ignore[arg-type]
        epoch=5,  # type: ignore[arg-type]
        control_address="tcp://h:1",
        capabilities=capabilities,
        num_blocks=8,
        num_free_blocks=num_free_blocks,
    )


def test_unknown_fields_are_ignored() -> None:
    identity = parse_identity(_ANSWER)
    assert identity == _identity(2, "pull", "push")
    assert identity is not None
    assert identity.peer == PeerAddress(identity.instance_id, identity.epoch, "tcp://h:1")
    assert (identity.can_push, identity.free_share) == (True, 0.25)


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"instance_id": "", "epoch": 1, "control_address": "x"}',
     b'{"instance_id": "p", "epoch": -1, "control_address": "x"}',
     b'{"instance_id": "p", "epoch": 1}', b"[" * 100_000],
)  # fmt: skip
def test_anything_else_is_no_identity(answer: bytes) -> None:
    assert parse_identity(answer) is None


@pytest.mark.parametrize("health", [Health.SUSPECT, Health.DOWN])
def test_identity_is_forgotten_with_health(health: Health) -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    fleet.set_health("http://p", Health.HEALTHY)
    fleet.set_identity("http://p", _identity())
    before = fleet.snapshot().prefill[0]
    fleet.set_health("http://p", Health.HEALTHY)
    assert fleet.snapshot().prefill[0].identity == before.identity == _identity()
    fleet.set_health("http://p", health)
    assert fleet.snapshot().prefill[0].identity is None


def test_identity_is_forgotten_after_a_connection_failure() -> None:
    fleet = Fleet(["http://p"], ["http://d"])
    fleet.set_health("http://p", Health.HEALTHY)
    fleet.set_identity("http://p", _identity())
    fleet.report_connection_failure("http://p", "reset")
    assert fleet.snapshot().prefill[0].identity is None
