from dataclasses import replace

import pytest

from kvferry.blocks.pool import PoolSnapshot
from kvferry.protocol.params import PrefillReport
from kvferry.server.config import HttpConfig
from tests.unit.server.fakes import IDLE, ScriptedEngine, says, serve


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with serve(ScriptedEngine()) as served:
        status, body = await served.post("/tokenize", {"prompt": "é!", "model": "tiny"})
        _, back = await served.post("/detokenize", {"tokens": body["tokens"]})
    assert status == 200
    assert body == {
        "count": 3,
        "max_model_len": 100,
        "tokens": list("é!".encode()),
        "token_strs": None,
    }
    assert back == {"prompt": "é!"}


async def test_tokenize_takes_messages_and_returns_strings() -> None:
    messages = [{"role": "user", "content": "a"}]
    async with serve(ScriptedEngine()) as served:
        _, body = await served.post("/tokenize", {"messages": messages, "return_token_strs": True})
        _, bare = await served.post(
            "/tokenize", {"messages": messages, "add_generation_prompt": False}
        )
    assert bytes(body["tokens"]) == b"[user]a[assistant]"
    assert body["token_strs"][0] == f"<{ord('[')}>"
    assert bytes(bare["tokens"]) == b"[user]a"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
async def test_wrong_bodies_are_refused(path: str, body: object, param: str) -> None:
    async with serve(ScriptedEngine()) as served:
        status, answer = await served.post(path, body)
    assert status == 400
    assert answer["error"]["param"] == param


async def test_health_follows_the_engine() -> None:
    async with serve(ScriptedEngine()) as served:
        async with served.client.get("/health") as response:
            assert response.status == 200
        served.engine.failure = "it broke"
        async with served.client.get("/health") as response:
            assert response.status == 503


async def test_a_server_about_to_end_refuses_and_is_unhealthy() -> None:
    async with serve(ScriptedEngine(says("x"))) as served:
        served.service.begin_shutdown()
        status, body = await served.post("/v1/completions", {"prompt": "a"})
        async with served.client.get("/health") as response:
            assert response.status == 503
        assert served.engine.requests == []
    assert status == 503
    assert body["error"]["code"] == "shutting_down"


async def test_metrics_count_requests_and_tokens() -> None:
    async with serve(ScriptedEngine(says("abc"))) as served:
        await served.post("/v1/completions", {"prompt": "ab"})
        served.engine.state = replace(
            IDLE, num_running=2, num_waiting=1, pool=replace(IDLE.pool, num_free=4)
        )
        async with served.client.get("/metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
    for line in (
        "kvferry_prompt_tokens_total 2.0",
        "kvferry_generation_tokens_total 3.0",
        'kvferry_request_success_total{finished_reason="length"} 1.0',
        "kvferry_time_to_first_token_seconds_count 1.0",
        "kvferry_inter_token_latency_seconds_count 2.0",
        "kvferry_num_requests_running 2.0",
        "kvferry_num_requests_waiting 1.0",
        "kvferry_kv_cache_usage_perc 0.6",
        "kvferry_handoffs_held 2.0",
    ):
        assert line in lines


async def test_a_preemption_is_counted_before_its_request_ends() -> None:
    async with serve(ScriptedEngine()) as served:
        for total in (2, 2, 5):
            served.engine.state = replace(IDLE, num_preemptions=total)
            async with served.client.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            assert f"kvferry_num_preemptions_total {total}.0" in lines


async def test_metrics_show_peers_whose_death_could_not_be_proven() -> None:
    async with serve(ScriptedEngine()) as served:
        served.transport.blind_links = 2
        async with served.client.get("/metrics") as response:
            assert "kvferry_blind_links 2.0" in (await response.text()).splitlines()


async def test_metrics_show_what_is_retained() -> None:
    async with serve(ScriptedEngine()) as served:
        for pool, ends in (
            (PoolSnapshot(10, 10, 8, 6, 3), {"expired": 4, "cap": 1}),
            (PoolSnapshot(10, 10, 8, 5, 5), {"expired": 6, "cap": 1}),
        ):
            served.engine.state = replace(IDLE, pool=pool, num_conversations=2, retention_ends=ends)
            async with served.client.get("/metrics") as response:
                lines = (await response.text()).splitlines()
    for line in (
        "kvferry_retained_blocks 5.0",
        "kvferry_retained_share 0.5",
        "kvferry_retained_evicted_total 5.0",
        'kvferry_retention_ends_total{reason="expired"} 6.0',
        'kvferry_retention_ends_total{reason="cap"} 1.0',
    ):
        assert line in lines


async def test_the_prefix_cache_is_reset_only_where_that_is_enabled() -> None:
    path = "/reset_prefix_cache"
    async with serve(ScriptedEngine(), http=HttpConfig(has_dev_endpoints=True)) as served:
        async with served.client.post(path) as response:
            assert response.status == 200
            assert await response.json() == {
                "num_cached_blocks": 5,
                "num_retained_blocks": 3,
                "num_conversations": 2,
                "num_blocks_in_use": 1,
            }
        assert served.engine.num_cache_resets == 1
    async with serve(ScriptedEngine()) as served:
        status, body = await served.post(path, None)
        assert served.engine.num_cache_resets == 0
    assert status == 403
    assert "--enable-dev-endpoints" in body["error"]["message"]


async def test_unknown_paths_and_methods_have_openai_errors() -> None:
    async with serve(ScriptedEngine()) as served:
        async with served.client.get("/v2") as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with served.client.get("/v1/completions") as response:
            assert response.status == 405
            assert "POST" in (await response.json())["error"]["message"]


async def test_a_body_over_the_limit_is_refused() -> None:
    async with serve(ScriptedEngine(says("x")), http=HttpConfig(max_body_bytes=1000)) as served:
        status, body = await served.post("/v1/completions", {"prompt": "a" * 2000})
        fine, _ = await served.post("/v1/completions", {"prompt": "a" * 500})
    assert status == 413
    assert body["error"]["code"] == "request_too_large"
    assert fine == 200


async def test_an_unexpected_error_is_not_shown_to_clients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(ScriptedEngine(says("x"))) as served:
        monkeypatch.setattr(served.tokenizer, "encode", None)
        status, body = await served.post("/v1/completions", {"prompt": "secret"})
    assert status == 500
    assert body["error"]["message"] == "internal error; see the server's log"
    assert any(record.exc_info for record in caplog.records)
    assert "secret" not in caplog.text


async def test_what_is_retained_and_read_back_is_told_as_json_and_as_metrics() -> None:
    engine = ScriptedEngine()
    engine.state = replace(
        IDLE,
        num_receiving=1,
        pool=replace(IDLE.pool, num_retained=5, num_retained_evicted=2),
        num_conversations=3,
        retention_ends={"expired": 4},
    )
    async with serve(engine) as served:
        totals = served.service.figures.read_backs
        for outcome, num_read in (("received", 70), ("gone", 0), ("gone", 0)):
            report = PrefillReport(
                num_read_back_tokens=num_read, num_computed_tokens=9, read_back_outcome=outcome
            )
            totals.add(report)
        async with served.client.get("/kvferry/instance") as response:
            shown = await response.json()
        for _ in range(2):
            async with served.client.get("/metrics") as response:
                lines = (await response.text()).splitlines()
    assert shown["num_requests_waiting"] == 1
    assert shown["retained"] == {
        "num_conversations": 3,
        "num_blocks": 5,
        "share": 0.5,
        "num_evicted": 2,
        "ends": {"expired": 4},
    }
    assert shown["read_back"] == {
        "num_tokens": 70,
        "num_bytes": 0,
        "outcomes": {"received": 1, "gone": 2},
        "recomputed_tokens": {"gone": 18},
    }
    assert "kvferry_read_back_tokens_total 70.0" in lines
    assert 'kvferry_recomputed_tokens_total{reason="gone"} 18.0' in lines
