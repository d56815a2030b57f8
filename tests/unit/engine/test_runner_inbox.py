from __future__ import annotations

import threading

import pytest

from kvferry.engine.runner import Inbox
from kvferry.errors import EngineError, RequestError
from kvferry.protocol.ids import RequestId
from tests.unit.engine.test_live_request import make_live

ID = RequestId("r")


def test_an_early_abort_waits_for_its_request() -> None:
    inbox = Inbox()
    inbox.abort(ID)
    inbox.claim(ID)
    inbox.abort(ID)
    assert inbox.take() == ([], set())
    live = make_live(3)
    inbox.put(live)
    assert inbox.take() == ([live], {ID})
    assert inbox.take() == ([], set())


def test_an_abort_ends_with_its_request() -> None:
    inbox = Inbox()
    inbox.claim(ID)
    inbox.abort(ID)
    inbox.forget(ID)
    assert inbox.take() == ([], set())
    assert inbox.claim(ID) == 2
    inbox.put(make_live(3))
    assert inbox.take()[1] == set()


def test_an_id_is_claimed_once() -> None:
    inbox = Inbox()
    inbox.claim(ID)
    with pytest.raises(RequestError, match="in use"):
        inbox.claim(ID)


def test_nothing_is_accepted_after_a_failure_or_the_end() -> None:
    failed, closed = Inbox(), Inbox()
    failed.fail("it broke")
    closed.close()
    for inbox, why in ((failed, "it broke"), (closed, "shutting down")):
        with pytest.raises(EngineError, match=why):
            inbox.claim(ID)
        with pytest.raises(EngineError, match=why):
            inbox.put(make_live(3))
    assert failed.failure == "it broke"
    assert closed.failure is None
    assert not closed.wait(None)


def test_a_wake_is_not_lost_and_counts_once() -> None:
    inbox = Inbox()
    inbox.wake()
    assert inbox.wait(None)
    waited = threading.Event()

    def wait() -> None:
        inbox.wait(None)
        waited.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    inbox.claim(ID)
    assert not waited.is_set()
    inbox.put(make_live(3))
    assert waited.wait(10)
    thread.join(10)
