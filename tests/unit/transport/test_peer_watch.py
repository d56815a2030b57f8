"""The word of a peer that it is done."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.errors import PeerUnreachableError, RemoteProtocolError
from kvferry.transport.host import this_process
from kvferry.transport.peer_watch import FarewellPage, PeerWatch


def test_a_live_peer_on_this_host_can_write_until_it_says_done() -> None:
    page = FarewellPage()
    watch = PeerWatch(this_process(), this_process())
    watch.map_farewell(page.reference)
    assert not watch.cannot_write_directly()
    page.say_done()
    page.say_done()
    assert watch.has_said_done()
    assert watch.cannot_write_directly()


def test_a_dead_peer_can_not_write() -> None:
    dead = msgspec.structs.replace(this_process(), start_ticks=1)
    watch = PeerWatch(this_process(), dead)
    assert watch.is_dead()
    assert watch.cannot_write_directly()


def test_a_peer_of_another_host_reaches_us_through_our_own_end_only() -> None:
    far = msgspec.structs.replace(this_process(), boot_id="other")
    watch = PeerWatch(this_process(), far)
    assert not watch.is_dead()
    assert watch.cannot_write_directly()


ELSEWHERE = msgspec.structs.replace(this_process(), pid_namespace=1, pid=1)
"""In another container on this host: the same boot id, and a pid that is another's here."""


def test_a_peer_in_another_pid_namespace_is_on_this_host() -> None:
    watch = PeerWatch(this_process(), ELSEWHERE)
    assert watch.is_on_host
    assert not watch.is_beside
    assert not watch.is_dead()
    assert not watch.cannot_write_directly(), "its pid tells nothing here"


def test_it_is_heard_by_its_lifeline() -> None:
    page = FarewellPage()
    watch = PeerWatch(this_process(), ELSEWHERE)
    watch.follow(page.reference)
    assert not watch.is_blind
    assert not watch.cannot_write_directly()
    page.say_done()
    assert watch.cannot_write_directly()


def test_without_a_lifeline_there_is_no_proof() -> None:
    page = FarewellPage()
    watch = PeerWatch(this_process(), ELSEWHERE)
    watch.follow(msgspec.structs.replace(page.reference, nonce=bytes(16)))
    assert watch.is_blind
    page.say_done()
    assert not watch.cannot_write_directly()


def test_a_page_that_may_not_be_opened_is_replaced_by_the_lifeline() -> None:
    page = FarewellPage()
    unmapped = msgspec.structs.replace(page.reference.page, inode=1)
    watch = PeerWatch(this_process(), this_process())
    watch.follow(msgspec.structs.replace(page.reference, page=unmapped))
    assert not watch.cannot_write_directly()
    page.say_done()
    assert watch.cannot_write_directly()


def test_nobody_beside_us_or_far_away_is_followed_blindly() -> None:
    page = FarewellPage()
    far = msgspec.structs.replace(this_process(), boot_id="other")
    for peer in (this_process(), far):
        watch = PeerWatch(this_process(), peer)
        watch.follow(msgspec.structs.replace(page.reference, nonce=bytes(16)))
        assert not watch.is_blind
    page.say_done()


def test_a_page_with_another_nonce_is_refused() -> None:
    page = FarewellPage()
    forged = msgspec.structs.replace(page.reference, nonce=bytes(16))
    with pytest.raises(RemoteProtocolError):
        PeerWatch(this_process(), this_process()).map_farewell(forged)
    page.say_done()


def test_without_a_page_only_death_is_proof() -> None:
    page = FarewellPage()
    reference = page.reference
    page.say_done()
    watch = PeerWatch(this_process(), this_process())
    with pytest.raises(PeerUnreachableError):
        watch.map_farewell(reference)
    watch.follow(reference)
    assert not watch.cannot_write_directly()
