"""The benchmarks' commands: what they refuse, what they print, what they write."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvferry.bench.handoff import Arm
from kvferry.bench.transfer import CopyMeasurement, report_copies
from kvferry.cli.main import run

_A = "http://127.0.0.1:1"


class _Instance(BaseHTTPRequestHandler):
    """Answers every completion with four tokens, as if blocks had been moved on ``/routed``."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        moved = 64 if self.path.startswith("/routed") else 0
        mode = self.headers["X-KVFerry-Mode"] or ""
        report = {"prefill_end_s": time.monotonic(), "num_received_bytes": moved, "mode": mode}
        events = [{"choices": [{"token_ids": [token]}]} for token in range(4)]
        lines = [*map(json.dumps, events), json.dumps({"kv_report": report}), "[DONE]"]
        body = "".join(f"data: {line}\n\n" for line in lines).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Instance) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def test_handoffs_of_a_running_deployment(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    arguments = ["--url", f"{url}/routed/", "--late-url", f"{url}/routed/late"]
    arguments += ["--plain-url", url, "--json", str(path), "--arms", ",".join(Arm)]
    few = ["--lengths", "4,6", "--repeats", "2", "--warmups", "0"]
    assert run(["bench", "handoff", *arguments, *few]) == 0
    record = json.loads(path.read_text())
    assert len(record["samples"]) == 16
    assert record["arguments"]["lengths_tokens"] == [4, 6]
    assert record["arguments"]["arms"] == list(Arm)
    shown = capsys.readouterr().out
    assert shown.count("less colocated") == 6
    assert shown.count("/ pull") == 4


def test_a_router_that_moves_nothing_fails_the_run(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "handoff", "--url", url, "--plain-url", url]) == 1
    assert "nothing was moved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["handoff", "--url", "http://127.0.0.1:1"], 2, "give both --url and --plain-url"),
        (["handoff", "--url", _A, "--plain-url", _A, "--link", "tcp"], 2, "of their own"),
        (["handoff", "--url", _A, "--plain-url", _A, "--background", "1"], 2, "of their own"),
        (["handoff", "--url", _A, "--plain-url", _A, "--arms", "push-late"], 1, "needs a router"),
        (["handoff", "--late-url", _A], 2, "--late-url needs --url"),
        (["handoff", "--link", "tcp", "--transport", "shm"], 2, "leave out --transport shm"),
        (["handoff", "--arms", "pull,shove"], 2, "push-late"),
        (["handoff", "--background", "1", "--rate", "0"], 1, "no prompt arrives"),
        (["handoff", "--lengths", "5,x"], 2, "512,2048"),
        (["handoff", "--max-tokens", "2"], 1, "max tokens must be at least 4"),
        (["engine", "--core", "99999"], 2, "--core 99999 is not available"),
        (["transfer", "--transport", "smh"], 2, "'shm'"),
        (["hadnoff"], 2, "handoff"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == code
    assert words in capsys.readouterr().err


def test_transfer_table_has_speeds_and_ratio() -> None:
    measured = CopyMeasurement(
        transport="shm",
        operation="READ",
        num_bytes=64 * 2**20,
        block_bytes=1024,
        is_scattered=True,
        num_repeats=3,
        blocks_bytes_per_s=3 * 2**30,
        plain_bytes_per_s=4 * 2**30,
        ratio=0.75,
    )
    cells = report_copies([measured]).text.splitlines()[2].split()
    assert cells == ["shm", "READ", "scattered", "64.0", "3.00", "4.00", "0.750"]
