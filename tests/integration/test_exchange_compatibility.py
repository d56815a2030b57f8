"""What two exchanges tell each other beyond their layouts is compared at the handshake."""

from __future__ import annotations

import pytest

from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.ids import TransferId
from tests.integration.exchange_pair import make_side, wait_whole

TRANSFER = TransferId("transfer-1")


@pytest.mark.parametrize(
    ("ours", "theirs", "is_refused"),
    [
        (Compatibility(chat_template_digest="1"), Compatibility(chat_template_digest="2"), True),
        (Compatibility(chat_template_digest="1"), Compatibility(tokenizer_digest="2"), False),
        (Compatibility(chat_template_digest="1"), None, False),
        (None, Compatibility(chat_template_digest="2"), False),
    ],
)
def test_a_difference_is_refused_by_name_and_what_is_not_told_is_none(
    ours: Compatibility | None, theirs: Compatibility | None, is_refused: bool
) -> None:
    prefill = make_side("prefill", compatibility=ours)
    decode = make_side("decode", compatibility=theirs)
    try:
        prefill.offer(TRANSFER)
        blocks, result = decode.receive(TRANSFER, prefill)
        decode.pool.drop(blocks)
        if is_refused:
            assert result.outcome is ReceiveOutcome.INCOMPATIBLE
            for part in ("chat_template_digest", "'1…'", "'2…'", "--chat-template"):
                assert part in result.detail
        else:
            assert result.outcome is ReceiveOutcome.RECEIVED
        info = decode.exchange.info()
        assert (info.compatibility, info.receives) == (theirs, {result.outcome.value: 1})
        prefill.port.withdraw(TRANSFER)
        wait_whole(prefill, decode)
    finally:
        decode.close()
        prefill.close()
