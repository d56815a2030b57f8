"""Conversations over two engines in one process: prefill reads back what decode holds.

Whatever history comes back (forked, edited, shortened, another tenant's), tokens are a plain
engine's, and pools end whole.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from kvferry.connector.ports import ReceiveOutcome
from kvferry.engine.live_request import Chunk
from kvferry.engine.sampler import Scores
from kvferry.protocol.ids import Epoch, TransferId
from kvferry.protocol.params import KvTransferParams, Mode, PeerAddress, Role
from kvferry.protocol.prefill_result import PrefillReport
from kvferry.transport.base import Transfer
from tests.integration.push_rig import Side, random_prompt, report_of, sides, wait_whole
from tests.support.memory_transport import MemoryHub, MemoryLink, MemoryTransport
from tests.support.tiny_model import make_tiny_model
from tests.unit.engine.rig import Answer

BLOCK = 16
NUM_TOKENS = 21
FIRST = 150
_names = itertools.count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def all_sides(folder: Path) -> Iterator[list[Side]]:
    with sides(folder, {}, {}, {}) as made:
        yield made


@pytest.fixture
def trio(all_sides: list[Side]) -> Iterator[list[Side]]:
    """Prefill, decode and another decode, with empty caches; idle again in the end."""
    for side in all_sides:
        side.engine.reset_prefix_cache()
        side.memory[:] = 0
    yield all_sides
    wait_whole(*all_sides)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Side]:
    with sides(folder, {"prefix_caching": False}) as (side,):
        yield side


def expected(plain: Side, prompt: list[int]) -> list[int]:
    return plain.submit(prompt, max_tokens=NUM_TOKENS).wait().tokens


@dataclass
class Turn:
    """One turn under way: prefill's leg, then decode's."""

    prefill: Answer
    decode: Side
    prompt: list[int]
    transfer_id: TransferId
    mode: Mode
    sender: PeerAddress
    salt: str
    pushed: Answer | None = None

    def wait(self) -> Answer:
        self.prefill.wait()
        if self.pushed is not None:
            return self.pushed.wait()
        handoff = self.prefill.outputs[-1].handoff
        assert handoff is not None, self.prefill.outputs[-1]
        answer = self.decode.submit(self.prompt, handoff, salt=self.salt, max_tokens=NUM_TOKENS)
        return answer.wait()

    @property
    def report(self) -> PrefillReport:
        report = report_of(self.prefill).prefill
        assert report is not None
        return report


def begin(
    prefill: Side,
    decode: Side,
    prompt: list[int],
    *,
    holder: Side | None = None,
    mode: Mode = Mode.PULL,
    salt: str = "",
) -> Turn:
    transfer_id = TransferId(f"turn-{next(_names)}")
    transfer = KvTransferParams(
        transfer_id=transfer_id,
        role=Role.PREFILL,
        mode=mode,
        history=holder.exchange.address if holder is not None else None,
    )
    sender = prefill.exchange.address
    pushed = None
    if mode is Mode.PUSH:
        receiving = KvTransferParams(
            transfer_id=transfer_id, role=Role.DECODE, mode=mode, peer=sender
        )
        pushed = decode.submit(prompt, receiving, salt=salt, max_tokens=NUM_TOKENS)
    answer = prefill.submit(prompt, transfer, salt=salt)
    return Turn(answer, decode, prompt, transfer_id, mode, sender, salt, pushed)


def first_turn(prefill: Side, decode: Side, seed: int = 1, salt: str = "") -> list[int]:
    """Have a conversation begun, and prefill's cache lost; return prompt and answer."""
    prompt = random_prompt(FIRST, seed)
    answer = begin(prefill, decode, prompt, salt=salt).wait()
    prefill.engine.reset_prefix_cache()
    return [*prompt, *answer.tokens]


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("mode", list(Mode))
def test_six_turns_move_only_what_each_side_lacks(
    trio: list[Side], plain: Side, mode: Mode
) -> None:
    prefill, decode, _ = trio
    tokens = first_turn(prefill, decode)
    for number in range(5):
        held = len(tokens) - 1
        prompt = [*tokens, *random_prompt(67, 100 + number)]
        turn = begin(prefill, decode, prompt, holder=decode, mode=mode)
        answer = turn.wait()
        assert answer.tokens == expected(plain, prompt)
        report = turn.report
        assert (report.read_back_outcome, report.num_read_back_tokens) == ("received", held)
        assert report.num_read_back_bytes == -(-held // BLOCK) * decode.block_bytes
        assert report.num_computed_tokens == len(prompt) - held
        received = report_of(answer)
        assert received.prefill == report
        cached = full_blocks(held)
        assert received.num_cached_tokens == cached, "decode's own history is not moved"
        tokens = [*prompt, *answer.tokens]
        prefill.engine.reset_prefix_cache()


@pytest.mark.parametrize("mode", list(Mode))
def test_three_forks_at_once(trio: list[Side], plain: Side, mode: Mode) -> None:
    prefill, decode, _ = trio
    tokens = first_turn(prefill, decode)
    prompts = [[*tokens, *random_prompt(70, seed)] for seed in (7, 8, 9)]
    turns = [begin(prefill, decode, prompt, holder=decode, mode=mode) for prompt in prompts]
    for turn, prompt in zip(turns, prompts, strict=True):
        assert turn.wait().tokens == expected(plain, prompt)
    assert turns[0].report.read_back_outcome == "received"


def test_the_same_turn_twice_at_once_and_once_more(trio: list[Side], plain: Side) -> None:
    prefill, decode, other = trio
    prompt = [*first_turn(prefill, decode), *random_prompt(40, 7)]
    right = expected(plain, prompt)
    turns = [begin(prefill, decode, prompt, holder=decode) for _ in range(2)]
    turns.append(begin(other, decode, prompt, holder=decode, mode=Mode.PUSH))
    assert [turn.wait().tokens for turn in turns] == [right] * 3
    assert begin(prefill, decode, prompt, holder=decode).wait().tokens == right


def edited(tokens: list[int], *positions: int) -> list[int]:
    changed = list(tokens)
    for position in positions:
        changed[position] = 3 + (changed[position] - 2) % 200
    return changed


# What is left of the history for prefill to read, in tokens: blocks before the first edit.
@pytest.mark.parametrize(
    ("position", "num_read"), [(0, 0), (3, 0), (70, 64), (80, 80), (149, 144), (165, 160)]
)
def test_an_edited_history_is_read_up_to_the_edit(
    trio: list[Side], plain: Side, position: int, num_read: int
) -> None:
    prefill, decode, _ = trio
    tokens = edited(first_turn(prefill, decode), position)
    prompt = [*tokens, *random_prompt(40, 7)]
    turn = begin(prefill, decode, prompt, holder=decode)
    assert turn.wait().tokens == expected(plain, prompt)
    assert turn.report.num_read_back_tokens == num_read
    assert turn.report.read_back_outcome == ("received" if num_read else "gone")


@pytest.mark.parametrize("num_kept", [30, 64, 65, 100, FIRST, FIRST + 10])
def test_a_shortened_history(trio: list[Side], plain: Side, num_kept: int) -> None:
    prefill, decode, _ = trio
    prompt = [*first_turn(prefill, decode)[:num_kept], *random_prompt(70, 7)]
    turn = begin(prefill, decode, prompt, holder=decode, mode=Mode.PUSH)
    assert turn.wait().tokens == expected(plain, prompt)
    kept = full_blocks(num_kept)
    assert turn.report.num_read_back_tokens == (kept if kept >= 64 else 0)


def test_an_answer_stripped_of_half_its_tokens(trio: list[Side], plain: Side) -> None:
    prefill, decode, _ = trio
    tokens = first_turn(prefill, decode)
    prompt = [*tokens[:FIRST], *tokens[FIRST::2], *random_prompt(40, 7)]
    turn = begin(prefill, decode, prompt, holder=decode)
    assert turn.wait().tokens == expected(plain, prompt)
    assert turn.report.num_read_back_tokens == full_blocks(FIRST)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_text_under_another_salt_finds_nothing(
    trio: list[Side], plain: Side, mode: Mode
) -> None:
    prefill, decode, _ = trio
    prompt = [*first_turn(prefill, decode, salt="tenant-a"), *random_prompt(40, 7)]
    turn = begin(prefill, decode, prompt, holder=decode, mode=mode, salt="tenant-b")
    answer = turn.wait()
    assert answer.tokens == expected(plain, prompt)
    assert turn.report.read_back_outcome == "gone"
    assert turn.report.num_cached_tokens == report_of(answer).num_cached_tokens == 0


@pytest.mark.parametrize("mode", list(Mode))
def test_a_turn_goes_on_with_another_decode_instance(
    trio: list[Side], plain: Side, mode: Mode
) -> None:
    prefill, decode, other = trio
    prompt = [*first_turn(prefill, decode), *random_prompt(40, 7)]
    turn = begin(prefill, other, prompt, holder=decode, mode=mode)
    answer = turn.wait()
    assert answer.tokens == expected(plain, prompt)
    assert turn.report.read_back_outcome == "received"
    assert report_of(answer).num_received_tokens == len(prompt)


def test_a_holder_of_another_start_is_gone(trio: list[Side], plain: Side) -> None:
    prefill, decode, _ = trio
    prompt = [*first_turn(prefill, decode), *random_prompt(40, 7)]
    earlier = msgspec.structs.replace(decode.exchange.address, epoch=Epoch(999))
    transfer = KvTransferParams(
        transfer_id=TransferId(f"turn-{next(_names)}"), role=Role.PREFILL, history=earlier
    )
    answer = prefill.submit(prompt, transfer, max_tokens=1).wait()
    assert answer.tokens == expected(plain, prompt)[:1]
    report = report_of(answer).prefill
    assert report is not None
    assert report.read_back_outcome == ReceiveOutcome.GONE
    prefill.exchange.port.withdraw(transfer.transfer_id)


def test_a_hint_at_oneself_is_ignored(trio: list[Side], plain: Side) -> None:
    prefill, decode, _ = trio
    prompt = [*first_turn(prefill, decode), *random_prompt(40, 7)]
    turn = begin(prefill, decode, prompt, holder=prefill)
    assert turn.wait().tokens == expected(plain, prompt)
    assert turn.report.read_back_outcome == ""


def test_a_history_that_other_prompts_have_pushed_out(trio: list[Side], plain: Side) -> None:
    prefill, decode, _ = trio
    prompt = [*first_turn(prefill, decode), *random_prompt(40, 7)]
    for seed in range(20, 32):
        decode.submit(random_prompt(400, seed), max_tokens=NUM_TOKENS).wait()
    turn = begin(prefill, decode, prompt, holder=decode)
    assert turn.wait().tokens == expected(plain, prompt)
    assert turn.report.read_back_outcome == "gone"


def test_two_instances_read_each_others_history_with_full_pools(folder: Path, plain: Side) -> None:
    """Each has blocks for a turn and a bit; each prefills what the other holds."""
    with sides(folder, {"num_blocks": 30}, {"num_blocks": 30}) as (left, right):
        there = first_turn(left, right, seed=1)
        here = first_turn(right, left, seed=2)
        left.engine.reset_prefix_cache()
        right.engine.reset_prefix_cache()
        here = [*here, *left.submit(here, max_tokens=20).wait().tokens]
        there = [*there, *right.submit(there, max_tokens=20).wait().tokens]
        prompts = [[*there, *random_prompt(40, 7)], [*here, *random_prompt(40, 8)]]
        turns = [
            begin(left, right, prompts[0], holder=right, mode=Mode.PUSH),
            begin(right, left, prompts[1], holder=left, mode=Mode.PUSH),
        ]
        for turn, prompt in zip(turns, prompts, strict=True):
            assert turn.wait().tokens == expected(plain, prompt)


# -- the measured threshold -------------------------------------------------------------------

TOKEN_S = 0.0005
"""What computing a prompt's token costs, made long enough to tell from noise."""
MOVE_S = 0.2
"""What any move costs: 400 tokens' computation."""


class FarTransport(MemoryTransport):
    """What is read over it comes ``MOVE_S`` later."""

    def open_link(self, peer_name: str, *, peer_writes: bool = True) -> MemoryLink:
        link = super().open_link(peer_name, peer_writes=peer_writes)
        read = link.read

        def read_late(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
            self.hold()
            threading.Timer(MOVE_S, self.go_on).start()
            return read(local_blocks, remote_blocks)

        link.read = read_late  # type: ignore[method-assign]
        return link


def compute_slowly(side: Side) -> None:
    """Have each prompt token cost ``TOKEN_S``."""
    forward = side.gate.forward

    def slow(chunks: Sequence[Chunk], /) -> Iterable[Scores]:
        threading.Event().wait(TOKEN_S * sum(chunk.count for chunk in chunks if chunk.count > 1))
        return forward(chunks)

    side.gate.forward = slow


def test_over_a_far_link_much_is_moved_and_little_is_computed(folder: Path) -> None:
    hub = MemoryHub()
    far = {
        "transport": FarTransport(hub),
        "recompute_threshold_tokens": None,
        "prefill_chunk_tokens": 512,
        "num_blocks": 600,
    }
    near = {"transport": MemoryTransport(hub), "num_blocks": 600}
    with sides(folder, far, near) as (prefill, decode):
        compute_slowly(prefill)
        outcomes = []
        # The first two show what a move costs.
        for seed, num_history in enumerate([2000, 112, 112, 2000]):
            history = random_prompt(num_history, seed)
            answer = decode.submit(history, max_tokens=2).wait()
            prompt = [*history, *answer.tokens, *random_prompt(20, 50 + seed)]
            transfer = KvTransferParams(
                transfer_id=TransferId(f"turn-{next(_names)}"),
                role=Role.PREFILL,
                history=decode.exchange.address,
            )
            report = report_of(prefill.submit(prompt, transfer).wait()).prefill
            assert report is not None
            outcomes.append((report.num_read_back_tokens, report.read_back_outcome))
            prefill.exchange.port.withdraw(transfer.transfer_id)
    assert outcomes == [(2001, "received"), (113, "received"), (0, ""), (2001, "received")]
