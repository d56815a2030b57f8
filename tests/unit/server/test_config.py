"""An instance that others could reach is not started without a key."""

from __future__ import annotations

import pytest

from kvferry.connector.config import ExchangeConfig
from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.keys import UserKeyFile
from kvferry.server.config import HttpConfig, InstanceConfig


def make_config(
    host: str, cluster_key: bytes | None, user_file: UserKeyFile | None = None
) -> InstanceConfig:
    exchange = ExchangeConfig(
        instance_id=InstanceId("one"),
        epoch=Epoch(1),
        cluster_key=cluster_key,
        user_key_file=user_file,
    )
    return InstanceConfig(
        model="m", engine=EngineConfig(), exchange=exchange, http=HttpConfig(host=host)
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_other_hosts_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="cluster key"):
        make_config(host, None)
    assert make_config(host, b"k" * 32).http.host == host


def test_loopback_needs_none() -> None:
    assert make_config("127.0.0.1", None).http.host == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1"])
def test_a_users_own_key_is_none_for_other_hosts(host: str) -> None:
    user_file = UserKeyFile("/home/a/key", 7, "id")
    with pytest.raises(ConfigError, match="cluster key"):
        make_config(host, b"k" * 64, user_file)
    assert make_config("127.0.0.1", b"k" * 64, user_file).exchange.user_key_file is user_file
