"""``docs/protocol.md`` says what the code does: messages, fields, limits, test vectors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvferry.protocol import codec, ids, messages, params
from kvferry.protocol.compatibility import Compatibility, KVLayout
from kvferry.protocol.hashing import block_hashes, chain_root, prompt_digest
from kvferry.protocol.headers import RECEIVE_HEADER, stream_note
from kvferry.protocol.ids import PROTOCOL_VERSION, BlockHash, TransferId
from kvferry.protocol.signing import SIGNATURE_HEADER, sign, verify

TEXT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
NO_FIELDS = "\N{EN DASH}"


def section(title: str) -> str:
    """Return the text below a heading of the second level."""
    parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (found,) = (part for part in parts if part.split("\n", 1)[0] == title)
    return found


def table(text: str, first_heading: str) -> list[list[str]]:
    """Return the rows of the table whose first column has the given heading, without backticks."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split(" | ")])
    return rows


def vectors(name: str) -> list[dict[str, Any]]:
    match = re.search(rf"<!-- vectors: {name} -->\n```json\n(.*?)\n```", TEXT, re.DOTALL)
    assert match, f"no vectors for {name}"
    found: list[dict[str, Any]] = json.loads(match[1])
    assert found
    return found


def test_every_message_and_field_is_described_and_no_other() -> None:
    expected = set()
    for kind in get_args(messages.Message):
        tag = str(kind.__struct_config__.tag)
        expected |= {(tag, field) for field in kind.__struct_fields__} or {(tag, NO_FIELDS)}
    described = [(row[0], row[1]) for row in table(section("Messages"), "message")]
    assert len(described) == len(set(described))
    assert set(described) == expected


def test_requests_are_listed() -> None:
    listed = re.search(r"^Requests: (.*?)\. Every", section("Messages"), re.MULTILINE)
    assert listed
    tags = {kind.__struct_config__.tag for kind in get_args(messages.Request)}
    assert set(re.findall(r"`(\w+)`", listed[1])) == tags


def test_every_decline_reason_and_release_outcome_is_described() -> None:
    reasons = [row[0] for row in table(section("Messages"), "decline reason")]
    assert reasons == [reason.value for reason in messages.DeclineReason]
    (outcome,) = (row for row in table(section("Messages"), "message") if row[1] == "outcome")
    assert set(re.findall(r"\w+", outcome[2])) == {o.value for o in messages.ReleaseOutcome}


def test_every_failure_reason_is_described() -> None:
    reasons = [row[0] for row in table(section("Messages"), "failure reason")]
    assert reasons == [reason.value for reason in messages.FailureReason]


def test_defaults_are_described() -> None:
    described = {
        (row[0], row[1])
        for row in table(section("Messages"), "message")
        if len(row) > 2 and "default" in row[2]
    }
    expected = {
        (str(kind.__struct_config__.tag), field.name)
        for kind in get_args(messages.Message)
        for field in msgspec.structs.fields(kind)
        if not field.required
    }
    assert described == expected


def test_limits_are_those_of_the_code() -> None:
    described = {row[0]: int(row[1]) for row in table(section("Limits"), "limit")}
    actual = {
        name: value
        for module in (codec, messages, ids)
        for name, value in vars(module).items()
        if name.startswith("MAX_")
    }
    assert described == actual


def test_the_layouts_fields_are_described() -> None:
    described = {row[0]: row[2] for row in table(section("Layout fingerprint"), "layout field")}
    expected = {}
    for field in msgspec.structs.fields(KVLayout):
        expected[field.name] = "" if field.required else json.dumps(field.default)
    assert described == expected


def test_the_fields_of_compatibility_are_described() -> None:
    rows = table(section("Compatibility"), "compatibility field")
    assert [row[0] for row in rows] == list(Compatibility.__struct_fields__)
    assert [row[0] for row in rows if row[-1] == "no"] == ["max_model_len"]


def test_the_parameters_are_described() -> None:
    described = [row[0] for row in table(section("kv_transfer_params"), "params field")]
    nested = {
        "peer": params.PeerAddress,
        "first_token": params.FirstToken,
        "first_token.logprob": params.TokenLogprob,
        "prefill_report": params.PrefillReport,
    }
    expected = list(params.KvTransferParams.__struct_fields__)
    for prefix, kind in nested.items():
        at = expected.index(prefix) + 1
        expected[at:at] = [f"{prefix}.{name}" for name in kind.__struct_fields__]
    assert described == expected


def test_the_version_and_its_history_are_current() -> None:
    assert f"now {PROTOCOL_VERSION}," in section("Versions")
    history = [int(row[0]) for row in table(section("Versions"), "version")]
    assert history == list(range(1, PROTOCOL_VERSION + 1))


def test_how_a_receive_s_end_is_told_is_described() -> None:
    text = section("kv_transfer_params")
    assert f"`{RECEIVE_HEADER}`" in text
    assert f"`{stream_note('<outcome>').decode().strip()}`" in text


def test_the_signature_header_is_named() -> None:
    assert f"`{SIGNATURE_HEADER}`" in section("Signatures")


@pytest.mark.parametrize("vector", vectors("fingerprint"))
def test_fingerprint_vectors(vector: dict[str, Any]) -> None:
    layout = msgspec.convert(vector["layout"], KVLayout)
    assert layout.fingerprint().hex() == vector["fingerprint"]


@pytest.mark.parametrize("vector", vectors("root"))
def test_root_vectors(vector: dict[str, Any]) -> None:
    fingerprint = bytes.fromhex(vector["fingerprint"])
    root = chain_root(fingerprint, salt=vector["salt"], lora=vector["lora"])
    assert root.hex() == vector["root"]


@pytest.mark.parametrize("vector", vectors("block"))
def test_block_vectors(vector: dict[str, Any]) -> None:
    root = BlockHash(bytes.fromhex(vector["root"]))
    found = block_hashes(root, vector["tokens"], vector["block_size_tokens"])
    assert [block_hash.hex() for block_hash in found] == vector["hashes"]


@pytest.mark.parametrize("vector", vectors("prompt"))
def test_prompt_vectors(vector: dict[str, Any]) -> None:
    root = BlockHash(bytes.fromhex(vector["root"]))
    assert prompt_digest(root, vector["tokens"]).hex() == vector["digest"]


@pytest.mark.parametrize("vector", vectors("signature"))
def test_signature_vectors(vector: dict[str, Any]) -> None:
    key, body = bytes.fromhex(vector["key"]), vector["body"].encode()
    transfer_id = TransferId(vector["transfer_id"])
    assert sign(key, body, transfer_id, vector["expires_at_s"]) == vector["header"]
    assert verify(key, body, vector["header"], vector["expires_at_s"] - 1) == transfer_id


def test_the_state_tables_have_their_place() -> None:
    assert TEXT.count("<!-- tables:begin -->") == 1
    assert TEXT.index("<!-- tables:begin -->") < TEXT.index("<!-- tables:end -->")
