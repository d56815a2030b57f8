"""Runs the conformance suite on every transport."""

from __future__ import annotations

import pytest

from kvferry.transport.base import Transport
from kvferry.transport.registry import create_transport
from tests.contract.transport_contract import TransportContract
from tests.support.memory_transport import MemoryHub, MemoryTransport
from tests.support.transports import available_transports

needs_nixl = pytest.mark.skipif("nixl" not in available_transports(), reason="NIXL is missing")


class TestMemory(TransportContract):
    @pytest.fixture(autouse=True)
    def hub(self) -> MemoryHub:
        self._hub = MemoryHub()
        return self._hub

    def make_transport(self) -> Transport:
        return MemoryTransport(self._hub)


class TestShm(TransportContract):
    def make_transport(self) -> Transport:
        return create_transport("shm")


@needs_nixl
class TestNixl(TransportContract):
    def make_transport(self) -> Transport:
        return create_transport("nixl")


@needs_nixl
class TestNixlOverTcp(TransportContract):
    def make_transport(self) -> Transport:
        return create_transport("nixl", ucx_tls="tcp")
