"""Who is recalled as a conversation's holder, and to whom a prefill instance is pointed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from multidict import CIMultiDict

from kvferry.client.nixl_history import LIFETIME_S, NixlHistory
from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import PeerAddress, Role
from kvferry.router.config import ConversationConfig, ReadBack
from kvferry.router.fleet.identity import InstanceIdentity
from kvferry.router.fleet.registry import Fleet, Health, InstanceView
from kvferry.router.history.keys import ConversationKeys, Recogniser
from kvferry.router.history.prefix import MAX_PIECES, PIECE_BYTES
from kvferry.router.history.recall import Conversation, LookupResult, Recall, Recollection
from kvferry.router.request.parsing import parse_body
from tests.support.fake_clock import FakeClock

_CHAT = "/v1/chat/completions"
_URLS = ("http://d0", "http://d1")
_ALL = ("pull", "push", "history")


def _identity(name: str, epoch: int = 1, can: Sequence[str] = _ALL) -> InstanceIdentity:
    return InstanceIdentity(
        instance_id=InstanceId(name),
        epoch=Epoch(epoch),
        control_address=f"tcp://{name}:1",
        capabilities=tuple(can),
    )


def _chat(*contents: str) -> tuple[object, ...]:
    return tuple({"role": "user", "content": content} for content in contents)


@dataclass
class _Desk:
    """Recall over two healthy decode instances and a prefill instance, ``d0`` being both."""

    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.fleet = Fleet(["http://p", "http://d0"], _URLS)
        for url in self.fleet.urls:
            self.fleet.set_health(url, Health.HEALTHY)
            self.fleet.set_identity(url, _identity(url.removeprefix("http://")))
        self.recall = Recall(self.clock, self.fleet, ConversationConfig())
        self.recogniser = Recogniser(b"s" * 32, ("X-Session-ID",))

    def view(self, url: str, role: Role = Role.DECODE) -> InstanceView:
        view = self.fleet.view(url, role)
        assert view is not None
        return view

    def keys(
        self, messages: Sequence[object] = (), *, named: str = "", tenant: bytes = b""
    ) -> ConversationKeys:
        body = parse_body(json.dumps({"messages": messages}).encode())
        headers = CIMultiDict({"X-Session-ID": named} if named else {})
        return self.recogniser.keys_of(tenant, _CHAT, headers, body)

    def prompt_keys(self, prompt: str, **fields: str) -> ConversationKeys:
        body = parse_body(json.dumps({"prompt": prompt, **fields}).encode())
        return self.recogniser.keys_of(b"", "/v1/completions", CIMultiDict(), body)

    def answer(
        self, keys: ConversationKeys, url: str, retention_s: float | None = None
    ) -> ConversationKeys:
        self.recall.note_answer(_conversation(keys, retention_s=retention_s), self.view(url))
        return keys

    def holder(self, keys: ConversationKeys) -> tuple[str | None, LookupResult]:
        recollection, result = self.recall.look_up(keys)
        return (recollection.holder.url if recollection else None), result


def _conversation(
    keys: ConversationKeys,
    recollection: Recollection | None = None,
    *,
    read_back: ReadBack = ReadBack.AUTO,
    retention_s: float | None = None,
) -> Conversation:
    return Conversation(
        keys=keys, read_back=read_back, retention_s=retention_s, recollection=recollection
    )


@pytest.fixture
def desk() -> _Desk:
    return _Desk()


_MISS = (None, LookupResult.MISS)
_STALE = (None, LookupResult.STALE)


def test_next_turn_is_recalled_by_id_and_by_prefix(desk: _Desk) -> None:
    assert desk.holder(desk.keys(_chat("a"), named="c")) == _MISS
    desk.answer(desk.keys(_chat("a"), named="c"), "http://d1")
    by_id = desk.keys(_chat("a", "b", "c"), named="c")
    assert desk.holder(by_id) == ("http://d1", LookupResult.ID)
    by_prefix = desk.keys(_chat("a", "b", "c"))
    assert desk.holder(by_prefix) == ("http://d1", LookupResult.PREFIX)


def test_unknown_id_falls_back_to_the_prefix(desk: _Desk) -> None:
    desk.answer(desk.keys(_chat("a")), "http://d1")
    keys = desk.keys(_chat("a", "b", "c"), named="new")
    assert desk.holder(keys) == ("http://d1", LookupResult.PREFIX)
    assert desk.holder(desk.keys(_chat("z"), named="new")) == _MISS


def test_id_is_recalled_whatever_became_of_the_prompt(desk: _Desk) -> None:
    desk.answer(desk.keys(_chat("a", "b"), named="c"), "http://d1")
    assert desk.holder(desk.keys(_chat("summary"), named="c")) == (
        "http://d1",
        LookupResult.ID,
    )
    assert desk.holder(desk.keys((), named="c")) == ("http://d1", LookupResult.ID)


def test_tenants_do_not_meet(desk: _Desk) -> None:
    desk.answer(desk.keys(_chat("a"), named="c", tenant=b"one"), "http://d1")
    assert desk.holder(desk.keys(_chat("a", "b"), named="c", tenant=b"two")) == _MISS
    assert desk.holder(desk.keys(_chat("a", "b"), named="c")) == _MISS


def test_branches_that_share_an_id_are_told_apart_by_their_prefix(desk: _Desk) -> None:
    trunk = _chat("a", "b")
    desk.answer(desk.keys(_chat("a"), named="c"), "http://d0")
    desk.answer(desk.keys((*trunk, *_chat("left")), named="c"), "http://d0")
    desk.answer(desk.keys((*trunk, *_chat("right")), named="c"), "http://d1")
    left = desk.keys((*trunk, *_chat("left", "x", "y")), named="c")
    assert desk.holder(left) == ("http://d0", LookupResult.PREFIX)
    right = desk.keys((*trunk, *_chat("right", "x", "y")), named="c")
    assert desk.holder(right) == ("http://d1", LookupResult.ID)


def test_same_first_prompt_of_two_conversations_is_told_apart_by_id(desk: _Desk) -> None:
    desk.answer(desk.keys(_chat("same"), named="one"), "http://d0")
    desk.answer(desk.keys(_chat("same"), named="two"), "http://d1")
    for name, url in (("one", "http://d0"), ("two", "http://d1")):
        keys = desk.keys(_chat("same", "answer", "more"), named=name)
        assert desk.holder(keys) == (url, LookupResult.ID)


def test_edited_history_is_recalled_from_the_turn_before_the_edit(desk: _Desk) -> None:
    desk.answer(desk.keys(_chat("a")), "http://d0")
    desk.answer(desk.keys(_chat("a", "b", "c")), "http://d1")
    assert desk.holder(desk.keys(_chat("a", "b", "c", "d"))) == (
        "http://d1",
        LookupResult.PREFIX,
    )
    assert desk.holder(desk.keys(_chat("a", "B", "c", "d"))) == (
        "http://d0",
        LookupResult.PREFIX,
    )
    assert desk.holder(desk.keys(_chat("A", "b", "c", "d"))) == _MISS


@pytest.mark.parametrize("named", ["", "c"])
def test_restarted_or_lost_holder_is_stale(desk: _Desk, named: str) -> None:
    keys = desk.answer(desk.keys(_chat("a"), named=named), "http://d1")
    desk.fleet.set_identity("http://d1", _identity("d1", epoch=2))
    assert desk.holder(keys) == _STALE
    desk.fleet.set_identity("http://d1", _identity("d1"))
    assert (desk.holder(keys))[0] == "http://d1"
    desk.fleet.report_connection_failure("http://d1", "reset")
    assert desk.holder(keys) == _STALE
    desk.fleet.set_health("http://d1", Health.DOWN)
    assert desk.holder(keys) == _STALE


def test_with_the_last_holder_lost_the_one_before_is_recalled(desk: _Desk) -> None:
    desk.answer(desk.keys(_chat("a"), named="c"), "http://d0")
    desk.answer(desk.keys(_chat("a", "b", "c"), named="c"), "http://d1")
    desk.fleet.set_health("http://d1", Health.DOWN)
    keys = desk.keys(_chat("a", "b", "c", "d", "e"), named="c")
    assert desk.holder(keys) == ("http://d0", LookupResult.PREFIX)


def test_holder_that_does_not_say_who_it_is_is_known_by_its_url(desk: _Desk) -> None:
    desk.fleet.set_identity("http://d1", None)
    keys = desk.answer(desk.keys(_chat("a")), "http://d1")
    assert desk.holder(keys) == ("http://d1", LookupResult.PREFIX)
    desk.fleet.set_health("http://d1", Health.DOWN)
    assert desk.holder(keys) == _STALE


def test_nothing_is_read_back_between_instances_that_exchange_nothing(desk: _Desk) -> None:
    desk.answer(desk.keys(_chat("a")), "http://d1")
    keys = desk.keys(_chat("a", "b", "c"))
    recollection, _ = desk.recall.look_up(keys)
    conversation = _conversation(keys, recollection)
    prefill = desk.view("http://p", Role.PREFILL)
    assert desk.recall.history_for(conversation, prefill) == _identity("d1").peer
    for url, template in (("http://d1", "1"), ("http://p", "2")):
        identity = _identity(url.removeprefix("http://"))
        told = Compatibility(chat_template_digest=template)
        desk.fleet.set_identity(url, msgspec.structs.replace(identity, compatibility=told))
    assert desk.recall.history_for(conversation, desk.view("http://p", Role.PREFILL)) is None


def test_turns_expire_after_the_retention(desk: _Desk) -> None:
    keys = desk.answer(desk.keys(_chat("a"), named="c"), "http://d1")
    desk.clock.advance(479)
    assert (desk.holder(keys))[0] == "http://d1"
    desk.clock.advance(1)
    assert desk.holder(keys) == _MISS
    desk.answer(keys, "http://d1", retention_s=1000)
    desk.clock.advance(999)
    assert (desk.holder(keys))[0] == "http://d1"


def test_a_conversation_that_ends_is_forgotten_with_its_turns(desk: _Desk) -> None:
    turns = [_chat("a"), _chat("a", "b", "c"), _chat("a", "b", "c", "d", "e")]
    for messages in turns:
        desk.answer(desk.keys(messages, named="c"), "http://d1")
    other = desk.answer(desk.keys(_chat("z")), "http://d0")
    assert desk.recall.num_remembered() == 5
    desk.answer(desk.keys(turns[-1], named="c"), "http://d1", retention_s=0)
    for messages in turns:
        assert desk.holder(desk.keys((*messages, *_chat("x")), named="c")) == _MISS
    assert (desk.holder(other))[0] == "http://d0"
    assert desk.recall.num_remembered() == 1


def test_a_beginning_that_others_share_is_no_reason_to_prefer(desk: _Desk) -> None:
    few_shot = "example " * 100
    desk.answer(desk.prompt_keys(few_shot + "2+3"), "http://d1")
    shared, result = desk.recall.look_up(desk.prompt_keys(few_shot + "4+5"))
    assert result is LookupResult.PREFIX
    assert shared is not None
    assert (shared.holder.url, shared.is_same) == ("http://d1", False)
    same, _ = desk.recall.look_up(desk.prompt_keys(few_shot + "2+3=5, 1+1"))
    assert same is not None
    assert same.is_same


def test_a_shared_beginning_does_not_take_a_conversation_from_its_id(desk: _Desk) -> None:
    system = "be brief. " * 40
    desk.answer(desk.prompt_keys(system + "What is", session_id="c"), "http://d0")
    desk.answer(desk.prompt_keys(system + "Who is Charon and why is that so?"), "http://d1")
    edited = desk.prompt_keys(system + "Who is Charon now?", session_id="c")
    assert desk.holder(edited) == ("http://d0", LookupResult.ID)


def test_conversations_with_the_same_long_beginning_keep_their_holders(desk: _Desk) -> None:
    system = "be brief. " * 40
    prompts = {"http://d0": system + "What is a ferry?", "http://d1": system + "Who is Charon?"}
    for url, prompt in prompts.items():
        desk.answer(desk.prompt_keys(prompt), url)
    for url, prompt in prompts.items():
        keys = desk.prompt_keys(prompt + " Something else.")
        assert desk.holder(keys) == (url, LookupResult.PREFIX)


# -- whom prefill is pointed to ---------------------------------------------------------------
def _hint(
    desk: _Desk, prefill: str = "http://p", read_back: ReadBack = ReadBack.AUTO, holder: int = 1
) -> PeerAddress | NixlHistory | None:
    keys = desk.answer(desk.keys(_chat("a")), _URLS[holder])
    recollection, _ = desk.recall.look_up(keys)
    assert recollection is not None
    conversation = _conversation(keys, recollection, read_back=read_back)
    return desk.recall.history_for(conversation, desk.view(prefill, Role.PREFILL))


def test_prefill_is_pointed_to_the_holder(desk: _Desk) -> None:
    assert _hint(desk) == _identity("d1").peer
    assert _hint(desk, read_back=ReadBack.OFF) is None


def test_an_instance_is_not_pointed_to_itself(desk: _Desk) -> None:
    assert _hint(desk, prefill="http://d0", holder=0) is None
    assert _hint(desk, prefill="http://d0", holder=1) == _identity("d1").peer


@pytest.mark.parametrize("url", ["http://p", "http://d1"])
@pytest.mark.parametrize("can", [("pull", "push"), None])
def test_only_instances_that_can_read_back_are_told(
    desk: _Desk, url: str, can: tuple[str, ...] | None
) -> None:
    name = url.removeprefix("http://")
    desk.fleet.set_identity(url, None if can is None else _identity(name, can=can))
    assert _hint(desk) is None


def test_a_holder_that_restarts_while_the_request_waits_is_not_pointed_to(
    desk: _Desk,
) -> None:
    keys = desk.answer(desk.keys(_chat("a")), "http://d1")
    recollection, _ = desk.recall.look_up(keys)
    conversation = _conversation(keys, recollection)
    prefill = desk.view("http://p", Role.PREFILL)
    assert desk.recall.history_for(conversation, prefill) is not None
    desk.fleet.set_identity("http://d1", _identity("d1", epoch=2))
    assert desk.recall.history_for(conversation, prefill) is None


def test_a_draining_holder_can_still_be_read(desk: _Desk) -> None:
    desk.fleet.set_draining("http://d1", True)
    assert _hint(desk) == _identity("d1").peer


def test_nothing_recalled_is_no_hint(desk: _Desk) -> None:
    conversation = _conversation(desk.keys(_chat("a")))
    assert desk.recall.history_for(conversation, desk.view("http://p", Role.PREFILL)) is None


# -- blocks that a holder has named for one read ----------------------------------------------
_KEPT = NixlHistory(msgspec.Raw(b"{}"))
_TURN, _NEXT = _chat("a"), _chat("a", "b", "c")


def _kept_for(
    desk: _Desk, keys: ConversationKeys, prefill: str = "http://p"
) -> PeerAddress | NixlHistory | None:
    recollection, _ = desk.recall.look_up(keys)
    conversation = _conversation(keys, recollection)
    return desk.recall.history_for(conversation, desk.view(prefill, Role.PREFILL))


def _keep(desk: _Desk, keys: ConversationKeys) -> None:
    desk.fleet.set_identity("http://d1", _identity("d1", can=("pull",)))
    desk.recall.note_answer(_conversation(keys), desk.view("http://d1"), _KEPT)


@pytest.mark.parametrize("name", ["", "c"])
def test_named_blocks_are_for_the_next_turn_and_for_one_read(desk: _Desk, name: str) -> None:
    _keep(desk, desk.keys(_TURN, named=name))
    keys = desk.keys(_NEXT, named=name)
    assert [_kept_for(desk, keys), _kept_for(desk, keys)] == [_KEPT, None]


def test_named_blocks_are_not_for_a_prompt_that_goes_on_otherwise(desk: _Desk) -> None:
    _keep(desk, desk.keys(_TURN, named="c"))
    assert _kept_for(desk, desk.keys(_chat("edited", "b", "c"), named="c")) is None
    _keep(desk, desk.prompt_keys("example " * 100 + "2+3"))
    assert _kept_for(desk, desk.prompt_keys("example " * 100 + "4+5")) is None


def test_named_blocks_are_not_for_the_instance_that_holds_them(desk: _Desk) -> None:
    keys = desk.keys(_TURN)
    desk.recall.note_answer(_conversation(keys), desk.view("http://d0"), _KEPT)
    assert _kept_for(desk, desk.keys(_NEXT), prefill="http://d0") is None
    assert _kept_for(desk, desk.keys(_NEXT)) == _KEPT


def test_named_blocks_of_a_holder_that_was_started_anew_are_gone(desk: _Desk) -> None:
    _keep(desk, desk.keys(_TURN))
    desk.fleet.set_identity("http://d1", _identity("d1", epoch=2, can=("pull",)))
    assert _kept_for(desk, desk.keys(_NEXT)) is None


def test_named_blocks_are_forgotten_before_the_holder_gives_them_up(desk: _Desk) -> None:
    _keep(desk, desk.keys(_TURN))
    desk.clock.advance(LIFETIME_S)
    assert _kept_for(desk, desk.keys(_NEXT)) is None


def test_blocks_of_a_prompt_too_long_to_recognise_are_not_kept(desk: _Desk) -> None:
    prompt = "x" * (PIECE_BYTES * MAX_PIECES)
    _keep(desk, desk.prompt_keys(prompt))
    assert _kept_for(desk, desk.prompt_keys(prompt + "y")) is None
