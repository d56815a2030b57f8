"""An offer that nobody took is ended at every rank of its holder."""

from __future__ import annotations

import socket

from kvferry.doctor.offer_release import HeldOffer, release_offer
from kvferry.protocol.ids import TransferId
from kvferry.protocol.messages import Release, ReleaseOutcome
from kvferry.protocol.params import PeerAddress
from tests.unit.doctor.deployment_facts import info_of
from tests.unit.doctor.served_control_port import TIMEOUT_S, Serve, with_info

KEY = b"k" * 32
INFO = info_of("prefill")
TRANSFER_ID = TransferId("xfer-1")


def _offer_at(address: str, num_ranks: int = 1) -> HeldOffer:
    holder = PeerAddress(INFO.instance_id, INFO.epoch, address)
    return HeldOffer(holder, num_ranks, TRANSFER_ID)


def test_the_holder_is_told_with_its_epoch_and_the_cluster_key(serve: Serve) -> None:
    releases: list[Release] = []
    address = serve(KEY, with_info(INFO, releases))
    assert release_offer(_offer_at(address), KEY, TIMEOUT_S)
    (release,) = releases
    assert (release.transfer_id, release.holder_epoch) == (TRANSFER_ID, INFO.epoch)
    assert release.outcome is ReleaseOutcome.CANCELLED


def test_who_cannot_be_told_is_left_to_its_lease() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unheard.getsockname()[1]}"
        assert not release_offer(_offer_at(address), None, 0.2)
    assert not release_offer(_offer_at("nowhere"), None, 0.2)
