"""What the tests ask real vLLM servers: two legs over HTTP, and the control port."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq

from kvferry.protocol.codec import decode, encode
from kvferry.protocol.messages import InstanceInfo, InstanceQuery
from kvferry.protocol.params import PeerAddress
from tests.own_key import prove_own_key

REQUEST_TIMEOUT_S = 240.0
_CONTROL_TIMEOUT_MS = 10_000
NEAR_TIE = 1e-3
"""Natural logarithms between two tokens that rounding may swap in float32."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt by its tokens; ``salt`` keeps it apart from the same one asked elsewhere."""

    tokens: tuple[int, ...]
    max_tokens: int = 16
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def body(self, **fields: object) -> Json:
        return {
            "model": "m",
            "prompt": list(self.tokens),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": self.salt,
            **fields,
        }

    def again(self) -> Question:
        """Return the same question under a fresh salt: nothing of it is cached anywhere."""
        return Question(self.tokens, self.max_tokens)

    def continued(self, answer: Sequence[int], num_tokens: int, seed: int) -> Question:
        """Return the conversation's next turn, under the same salt."""
        tokens = (*self.tokens, *answer, *random_tokens(num_tokens, seed))
        return Question(tokens, self.max_tokens, self.salt)


def random_tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Return a prompt of that length, the same for the same seed."""
    choose = random.Random(seed)
    return tuple(choose.randrange(1000, 40_000) for _ in range(num_tokens))


def new_transfer_id() -> str:
    return "test-" + secrets.token_hex(8)


def open_session() -> aiohttp.ClientSession:
    """A session with a connection of its own for each request.

    vLLM closes one that has been idle for 5 s, and a stopped server closes all when it goes on: a
    request sent into such a one fails without a fault of anybody.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        connector=aiohttp.TCPConnector(force_close=True),
    )


class Client:
    """Requests to servers, by their URLs."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def complete(self, url: str, question: Question, **fields: object) -> Json:
        """Return an unstreamed answer; it must be a good one."""
        async with self._session.post(
            f"{url}/v1/completions", json=question.body(**fields)
        ) as response:
            answer: Json = await response.json()
            assert response.status == 200, answer
            return answer

    async def tokens(self, url: str, question: Question, **fields: object) -> list[int]:
        """Return an answer's tokens."""
        answer = await self.complete(url, question, **fields)
        return list(answer["choices"][0]["token_ids"])

    async def clear_tokens(self, url: str, question: Question) -> list[int]:
        """Return an answer's tokens before the first one that rounding may swap with another."""
        answer = await self.complete(url, question, logprobs=2, return_tokens_as_token_ids=True)
        choice = answer["choices"][0]
        tokens: list[int] = []
        for token, found in zip(
            choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True
        ):
            best, second = sorted(found.values(), reverse=True)[:2]
            if best - second < NEAR_TIE:
                break
            tokens.append(token)
        return tokens

    async def streamed_tokens(self, url: str, question: Question, **fields: object) -> list[int]:
        """Return the tokens of a streamed answer."""
        tokens: list[int] = []
        async with self._session.post(
            f"{url}/v1/completions", json=question.body(stream=True, **fields)
        ) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data.startswith(b"{"):
                    for choice in msgspec.json.decode(data)["choices"]:
                        tokens += choice.get("token_ids") or []
        return tokens

    async def prefill(
        self, url: str, question: Question, transfer_id: str | None = None, **params: object
    ) -> Json | None:
        """Run a prefill leg; return what it offers."""
        fields = {"transfer_id": transfer_id or new_transfer_id(), "role": "prefill", **params}
        answer = await self.complete(url, question, kv_transfer_params=fields)
        assert len(answer["choices"][0]["token_ids"]) == 1
        offered: Json | None = answer["kv_transfer_params"]
        return offered

    async def post(self, url: str, path: str) -> Json:
        """Call one of the server's endpoints for developers; it must do so."""
        async with self._session.post(f"{url}{path}") as response:
            answer: Json = await response.json()
            assert response.status == 200, answer
            return answer

    async def load_adapter(self, url: str, name: str, path: Path, *, in_place: bool) -> None:
        """Have the server load an adapter, in the place of the one of that name where asked."""
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
        async with self._session.post(f"{url}/v1/load_lora_adapter", json=body) as response:
            assert response.status == 200, await response.text()

    async def reset(self, url: str, **options: str) -> bool:
        """Have the server forget its prefix cache; False: something is in use."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        success: bool = (await self.post(url, f"/reset_prefix_cache?{query}"))["success"]
        return success

    async def reset_at_last(self, url: str) -> None:
        """Have the server forget its prefix cache, once no peer reads any of it."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            while not await self.reset(url):
                await asyncio.sleep(0.1)


def decode_params(transfer_id: str, peer: PeerAddress, mode: str) -> Json:
    """Return a decode leg's parameters that no prefill leg has offered yet."""
    return {"transfer_id": transfer_id, "role": "decode", "mode": mode, "peer": hint(peer)}


def hint(peer: PeerAddress) -> Json:
    """Return a prefill leg's ``history``: who holds the conversation so far."""
    fields: Json = msgspec.to_builtins(peer)
    return fields


def num_read_back(offered: Json | None) -> int:
    """Return how many tokens a prefill leg has read back."""
    assert offered is not None
    tokens: int = offered["prefill_report"].get("num_read_back_tokens", 0)
    return tokens


def read_back_outcome(offered: Json | None) -> str:
    """Return how a prefill leg's read-back ended."""
    assert offered is not None
    outcome: str = offered["prefill_report"].get("read_back_outcome", "")
    return outcome


def ask_instance(control_port: int) -> InstanceInfo:
    """Return what the instance with that control port says of itself."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    prove_own_key(client)
    try:
        client.connect(f"tcp://127.0.0.1:{control_port}")
        client.send(encode(1, InstanceQuery()))
        assert client.poll(_CONTROL_TIMEOUT_MS), f"nobody answers on control port {control_port}"
        info = decode(client.recv()).message
        assert isinstance(info, InstanceInfo)
        return info
    finally:
        client.close(0)
        context.term()
