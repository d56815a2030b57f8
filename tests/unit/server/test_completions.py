import asyncio
from typing import Any

import pytest

from kvferry.engine.request import EngineRequest, FinishReason, TokenOutput
from kvferry.errors import RequestError
from tests.unit.server.fakes import EOS, ScriptedEngine, outputs_of, says, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def test_a_completion_has_vllms_shape() -> None:
    async with serve(ScriptedEngine(says("ok", FinishReason.STOP))) as served:
        status, body = await served.post(COMPLETIONS, {"prompt": "abc", "model": "alias"})
    assert status == 200
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "created": 1_900_000_000,
        "model": "alias",
        "choices": [
            {
                "index": 0,
                "text": "ok",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "total_tokens": 6,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_a_chat_goes_through_the_template() -> None:
    async with serve(ScriptedEngine(says("hello"))) as served:
        status, body = await served.post(CHAT, {"messages": USER, "max_completion_tokens": 5})
        request = served.engine.requests[0]
    assert status == 200
    assert bytes(request.prompt_token_ids) == b"[user]hi[assistant]"
    assert request.sampling.max_tokens == 5
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello", "tool_calls": []}
    assert choice["finish_reason"] == "length"


async def test_text_parts_of_a_message_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    async with serve(ScriptedEngine(says("x"))) as served:
        await served.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
        prompt = served.engine.requests[0].prompt_token_ids
        status, body = await served.post(CHAT, {"messages": [{"role": "user", "content": image}]})
    assert bytes(prompt) == b"[user]a\nb[assistant]"
    assert status == 400
    assert body["error"]["param"] == "messages[0].content[0]"


async def test_parameters_reach_the_engine() -> None:
    fields: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "logprobs": 2,
    }
    async with serve(ScriptedEngine(says("x"))) as served:
        await served.post(COMPLETIONS, {"prompt": [1, 2], "cache_salt": "s", **fields})
        await served.post(COMPLETIONS, {"prompt": "x", "top_k": -1, "temperature": None})
        first, second = served.engine.requests
    assert first.prompt_token_ids == (1, 2)
    assert first.cache_salt == "s"
    for name, value in fields.items():
        expected = (5,) if name == "stop_token_ids" else value
        assert getattr(first.sampling, name) == expected, name
    assert second.sampling.top_k == 0
    assert second.sampling.temperature == 1.0
    assert second.sampling.max_tokens == 16
    assert second.sampling.seed is None


async def test_n_choices_have_seeds_of_their_own() -> None:
    async with serve(ScriptedEngine(says("hey"))) as served:
        status, body = await served.post(
            COMPLETIONS, {"prompt": "abc", "n": 3, "seed": 10, "kv_report": True}
        )
        seeds = [request.sampling.seed for request in served.engine.requests]
        names = {request.request_id for request in served.engine.requests}
    assert status == 200
    assert seeds == [10, 11, 12]
    assert len(names) == 3
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]] == ["hey"] * 3
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 9
    assert [report["num_prompt_tokens"] for report in body["kv_report"]] == [3, 3, 3]


async def test_several_prompts_are_answered_in_order() -> None:
    engine = ScriptedEngine(lambda r: outputs_of(r, r.prompt_token_ids, FinishReason.LENGTH))
    async with serve(engine) as served:
        _, texts = await served.post(COMPLETIONS, {"prompt": ["ab", "cd"], "n": 2})
        _, ids = await served.post(COMPLETIONS, {"prompt": [[97], [98, 99]]})
    assert [choice["text"] for choice in texts["choices"]] == ["ab", "ab", "cd", "cd"]
    assert texts["usage"]["prompt_tokens"] == 4
    assert [choice["text"] for choice in ids["choices"]] == ["a", "bc"]


async def test_token_ids_are_returned_where_asked_for() -> None:
    async with serve(ScriptedEngine(says("ok"))) as served:
        ask = {"prompt": "abc", "return_token_ids": True}
        _, body = await served.post(COMPLETIONS, ask)
        _, chat = await served.post(CHAT, {"messages": USER, "return_token_ids": True})
    assert body["choices"][0]["token_ids"] == list(b"ok")
    assert body["choices"][0]["prompt_token_ids"] == list(b"abc")
    assert chat["choices"][0]["token_ids"] == list(b"ok")
    assert chat["prompt_token_ids"] == list(b"[user]hi[assistant]")


async def test_logprobs_of_completions() -> None:
    async with serve(ScriptedEngine(says("ok"))) as served:
        _, body = await served.post(COMPLETIONS, {"prompt": "abc", "logprobs": 2})
        _, alone = await served.post(COMPLETIONS, {"prompt": "abc", "logprobs": 0})
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["o", "k"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"o": -0.5, "z": -1.5}, {"k": -0.5, "z": -1.5}],
        "text_offset": [0, 1],
    }
    assert alone["choices"][0]["logprobs"]["top_logprobs"] == [{"o": -0.5}, {"k": -0.5}]


async def test_logprobs_of_chats() -> None:
    async with serve(ScriptedEngine(says("é"))) as served:
        ask = {"messages": USER, "logprobs": True, "top_logprobs": 1}
        _, body = await served.post(CHAT, ask)
        sampling = served.engine.requests[0].sampling
    assert sampling.logprobs == 1
    first, _ = body["choices"][0]["logprobs"]["content"]
    assert first["logprob"] == -0.5
    assert first["token"] == "\ufffd"
    assert first["bytes"] == list("\ufffd".encode())
    assert len(first["top_logprobs"]) == 1


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("lo w", "hel", "lo w"), (["x", "wor"], "hello ", "wor"), (["zz"], "hello world", None)],
)
async def test_stop_strings_span_tokens(
    stop: str | list[str], text: str, reason: str | None
) -> None:
    async with serve(ScriptedEngine(says("hello world"))) as served:
        _, body = await served.post(COMPLETIONS, {"prompt": "abc", "stop": stop})
        aborted = served.engine.aborted
    choice = body["choices"][0]
    assert choice["text"] == text
    assert choice["stop_reason"] == reason
    assert choice["finish_reason"] == ("stop" if reason else "length")
    assert len(aborted) == (1 if reason else 0)


async def test_a_stop_token_is_named_and_not_shown() -> None:
    def script(request: EngineRequest) -> list[TokenOutput]:
        return outputs_of(request, list(b"ab!"), FinishReason.STOP)

    async with serve(ScriptedEngine(script)) as served:
        ask = {"prompt": "abc", "stop_token_ids": [ord("!")], "return_token_ids": True}
        _, body = await served.post(COMPLETIONS, ask)
        _, shown = await served.post(COMPLETIONS, ask | {"include_stop_str_in_output": True})
    choice = body["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", ord("!"))
    assert choice["token_ids"] == list(b"ab!")
    assert shown["choices"][0]["text"] == "ab!"


async def test_special_tokens_are_shown_where_asked_for() -> None:
    engine = ScriptedEngine(lambda r: outputs_of(r, [97, EOS, 98], FinishReason.LENGTH))
    async with serve(engine) as served:
        _, hidden = await served.post(COMPLETIONS, {"prompt": "x"})
        _, shown = await served.post(COMPLETIONS, {"prompt": "x", "skip_special_tokens": False})
    assert hidden["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<eos>b"


async def test_the_report_comes_with_a_stop_string_too() -> None:
    async with serve(ScriptedEngine(None)) as served:
        ask = {"prompt": "abc", "stop": "b", "kv_report": True}
        answer = asyncio.create_task(served.post(COMPLETIONS, ask))
        request = await served.engine.wait_requests()
        served.engine.emit(request, "ab")
        _, body = await answer
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["stop_reason"] == "b"
    assert body["kv_report"]["num_prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": "a"}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"temperature": -0.1}, "temperature"),
        (COMPLETIONS, {"top_p": 0}, "top_p"),
        (COMPLETIONS, {"top_p": 1.1}, "top_p"),
        (COMPLETIONS, {"top_k": -2}, "top_k"),
        (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty"),
        (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": 1000}, "n"),
        (COMPLETIONS, {"n": 100, "prompt": ["a", "b"]}, "n"),
        (COMPLETIONS, {"seed": 2**70}, "seed"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        (COMPLETIONS, {"stop": ""}, "stop"),
        (COMPLETIONS, {"stop": ["a"] * 65}, "stop"),
        (COMPLETIONS, {"stop": [5]}, "stop[0]"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [257]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"logit_bias": {"1": 2}}, "logit_bias"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
    ],
)  # fmt: skip
async def test_a_bad_field_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    base: dict[str, Any] = {"prompt": "abc"} if path == COMPLETIONS else {"messages": USER}
    async with serve(ScriptedEngine(says("x"))) as served:
        status, body = await served.post(path, base | fields)
        submitted = served.engine.requests
    assert status == 400
    assert body["error"]["param"] == param
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
    assert submitted == []


async def test_neutral_values_of_unsupported_fields_and_unknown_fields_are_fine() -> None:
    fields = {
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "best_of": 1,
        "user": "me",
        "never_heard_of": {"a": [1]},
    }
    async with serve(ScriptedEngine(says("x"))) as served:
        status, _ = await served.post(CHAT, {"messages": USER} | fields)
    assert status == 200


async def test_an_unknown_model_is_not_found() -> None:
    async with serve(ScriptedEngine(says("x"))) as served:
        status, body = await served.post(COMPLETIONS, {"prompt": "abc", "model": "gpt-9"})
    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert "gpt-9" in body["error"]["message"]


@pytest.mark.parametrize("data", [b"{", b"\xff", b"", b"[1]", b'"x"', b'{"prompt": "\xff"}'])
async def test_malformed_json_is_refused(data: bytes) -> None:
    async with (
        serve(ScriptedEngine(says("x"))) as served,
        served.client.post(COMPLETIONS, data=data) as response,
    ):
        assert response.status == 400
        body = await response.json()
    assert body["error"]["type"] == "invalid_request_error"


async def test_deep_nesting_is_refused() -> None:
    data = b'{"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    async with (
        serve(ScriptedEngine(says("x"))) as served,
        served.client.post(COMPLETIONS, data=data) as response,
    ):
        assert response.status == 400


async def test_the_engines_refusal_is_the_clients_answer() -> None:
    refusal = RequestError(
        "the prompt has 120 tokens, the model takes 100", param="prompt", code="too_long"
    )
    async with serve(ScriptedEngine(refusal=refusal)) as served:
        status, body = await served.post(COMPLETIONS, {"prompt": "a" * 120})
        stream = await served.post(COMPLETIONS, {"prompt": "a" * 120, "stream": True})
    assert status == 400
    assert body["error"] == {
        "message": "the prompt has 120 tokens, the model takes 100",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "too_long",
    }
    assert stream == (400, body)


async def test_models_are_listed() -> None:
    async with serve(ScriptedEngine()) as served, served.client.get("/v1/models") as response:
        body = await response.json()
    assert [entry["id"] for entry in body["data"]] == ["tiny", "alias"]
    assert body["data"][0]["max_model_len"] == 100
    assert body["object"] == "list"


async def test_long_texts_are_tokenised_off_the_loop() -> None:
    async with serve(ScriptedEngine(says("x"))) as served:
        await served.post(COMPLETIONS, {"prompt": "a" * 20})
        await served.post(COMPLETIONS, {"prompt": "a" * 9000})
        await served.post(CHAT, {"messages": [{"role": "user", "content": "a" * 9000}]})
        threads = served.tokenizer.encoding_threads
    assert threads[0] == "MainThread"
    assert all(name.startswith("tokenize") for name in threads[1:])
    assert len(threads) == 3
