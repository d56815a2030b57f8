"""What names a host."""

from __future__ import annotations

import pytest

from kvferry.doctor.facts import LOOPBACK, host_of
from tests.unit.doctor.deployment_facts import well


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("http://127.0.0.1:1", LOOPBACK),
        ("tcp://127.0.0.2:1", LOOPBACK),
        ("http://localhost", LOOPBACK),
        ("tcp://[::1]:1", LOOPBACK),
        ("http://Gpu-7.example:8000", "gpu-7.example"),
        ("tcp://[2001:db8::1]:1", "2001:db8::1"),
        ("http://[broken", ""),
    ],
)
def test_all_loopback_addresses_are_one_host(address: str, host: str) -> None:
    assert host_of(address) == host


def test_an_instance_is_found_by_its_url() -> None:
    facts = well()
    assert facts.instance(facts.instances[1].url) is facts.instances[1]
    with pytest.raises(KeyError):
        facts.instance("http://nowhere")
