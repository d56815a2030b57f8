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


def test_a_page_with_another_nonce_is_refused() -> None:
    page = FarewellPage()
    forged = msgspec.structs.replace(page.reference, nonce=bytes(16))
    with pytest.raises(RemoteProtocolError):
        PeerWatch(this_process(), this_process()).map_farewell(forged)
    page.say_done()


def test_without_a_page_only_a_message_or_death_is_proof() -> None:
    page = FarewellPage()
    reference = page.reference
    page.say_done()
    watch = PeerWatch(this_process(), this_process())
    with pytest.raises(PeerUnreachableError):
        watch.map_farewell(reference)
    watch.try_map_farewell(reference)
    assert not watch.cannot_write_directly()
    watch.note_done()
    assert watch.cannot_write_directly()
