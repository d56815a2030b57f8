from __future__ import annotations

from kvferry.engine.live_request import LiveRequest
from kvferry.engine.request import EngineRequest
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.params import KvTransferParams, Role

ROOT = chain_root(b"live")


def make_live(
    num_prompt: int, role: Role | None = None, request: EngineRequest | None = None
) -> LiveRequest:
    transfer = None if role is None else KvTransferParams(transfer_id=TransferId("t"), role=role)
    prompt = tuple(range(num_prompt))
    return LiveRequest(
        request=request
        or EngineRequest(request_id=RequestId("r"), prompt_token_ids=prompt, transfer=transfer),
        on_output=lambda output: None,
        arrival=1,
        arrived_s=3.0,
        seed=0,
        root=ROOT,
        stop_token_ids=frozenset(),
        max_total_tokens=100,
    )


def test_hashes_grow_with_the_answer() -> None:
    live = make_live(10)
    assert live.hashes_of(2, 4) == block_hashes(ROOT, range(10), 4)
    live.token_ids += [90, 91]
    assert live.hashes_of(3, 4) == block_hashes(ROOT, [*range(10), 90, 91], 4)
    assert live.hashes_of(1, 4) == block_hashes(ROOT, range(4), 4)


def test_only_prompt_tokens_count_as_computed_prompt() -> None:
    live = make_live(10)
    live.note_computed(8)
    live.token_ids.append(5)
    live.note_computed(3)
    live.token_ids.append(5)
    live.note_computed(1)
    assert (live.num_computed, live.report.num_computed_prompt_tokens) == (12, 10)
    assert (live.num_missing, live.num_output_tokens) == (0, 2)
    assert live.last_report().num_computed_prompt_tokens == 10
    assert live.last_report().arrived_s == 3.0


def test_roles() -> None:
    live = make_live(3, Role.PREFILL)
    assert live.transfer_as(Role.PREFILL) is live.request.transfer
    assert live.transfer_as(Role.DECODE) is None
    assert make_live(3).transfer_as(Role.PREFILL) is None
