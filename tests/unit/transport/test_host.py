"""Identity of processes, and proof of their death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec

from kvferry.transport.host import ProcessIdentity, is_proven_dead, this_process


def identity_of(pid: int) -> ProcessIdentity:
    with open(f"/proc/{pid}/stat") as stat:
        start = int(stat.read().rpartition(")")[2].split()[19])
    return msgspec.structs.replace(this_process(), pid=pid, start_ticks=start)


def wait_for_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == state:
                return
    raise AssertionError(f"process {pid} never got into state {state}")


def test_this_process_is_alive_and_beside_itself() -> None:
    ours = this_process()
    assert ours.pid == os.getpid()
    assert ours == this_process()
    assert ours.is_beside(this_process())
    assert not is_proven_dead(ours)


def test_another_host_or_namespace_is_not_beside() -> None:
    ours = this_process()
    assert not ours.is_beside(msgspec.structs.replace(ours, boot_id="other"))
    in_a_container = msgspec.structs.replace(ours, pid_namespace=1)
    assert not ours.is_beside(in_a_container)
    assert ours.is_on_host_of(in_a_container)
    assert not ours.is_on_host_of(msgspec.structs.replace(ours, boot_id="other"))


def test_a_reused_pid_is_another_process() -> None:
    ours = this_process()
    assert is_proven_dead(msgspec.structs.replace(ours, start_ticks=ours.start_ticks + 1))


def test_a_process_of_another_user_is_not_taken_for_dead() -> None:
    assert not is_proven_dead(identity_of(1))


def test_a_stopped_process_is_alive_a_zombie_and_a_gone_one_are_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = identity_of(process.pid)
        assert not is_proven_dead(identity)
        process.send_signal(signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        assert not is_proven_dead(identity)
        process.kill()
        wait_for_state(process.pid, "Z")
        assert is_proven_dead(identity)
    finally:
        process.kill()
        process.communicate()
    assert is_proven_dead(identity)


def test_a_zombie_leader_with_a_running_thread_is_alive() -> None:
    """The leader ends first; a thread of the same process may still be copying."""
    script = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        identity = identity_of(process.pid)
        wait_for_state(process.pid, "Z")
        assert not is_proven_dead(identity)
    finally:
        process.kill()
        process.communicate()
    assert is_proven_dead(identity)
