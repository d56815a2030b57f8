from __future__ import annotations

from typing import Any

import pytest

from kvferry.engine.request import EngineLimits, EngineRequest, SamplingParams, check_request
from kvferry.errors import RequestError
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.params import KvTransferParams, Role

LIMITS = EngineLimits(vocabulary_size=100, max_model_len=64, num_blocks=3, block_size_tokens=16)


def check(
    num_prompt: int,
    *,
    transfer: KvTransferParams | None = None,
    **sampling: Any,  # noqa: ANN401 - SamplingParams'
) -> int:
    request = EngineRequest(
        request_id=RequestId("r"),
        prompt_token_ids=(5,) * num_prompt,
        sampling=SamplingParams(**sampling),
        transfer=transfer,
    )
    return check_request(request, LIMITS)


def test_the_reach_of_a_request() -> None:
    assert check(10, max_tokens=5) == 15
    assert check(10) == 49, "the pool's 48 tokens of KV, and a last token that needs none"
    assert check(48, max_tokens=1) == 49
    role = KvTransferParams(transfer_id=TransferId("t"), role=Role.PREFILL)
    assert check(48, transfer=role, max_tokens=16) == 49


def test_a_prompt_beyond_the_context_names_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"64 tokens.*prompt has 64 tokens") as caught:
        check(64)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.status == 400
    with pytest.raises(RequestError, match=r"64 tokens.*60.*max_tokens is 5") as caught:
        check(60, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"


def test_what_never_fits_the_pool_names_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"needs 4 KV blocks.*has 3"):
        check(49)
    with pytest.raises(RequestError, match=r"needs 4 KV blocks.*has 3"):
        check(40, max_tokens=10)
    role = KvTransferParams(transfer_id=TransferId("t"), role=Role.PREFILL)
    with pytest.raises(RequestError, match=r"needs 4 KV blocks.*has 3"):
        check(49, transfer=role)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
    ],
)
def test_a_wrong_parameter_is_named(name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(RequestError, match=name) as caught:
        check(3, transfer=None, **{name: value})
    assert caught.value.param == name


def test_wrong_tokens() -> None:
    with pytest.raises(RequestError, match="empty"):
        check(0)
    with pytest.raises(RequestError, match="min_tokens"):
        check(3, min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="stop token id 100"):
        check(3, stop_token_ids=(100,))
    for token_id in (-1, 100):
        request = EngineRequest(request_id=RequestId("r"), prompt_token_ids=(1, token_id))
        with pytest.raises(RequestError, match="outside of 0 to 99"):
            check_request(request, LIMITS)
