"""An instance that others could reach is not started without a key."""

from __future__ import annotations

import pytest

from kvferry.connector.config import ExchangeConfig
from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.server.config import HttpConfig, InstanceConfig


def make_config(host: str, cluster_key: bytes | None) -> InstanceConfig:
    exchange = ExchangeConfig(
        instance_id=InstanceId("one"), epoch=Epoch(1), cluster_key=cluster_key
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
