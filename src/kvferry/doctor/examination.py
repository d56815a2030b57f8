"""Asks a deployment everything, in a bounded time, and returns the facts.

Owns the order: routers first, since they name instances; then all instances at once; then handoffs,
one pair at a time so that none disturbs another.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from kvferry.doctor.control_question import ask_control_port
from kvferry.doctor.facts import (
    ControlFacts,
    DeploymentFacts,
    InstanceFacts,
    PairFacts,
    RouterFacts,
)
from kvferry.doctor.handoffs import HandoffPlan, HandoffProbe
from kvferry.doctor.host import host_facts, is_this_host
from kvferry.doctor.http_client import HttpClient
from kvferry.doctor.http_questions import HttpQuestions
from kvferry.errors import ConfigError, PeerUnreachableError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What is to be examined, and how."""

    urls: tuple[str, ...]
    """Of instances and routers, without a trailing slash."""
    control_addresses: Mapping[str, str]
    """By an instance's URL; kvferry's own engines and routers tell theirs themselves."""
    cluster_key: bytes | None = None
    api_key: str | None = None
    timeout_s: float = 5.0
    """Bound of each question."""
    handoffs: HandoffPlan | None = None
    """None: no handoff is tried."""
    max_pairs: int = 12
    """Directions that are tried at most."""


async def examine(assignment: Assignment, rng: random.Random, say: Say) -> DeploymentFacts:
    """Return all facts. ``say`` hears what is being done.

    Raises ``ConfigError`` for a control address whose URL is not among the instances.
    """
    headers = {"Authorization": f"Bearer {assignment.api_key}"} if assignment.api_key else {}
    async with aiohttp.ClientSession() as session:
        client = HttpClient(session, headers)
        questions = HttpQuestions(client, assignment.timeout_s)
        say("asking who is there")
        routers = await _routers(questions, assignment.urls)
        targets = _targets(assignment, routers)
        facts = DeploymentFacts(
            instances=await _instances(questions, targets, assignment),
            routers=tuple(routers.values()),
            are_transfers_wanted=assignment.handoffs is not None,
            has_cluster_key=assignment.cluster_key is not None,
        )
        if any(await asyncio.gather(*(is_this_host(item.url) for item in facts.instances))):
            facts = replace(facts, host=host_facts())
        if assignment.handoffs is None:
            return facts
        probe = HandoffProbe(client, questions, assignment.handoffs, assignment.cluster_key, rng)
        return await _with_handoffs(facts, probe, assignment.max_pairs, say)


async def _routers(questions: HttpQuestions, urls: Sequence[str]) -> dict[str, RouterFacts]:
    async def ask(url: str) -> RouterFacts | None:
        try:
            return await questions.router(url)
        except PeerUnreachableError:
            return None  # Said when it is asked as an instance.

    found = zip(urls, await asyncio.gather(*map(ask, urls)), strict=True)
    return {url: router for url, router in found if router is not None}


def _targets(assignment: Assignment, routers: Mapping[str, RouterFacts]) -> dict[str, str | None]:
    """Return the instances' URLs, each once, with the control address where one is known."""
    targets: dict[str, str | None] = {}
    for url in assignment.urls:
        if url not in routers:
            targets[url] = None
    for router in routers.values():
        for item in router.fleet:
            targets[item.url] = targets.get(item.url) or item.control_address or None
    for url, address in assignment.control_addresses.items():
        if url not in targets:
            known = ", ".join(targets) or "none"
            raise ConfigError(f"--control names {url}, which is no instance here (known: {known})")
        targets[url] = address
    return targets


async def _instances(
    questions: HttpQuestions, targets: Mapping[str, str | None], assignment: Assignment
) -> tuple[InstanceFacts, ...]:
    found = await asyncio.gather(
        *(_instance(questions, url, address, assignment) for url, address in targets.items())
    )
    return tuple(found)


async def _instance(
    questions: HttpQuestions, url: str, address: str | None, assignment: Assignment
) -> InstanceFacts:
    async def ask(asked: str) -> ControlFacts:
        return await asyncio.to_thread(
            ask_control_port, asked, assignment.cluster_key, assignment.timeout_s
        )

    http = await questions.instance(url)
    if address is None and http.info is not None:
        address = http.info.control_address
    is_given = url in assignment.control_addresses
    facts = InstanceFacts(url=url, http=http, is_control_given=is_given)
    if address is None:
        return facts
    facts = replace(facts, control=await ask(address))
    advertised = None if facts.info is None else facts.info.control_address
    if advertised is not None and advertised != address:
        facts = replace(facts, advertised=await ask(advertised))
    return facts


async def _with_handoffs(
    facts: DeploymentFacts, probe: HandoffProbe, max_pairs: int, say: Say
) -> DeploymentFacts:
    directions = list(fitting_directions(facts))
    pairs: list[PairFacts] = []
    for number, (source, target) in enumerate(directions[:max_pairs], start=1):
        say(
            f"handing over from {source.name} to {target.name} "
            f"({number} of {min(max_pairs, len(directions))})"
        )
        pairs.append(await probe.measure(source, target))
    num_left_out = max(0, len(directions) - max_pairs)
    return replace(facts, pairs=tuple(pairs), num_pairs_left_out=num_left_out)


def fitting_directions(
    facts: DeploymentFacts,
) -> Iterator[tuple[InstanceFacts, InstanceFacts]]:
    """Yield every pair, in both directions, that can hand over to each other as far as is known.

    Where a router has been asked, its prefill and decode instances are paired: nothing else moves.
    """
    roles = {(item.url, item.role) for router in facts.routers for item in router.fleet}
    routed = {url for url, _ in roles}
    for first, second in itertools.combinations(facts.instances, 2):
        is_used = {first.url, second.url} - routed or any(
            (one.url, "prefill") in roles and (other.url, "decode") in roles
            for one, other in ((first, second), (second, first))
        )
        if is_used and _fit(first, second):
            yield first, second
            yield second, first


def _fit(first: InstanceFacts, second: InstanceFacts) -> bool:
    one, other = first.info, second.info
    return (
        one is not None
        and other is not None
        and one.epoch != other.epoch
        and one.transport == other.transport
        and one.layout.compared_fields() == other.layout.compared_fields()
        and not (one.compatibility and one.compatibility.differing_fields(other.compatibility))
        and all(not item.http.error and item.http.model for item in (first, second))
    )
