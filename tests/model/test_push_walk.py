"""Random walks over one push receiver and one sender with lost, late and repeated messages.

Whatever happens: a block that a posted WRITE reads or may touch is never free, a receive that is
reported as received had every one of its positions written, a result is reported at most once, and
in the end both pools are whole.
"""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.blocks.pool import BlockPool
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import (
    DisconnectPeer,
    DisconnectReader,
    Effect,
    Notify,
    PostWrite,
    Send,
)
from kvferry.connector.events import (
    Noticed,
    PeerLost,
    PeerQuiet,
    RegisterAnswered,
    ReleaseAnswered,
    RenewAnswered,
    WriteEnded,
)
from kvferry.connector.ports import ConnectorSnapshot, PrefillEnd, PromptIdentity, ReceiveOutcome
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import Asked, Register, Release, Renew
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.protocol.prefill_result import FirstToken
from tests.integration.exchange_pair import LAYOUT
from tests.model.driven import Driven, driven
from tests.support.block_integrity import assert_whole
from tests.support.fake_clock import FakeClock

NUM_PROMPT_BLOCKS = 4
PROMPT = PromptIdentity(16 * NUM_PROMPT_BLOCKS - 3, b"p" * 32)
END = PrefillEnd(FirstToken(7, 1))
NUM_BLOCKS = 24
SENDER, RECEIVER = InstanceId("sender"), InstanceId("receiver")
PEER = PeerAddress(SENDER, Epoch(1), "tcp://127.0.0.1:1")


@dataclasses.dataclass
class Transfer:
    """What the walk knows of one request."""

    source: list[BlockNumber] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    is_sending: bool = False
    is_complete: bool = False
    targets: list[BlockNumber] = dataclasses.field(default_factory=list)
    is_receiving: bool = False
    first_block: int = 0


class PushWalk(RuleBasedStateMachine):
    """Two planners joined by a network that the walk controls."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(1000.0)
        self.pools = {name: BlockPool(NUM_BLOCKS) for name in (SENDER, RECEIVER)}
        self.planners = {
            name: driven(
                ExchangeConfig(
                    instance_id=name,
                    epoch=Epoch(1),
                    max_held_share=0.5,
                    max_registered_share=0.5,
                    max_quarantine_share=0.5,
                    max_inflight_bytes=2 * LAYOUT.block_bytes,
                ),
                LAYOUT,
                pool,
                self.clock,
            )
            for name, pool in self.pools.items()
        }
        self.transfers: dict[TransferId, Transfer] = {}
        self.requests: list[Asked] = []
        self.notices: list[Notify] = []
        self.writes: dict[int, PostWrite] = {}
        self.filled: dict[BlockNumber, tuple[TransferId, BlockNumber]] = {}
        """Target block → the transfer and source block that was last written into it."""
        self.reported: set[TransferId] = set()
        self.unlinked: set[TransferId] = set()

    @property
    def sender(self) -> Driven:
        return self.planners[SENDER]

    @property
    def receiver(self) -> Driven:
        return self.planners[RECEIVER]

    def run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.requests.append(effect.message)
                case Notify():
                    self.notices.append(effect)
                case PostWrite():
                    self.writes[effect.write_id] = effect
                    if effect.transfer_id in self.unlinked:
                        self.end_write(effect.write_id, False)
                case DisconnectReader():
                    self.break_link()
                case DisconnectPeer():
                    self.break_link()
                    for transfer_id in list(self.transfers):
                        lost = PeerLost(transfer_id, ReceiveOutcome.SLOW, "")
                        self.run(self.receiver.handle(lost))
                        self.run(self.receiver.handle(PeerQuiet(transfer_id, 2**62)))
                case _:
                    pass

    def break_link(self) -> None:
        """What runs ends in an error, and so does what is posted later for the same transfers."""
        self.unlinked |= set(self.transfers)
        while self.writes:
            self.end_write(next(iter(self.writes)), False)

    def end_write(self, write_id: int, is_done: bool) -> None:
        write = self.writes.pop(write_id, None)
        if write is None:
            return
        if is_done:
            for source, target in zip(write.local_blocks, write.remote_blocks, strict=True):
                self.filled[target] = (write.transfer_id, source)
        self.run(self.sender.handle(WriteEnded(write.transfer_id, write_id, is_done)))

    def deliver(self, message: Asked) -> None:
        reply, effects = self.sender.answer("receiver/1", message)
        self.run(effects)
        transfer_id = message.transfer_id
        match message:
            case Register():
                self.run(
                    self.receiver.handle(RegisterAnswered(transfer_id, reply, message.generation))
                )
            case Renew():
                self.run(self.receiver.handle(RenewAnswered(transfer_id, reply)))
            case Release():
                self.run(self.receiver.handle(ReleaseAnswered(transfer_id, reply.is_quiet)))
            case _:
                raise AssertionError(message)

    # -- the sender's engine --------------------------------------------------------------------
    @precondition(lambda self: self.pools[SENDER].num_free >= NUM_PROMPT_BLOCKS)
    @rule(data=st.data())
    def prefill_begins(self, data: st.DataObject) -> None:
        new = TransferId(f"xfer-{len(self.transfers)}")
        waiting = [t for t, x in self.transfers.items() if not x.is_sending and not x.source]
        transfer_id = data.draw(st.sampled_from([*waiting, new]))
        transfer = self.transfers.setdefault(transfer_id, Transfer())
        transfer.is_sending = True
        transfer.source = self.pools[SENDER].allocate(NUM_PROMPT_BLOCKS)
        self.run(self.sender.begin_send(transfer_id, PROMPT))

    def computing(self) -> list[TransferId]:
        return [t for t, x in self.transfers.items() if x.is_sending and not x.is_complete]

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def chunk_completes(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.computing()))
        transfer = self.transfers[transfer_id]
        transfer.num_computed += 1
        tokens = transfer.num_computed * 16
        if transfer.num_computed < NUM_PROMPT_BLOCKS:
            self.run(self.sender.advance_send(transfer_id, transfer.source, tokens))
            return
        self.run(self.sender.complete_send(transfer_id, transfer.source, END))
        transfer.is_complete = True
        self.pools[SENDER].drop(transfer.source)

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def prefill_aborts(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.computing()))
        self.run(self.sender.withdraw(transfer_id))
        self.transfers[transfer_id].is_complete = True
        self.pools[SENDER].drop(self.transfers[transfer_id].source)

    @rule()
    def stopped_prefills_end(self) -> None:
        for transfer_id in self.sender.take_stopped_sends():
            transfer = self.transfers[transfer_id]
            if not transfer.is_complete:
                self.run(self.sender.withdraw(transfer_id))
                transfer.is_complete = True
                self.pools[SENDER].drop(transfer.source)

    # -- the receiver's engine ------------------------------------------------------------------
    @rule(data=st.data())
    def request_arrives(self, data: st.DataObject) -> None:
        new = TransferId(f"xfer-{len(self.transfers)}")
        idle = [t for t, x in self.transfers.items() if not x.is_receiving]
        idle = [t for t in idle if t not in self.reported]
        transfer_id = data.draw(st.sampled_from([*idle, new]))
        transfer = self.transfers.setdefault(transfer_id, Transfer())
        transfer.is_receiving = True
        self.run(self.receiver.begin_receive(transfer_id, PEER, PROMPT, mode=Mode.PUSH))

    def wanting(self) -> list[TransferId]:
        return [t for t, x in self.transfers.items() if x.is_receiving and not x.targets]

    def filling(self) -> list[TransferId]:
        return [t for t, x in self.transfers.items() if x.is_receiving and x.targets]

    @precondition(lambda self: self.wanting() and self.pools[RECEIVER].num_free >= 4)
    @rule(data=st.data(), first_block=st.integers(0, NUM_PROMPT_BLOCKS - 1))
    def blocks_are_registered(self, data: st.DataObject, first_block: int) -> None:
        transfer_id = data.draw(st.sampled_from(self.wanting()))
        count = NUM_PROMPT_BLOCKS - first_block
        if not self.receiver.may_receive(transfer_id, count):
            return
        self.collect()
        transfer = self.transfers[transfer_id]
        if not transfer.is_receiving:
            return
        transfer.first_block = first_block
        transfer.targets = self.pools[RECEIVER].allocate(count)
        for block in transfer.targets:
            self.filled.pop(block, None)
        self.run(self.receiver.receive(transfer_id, transfer.targets, first_block))

    @precondition(lambda self: self.filling())
    @rule(data=st.data())
    def blocks_are_given_back(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.filling()))
        was_given_back, effects = self.receiver.give_back(transfer_id)
        self.run(effects)
        if was_given_back:
            transfer = self.transfers[transfer_id]
            self.pools[RECEIVER].drop(transfer.targets)
            transfer.targets = []

    @precondition(lambda self: self.wanting() or self.filling())
    @rule(data=st.data(), needed=st.booleans())
    def request_ends(self, data: st.DataObject, needed: bool) -> None:
        transfer_id = data.draw(st.sampled_from([*self.wanting(), *self.filling()]))
        self.run(self.receiver.end_receive(transfer_id, needed=needed))
        self.forget(transfer_id)

    @rule()
    def collect(self) -> None:
        for result in self.receiver.take_results():
            assert result.transfer_id not in self.reported
            transfer = self.transfers[result.transfer_id]
            if result.outcome is ReceiveOutcome.RECEIVED:
                wanted = transfer.source[transfer.first_block :]
                for source, target in zip(wanted, transfer.targets, strict=True):
                    assert self.filled.get(target) == (result.transfer_id, source)
            self.forget(result.transfer_id)

    def forget(self, transfer_id: TransferId) -> None:
        transfer = self.transfers[transfer_id]
        self.pools[RECEIVER].drop(transfer.targets)
        transfer.targets = []
        transfer.is_receiving = False
        self.reported.add(transfer_id)

    # -- what lies between ----------------------------------------------------------------------
    @precondition(lambda self: self.requests)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "repeat", "lose"]))
    def request_travels(self, data: st.DataObject, fate: str) -> None:
        # One socket keeps order; a repeat or a loss may happen to any.
        index = 0 if fate == "deliver" else data.draw(st.integers(0, len(self.requests) - 1))
        effect = self.requests[index] if fate == "repeat" else self.requests.pop(index)
        if fate != "lose":
            self.deliver(effect)

    @precondition(lambda self: self.notices)
    @rule(fate=st.sampled_from(["deliver", "deliver", "repeat", "lose"]))
    def notice_travels(self, fate: str) -> None:
        notify = self.notices[0] if fate == "repeat" else self.notices.pop(0)
        if fate != "lose":
            event = Noticed(notify.transfer_id, PEER, notify.notice)
            self.run(self.receiver.handle(event))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), is_done=st.sampled_from([True, True, True, False]))
    def write_ends(self, data: st.DataObject, is_done: bool) -> None:
        self.end_write(data.draw(st.sampled_from(list(self.writes))), is_done)

    @rule()
    def all_goes_well_for_a_while(self) -> None:
        """Walks that never get to the end of a push teach little."""
        for _ in range(40):
            if self.requests:
                self.deliver(self.requests.pop(0))
            elif self.notices:
                self.notice_travels("deliver")
            elif self.writes:
                self.end_write(next(iter(self.writes)), True)

    @precondition(lambda self: all(pool.num_free >= 8 for pool in self.pools.values()))
    @rule(num_chunks=st.integers(1, NUM_PROMPT_BLOCKS))
    def a_push_gets_under_way(self, num_chunks: int) -> None:
        """Straight to posted WRITEs."""
        transfer_id = TransferId(f"xfer-{len(self.transfers)}")
        transfer = Transfer(is_sending=True, is_receiving=True)
        self.transfers[transfer_id] = transfer
        transfer.source = self.pools[SENDER].allocate(NUM_PROMPT_BLOCKS)
        transfer.targets = self.pools[RECEIVER].allocate(NUM_PROMPT_BLOCKS)
        for block in transfer.targets:
            self.filled.pop(block, None)
        self.run(self.sender.begin_send(transfer_id, PROMPT))
        self.run(self.receiver.begin_receive(transfer_id, PEER, PROMPT, mode=Mode.PUSH))
        self.run(self.receiver.receive(transfer_id, transfer.targets, 0))
        while self.requests:
            self.deliver(self.requests.pop(0))
        transfer.num_computed = num_chunks
        if num_chunks < NUM_PROMPT_BLOCKS:
            self.run(self.sender.advance_send(transfer_id, transfer.source, num_chunks * 16))
            return
        self.run(self.sender.complete_send(transfer_id, transfer.source, END))
        transfer.is_complete = True
        self.pools[SENDER].drop(transfer.source)

    @precondition(lambda self: self.filling())
    @rule(data=st.data())
    def peer_is_lost(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.filling()))
        self.run(self.receiver.handle(PeerLost(transfer_id, ReceiveOutcome.UNREACHABLE, "")))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 31.0]), noticed=st.booleans())
    def time_passes(self, seconds: float, noticed: bool) -> None:
        self.clock.advance(seconds)
        for planner in self.planners.values() if noticed else []:
            self.run(planner.tick())

    @rule()
    def pressure(self) -> None:
        self.run(self.sender.give_up_oldest(1)[1])

    @invariant()
    def blocks_of_running_writes_are_never_free(self) -> None:
        for write in self.writes.values():
            assert all(self.pools[SENDER].num_references(b) > 0 for b in write.local_blocks)
            assert all(self.pools[RECEIVER].num_references(b) > 0 for b in write.remote_blocks)

    def teardown(self) -> None:
        self.collect()
        for transfer_id in [*self.wanting(), *self.filling()]:
            self.run(self.receiver.end_receive(transfer_id, needed=True))
            self.forget(transfer_id)
        for transfer_id in self.computing():
            self.run(self.sender.withdraw(transfer_id))
            self.pools[SENDER].drop(self.transfers[transfer_id].source)
        for write_id in list(self.writes):
            self.end_write(write_id, True)
        for _ in range(3):
            self.clock.advance(1000.0)
            for planner in self.planners.values():
                self.run(planner.tick())
        for name, pool in self.pools.items():
            assert_whole(pool)
            snapshot = self.planners[name].snapshot()
            assert dataclasses.replace(snapshot, outcomes={}) == ConnectorSnapshot()


PushWalk.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestPushWalk = PushWalk.TestCase
