"""The plugin's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.vllm_plugin.settings import PluginSettings, WorkerRank, parse_settings
from tests.own_key import own_key


def test_nothing_has_to_be_set() -> None:
    config = parse_settings({}).exchange_config("1234")
    assert (config.instance_id, config.control_host) == ("vllm-1234", "127.0.0.1")


def test_an_instance_with_a_port_is_named_after_where_it_is_found() -> None:
    settings = parse_settings({"control_port": 5000, "advertise_host": "10.0.0.7"})
    assert settings.exchange_config("1234").instance_id == "10.0.0.7:5000"


def test_ranks_share_name_and_epoch_on_ports_in_a_row() -> None:
    settings = parse_settings({"control_port": 5000, "advertise_host": "10.0.0.7"})
    first = WorkerRank(0, 2)
    ranks = (first, WorkerRank(1, 2, first.epoch))
    configs = [settings.exchange_config("e", rank) for rank in ranks]
    assert [config.control_port for config in configs] == [5000, 5001]
    assert configs[0].epoch == configs[1].epoch
    assert {config.instance_id for config in configs} == {"10.0.0.7:5000"}


@pytest.mark.parametrize(("port", "num_ranks"), [(0, 2), (65_535, 2), (65_529, 8)])
def test_ranks_need_a_port_each(port: int, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match="control_port"):
        parse_settings({"control_port": port}).check_ports(num_ranks)


@pytest.mark.parametrize(("port", "num_ranks"), [(0, 1), (65_535, 1), (65_528, 8)])
def test_ports_that_ranks_have_are_taken(port: int, num_ranks: int) -> None:
    parse_settings({"control_port": port}).check_ports(num_ranks)


def test_two_starts_have_two_epochs() -> None:
    settings = parse_settings({})
    assert settings.exchange_config("a").epoch != settings.exchange_config("a").epoch


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"controlport": 1}, "controlport"),
        ({"control_port": 70_000}, "control_port"),
        ({"handoff_lease_s": 0}, "handoff_lease_s"),
        ({"max_retained_share": 2}, "max_retained_share"),
        ({"max_registered_share": 0}, "max_registered_share"),
        ({"retention_s": "long"}, "retention_s"),
    ],
)
def test_a_wrong_option_is_named(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_settings(extra)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("control_prt", "control_port"),
        ("controlPort", "control_port"),
        ("retention", "retention_s"),
    ],
)
def test_of_a_misspelt_option_the_nearest_is_named_and_all_that_are_known(
    key: str, nearest: str
) -> None:
    told = f"unknown key '{key}'; the nearest is '{nearest}'"
    with pytest.raises(ConfigError, match=told) as caught:
        parse_settings({"retention_s": 1, key: 7001})
    assert all(name in str(caught.value) for name in PluginSettings.__dataclass_fields__)


def test_other_hosts_need_a_cluster_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster key"):
        parse_settings({"control_host": "0.0.0.0"}).exchange_config("a")
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    extra = {"control_host": "0.0.0.0", "cluster_key_file": str(key)}
    assert parse_settings(extra).exchange_config("a").cluster_key == b"k" * 32


def test_on_loopback_the_users_own_key_is_the_key() -> None:
    config = parse_settings({}).exchange_config("a")
    key = own_key()
    assert (config.cluster_key, config.user_key_file) == (key.secret, key.user_file)
    without = parse_settings({"no_user_key": True}).exchange_config("a")
    assert (without.cluster_key, without.user_key_file) == (None, None)
    with pytest.raises(ConfigError, match="cluster key"):
        parse_settings({"no_user_key": True, "control_host": "0.0.0.0"}).exchange_config("a")


@pytest.mark.parametrize("verifies", [True, False])
def test_transfers_are_verified_where_that_is_wanted(verifies: bool) -> None:
    config = parse_settings({"verify_transfers": verifies}).exchange_config("a")
    assert config.verify_transfers is verifies
