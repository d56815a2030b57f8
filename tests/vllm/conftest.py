"""A plain vLLM's answers, then two servers with the plugin; never more than two at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from kvferry.engine.bundled_model import bundled_model_dir
from tests.support.process_forks import ProcessForks
from tests.vllm.asking import Client, Question, open_session, random_tokens
from tests.vllm.serving import VllmServer, idle_share, running, start, start_forks

LENGTHS = (
    1, 2, 5, 17, 64, 65, 100, 127, 128, 129, 192, 200,
    255, 256, 257, 300, 384, 511, 640, 700, 896, 1025, 1280, 1500,
)  # fmt: skip
CHUNKS = ("--max-num-batched-tokens", "256")
"""So that a prompt of some length takes several steps."""
TEST_CONFIG = {"handoff_lease_s": 10.0, "receive_timeout_s": 20.0, "control_timeout_s": 5.0}
"""Long enough for two servers on two busy cores."""
Answers = list[tuple[Question, list[int]]]
Pair = tuple[VllmServer, VllmServer]


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """What one plain vLLM answers, and the share of a core that it takes when idle."""

    answers: Answers
    idle_share: float


class Pairs:
    """The pair that runs, if any: modules that want the same settings share it."""

    def __init__(self, forks: ProcessForks, model: Path, folder: Path) -> None:
        self._forks = forks
        self._model = model
        self._folder = folder
        self._key = ""
        self._stack = contextlib.ExitStack()
        self._pair: Pair | None = None

    def get(self, arguments: tuple[str, ...], config: Mapping[str, object]) -> Pair:
        """Return a running pair with these settings."""
        key = _settings_key(arguments, config)
        if self._pair is None or key != self._key or not _is_running(self._pair):
            self.close()
            self._pair, self._key = self._start(arguments, config), key
        return self._pair

    def close(self) -> None:
        self._pair = None
        self._stack.close()

    def _start(self, arguments: tuple[str, ...], config: Mapping[str, object]) -> Pair:
        extra = {**TEST_CONFIG, **config}
        prefill, decode = (
            start(self._forks, name, self._model, self._folder, *CHUNKS, *arguments,
                  core=core, extra_config=extra)
            for core, name in enumerate(("prefill", "decode"))
        )  # fmt: skip
        self._stack.enter_context(running(prefill, decode))
        return prefill, decode


def _is_running(pair: Pair) -> bool:
    return all(server.process.is_alive for server in pair)


def _settings_key(arguments: tuple[str, ...], config: Mapping[str, object]) -> str:
    return json.dumps([arguments, config], sort_keys=True)


def _settings_of(module: object) -> tuple[tuple[str, ...], Mapping[str, object]]:
    return getattr(module, "PAIR_ARGUMENTS", ()), getattr(module, "PAIR_CONFIG", {})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what starts servers of its own, then all that share a pair, pair after pair."""
    folder = Path(__file__).parent
    places = [index for index, item in enumerate(items) if folder in item.path.parents]

    def settings(item: pytest.Item) -> tuple[bool, str]:
        if "pair" not in getattr(item, "fixturenames", ()):
            return False, ""
        return True, _settings_key(*_settings_of(getattr(item, "module", None)))

    for place, item in zip(places, sorted((items[p] for p in places), key=settings), strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def model() -> Path:
    return bundled_model_dir()


@pytest.fixture(scope="session")
def vllm_forks() -> Iterator[ProcessForks]:
    """Starts ``vllm serve`` in a moment."""
    # Not below pytest's own folder: a socket's path may have some hundred characters.
    with tempfile.TemporaryDirectory(prefix="kvferry-vllm-") as folder:
        forks = start_forks(Path(folder))
        yield forks
        forks.close()


@pytest.fixture(scope="session")
def plain(vllm_forks: ProcessForks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """One plain vLLM, asked before there is a pair."""
    folder = tmp_path_factory.mktemp("plain")
    questions = [Question(random_tokens(n, seed)) for seed, n in enumerate(LENGTHS)]
    with running(start(vllm_forks, "plain", model, folder, *CHUNKS)) as (server,):
        return Plain(asyncio.run(_answers(server, questions)), idle_share(server))


@pytest.fixture(scope="session")
def plain_answers(plain: Plain) -> Answers:
    """Questions, and the tokens that one plain vLLM answers them with."""
    return plain.answers


async def _answers(server: VllmServer, questions: list[Question]) -> Answers:
    async with open_session() as session:
        client = Client(session)
        return [(q, await client.tokens(server.url, q)) for q in questions]


@pytest.fixture(scope="session")
def pairs(
    request: pytest.FixtureRequest,
    vllm_forks: ProcessForks,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pairs]:
    """Started after the plain one has ended, where any test asks for that one."""
    if any("plain" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("plain")
    pairs = Pairs(vllm_forks, model, tmp_path_factory.mktemp("pairs"))
    try:
        yield pairs
    finally:
        pairs.close()


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Pair:
    """A prefill and a decode instance.

    A module's ``PAIR_ARGUMENTS`` and ``PAIR_CONFIG`` are added to both.
    """
    return pairs.get(*_settings_of(request.module))


@pytest.fixture
def prefill(pair: Pair) -> VllmServer:
    return pair[0]


@pytest.fixture
def decode(pair: Pair) -> VllmServer:
    return pair[1]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with open_session() as session:
        yield Client(session)
