"""A socket that closes with its process proves its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvferry.transport.peer_watch import Lifeline, hold_lifeline

OWNER = """
import sys
from kvferry.transport.peer_watch import Lifeline
line = Lifeline(bytes.fromhex(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_it_is_cut_by_its_owner() -> None:
    nonce = os.urandom(16)
    ours = Lifeline(nonce)
    held = hold_lifeline(nonce)
    assert held is not None
    assert not held.is_cut()
    ours.cut()
    ours.cut()
    assert held.is_cut()
    assert held.is_cut(), "it stays so"
    assert hold_lifeline(nonce) is None


def test_nobody_answers_to_another_nonce() -> None:
    ours = Lifeline(os.urandom(16))
    assert hold_lifeline(os.urandom(16)) is None
    ours.cut()


def test_a_name_in_use_is_one_proof_less_and_no_error() -> None:
    nonce = os.urandom(16)
    first, second = Lifeline(nonce), Lifeline(nonce)
    held = hold_lifeline(nonce)
    second.cut()
    assert held is not None
    assert not held.is_cut()
    first.cut()
    assert held.is_cut()


def test_a_full_queue_gives_no_proof() -> None:
    nonce = os.urandom(16)
    ours = Lifeline(nonce)
    held = [hold_lifeline(nonce) for _ in range(8)]
    assert held[0] is not None
    assert held[-1] is None
    ours.cut()
    assert held[0].is_cut()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_cuts_it_by_its_end_and_not_by_standing_still(end: signal.Signals) -> None:
    nonce = os.urandom(16)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, nonce.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline()
        held = hold_lifeline(nonce)
        assert held is not None
        owner.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
        assert not held.is_cut()
        owner.send_signal(signal.SIGCONT)
        assert not held.is_cut()
        owner.send_signal(end)
        owner.wait()
        assert held.is_cut()
