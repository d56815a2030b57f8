"""Options that make no sense, or that would open the instance to strangers, are refused."""

from __future__ import annotations

import pytest

from kvferry.connector.config import endpoint
from kvferry.errors import ConfigError
from kvferry.protocol.keys import UserKeyFile
from tests.unit.connector.conftest import make_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"handoff_lease_s": 0.0}, "handoff_lease_s"),
        ({"receive_timeout_s": float("nan")}, "receive_timeout_s"),
        ({"control_timeout_s": float("inf")}, "control_timeout_s"),
        ({"max_held_share": 0.0}, "max_held_share"),
        ({"max_quarantine_share": 1.5}, "max_quarantine_share"),
        ({"control_port": 70_000}, "control_port"),
        ({"instance_id": ""}, "instance_id must have 1 to"),
        ({"instance_id": "i" * 1000}, "instance_id must have 1 to"),
        ({"cluster_key": b"short"}, "32 bytes"),
        ({"control_host": "0.0.0.0"}, "cluster key"),
        ({"control_host": "prefill.example"}, "cluster key"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


def test_other_hosts_are_fine_with_a_key() -> None:
    assert make_config(control_host="0.0.0.0", cluster_key=b"k" * 32).control_host == "0.0.0.0"


def test_ipv6_endpoints_have_brackets() -> None:
    assert endpoint("::1", 5) == "tcp://[::1]:5"
    assert endpoint("[::1]", 5) == "tcp://[::1]:5"
    assert endpoint("127.0.0.1", 5) == "tcp://127.0.0.1:5"


def test_heartbeats_fit_into_a_short_lease() -> None:
    assert make_config(handoff_lease_s=30.0).heartbeat_interval_s == 5.0
    assert make_config(handoff_lease_s=3.0).heartbeat_interval_s == 1.0


def test_a_users_own_key_counts_on_loopback_only() -> None:
    own = {"cluster_key": b"k" * 64, "user_key_file": UserKeyFile("/home/a/key", 7, "id")}
    config = make_config(**own)
    assert config.key_text == "the key of uid 7 in /home/a/key"
    assert not config.has_cluster_key
    with pytest.raises(ConfigError, match="set a cluster key"):
        make_config(control_host="0.0.0.0", **own)


def test_whose_key_it_is_can_be_told_without_telling_it() -> None:
    assert make_config().key_text == "no key"
    assert make_config(cluster_key=b"k" * 32).key_text == "the cluster key"
