"""What the instances are, and where they are asked: which options are taken and refused."""

from __future__ import annotations

import pytest

from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.engines import (
    EngineConfig,
    parse_control_addresses,
    parse_nixl_addresses,
)

_CONTROL = {"http://p:1": "tcp://p:7"}
_NIXL = {"http://p:1": NixlAddress("e", "p", 5600)}


def test_control_ports_are_known_by_the_urls_of_instances() -> None:
    given = ["http://P:1/=tcp://p:7001", "http://[::1]:2=tcp://[::1]:7002"]
    assert parse_control_addresses(given) == {
        "http://p:1": "tcp://p:7001",
        "http://[::1]:2": "tcp://[::1]:7002",
    }


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["tcp://p:7001"], "no instance URL"),
        (["http://p:1=p:7001"], "tcp://HOST:PORT"),
        (["http://p:1=tcp://p"], "tcp://HOST:PORT"),
        (["http://p:1=tcp://p:0"], "tcp://HOST:PORT"),
        (["http://p:1=tcp://p:70000"], "tcp://HOST:PORT"),
        (["http://p:1=tcp://::1:7"], "tcp://HOST:PORT"),
        (["http://p:1=ipc:///tmp/x"], "tcp://HOST:PORT"),
        (["p:1=tcp://p:7"], "not of the form http"),
        (["http://p:1=tcp://p:7", "http://p:1/=tcp://p:8"], "given twice"),
    ],
)
def test_other_control_ports_are_refused(given: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_control_addresses(given)


def test_two_instances_have_two_control_ports() -> None:
    with pytest.raises(
        ConfigError, match=r"tcp://p:7001 is given for http://p:1 and for http://q:1"
    ):
        EngineConfig(control_addresses={"http://p:1": "tcp://p:7001", "http://q:1": "tcp://p:7001"})


def test_nixl_addresses_name_engine_side_channel_and_ranks() -> None:
    given = ["http://p:1=e-1@10.0.0.1:5600", "http://q:1=e=2@[fe80::1]:5601/tp4"]
    addresses = parse_nixl_addresses(given)
    assert addresses == {
        "http://p:1": NixlAddress("e-1", "10.0.0.1", 5600),
        "http://q:1": NixlAddress("e=2", "fe80::1", 5601, 4),
    }
    assert addresses["http://q:1"].endpoint == "tcp://[fe80::1]:5601"


@pytest.mark.parametrize(
    "value", ["10.0.0.1:5600", "e@h", "@h:1", "e@h:0", "e@h:1/tp0", "e@h:1/4", "e@a b:1", ""]
)
def test_other_nixl_addresses_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="ENGINE_ID@HOST:PORT"):
        parse_nixl_addresses([f"http://p:1={value}"])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (EngineConfig(), EngineKind.KVFERRY),
        (EngineConfig(control_addresses=_CONTROL), EngineKind.VLLM),
        (EngineConfig(nixl_addresses=_NIXL), EngineKind.VLLM_NIXL_PUSH),
        (EngineConfig(kind=EngineKind.VLLM), EngineKind.VLLM),
        (
            EngineConfig(kind=EngineKind.KVFERRY, control_addresses=_CONTROL),
            EngineKind.KVFERRY,
        ),
    ],
)
def test_auto_follows_from_what_is_given(config: EngineConfig, kind: EngineKind) -> None:
    assert config.resolved_kind is kind


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"control_addresses": _CONTROL, "nixl_addresses": _NIXL}, "not both"),
        ({"kind": EngineKind.VLLM_NIXL, "control_addresses": _CONTROL}, "no control port"),
        ({"kind": EngineKind.VLLM_NIXL, "nixl_addresses": _NIXL}, "vllm-nixl-push only"),
        ({"kind": EngineKind.VLLM, "nixl_addresses": _NIXL}, "vllm-nixl-push only"),
    ],
)
def test_options_of_two_kinds_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engines", "named"),
    [
        (EngineConfig(control_addresses={"http://x:1": "tcp://x:7"}), "--control: http://x:1 is"),
        (EngineConfig(nixl_addresses={"http://d:1": NixlAddress("e", "d", 1)}), "--nixl: http://d"),
    ],
)
def test_addresses_of_strangers_are_refused(engines: EngineConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RouterConfig(prefill_urls=("http://p:1",), decode_urls=("http://d:1",), engines=engines)
