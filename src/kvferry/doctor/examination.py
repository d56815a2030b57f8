"""Asks a deployment everything, in a bounded time, and returns the facts.

Owns the order: routers first, since they name instances; then all instances at once; then handoffs,
one pair at a time so that none disturbs another. This host's settings are looked at beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp

from kvferry.client.control_port import ControlPorts
from kvferry.client.http_client import HttpClient
from kvferry.doctor.facts import (
    LOOPBACK,
    Assignment,
    DeploymentFacts,
    HostFacts,
    InstanceFacts,
    RouterFacts,
    host_of,
)
from kvferry.doctor.handoffs import HandoffProbe
from kvferry.doctor.questions import Questions
from kvferry.errors import ConfigError

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_LOOK_UP_S = 2.0
Say = Callable[[str], None]


async def examine(assignment: Assignment, rng: random.Random, say: Say) -> DeploymentFacts:
    """Return all facts. ``say`` hears what is being done.

    Raises ``ConfigError`` for a control address whose URL is not among the instances.
    """
    headers = {"Authorization": f"Bearer {assignment.api_key}"} if assignment.api_key else {}
    with contextlib.closing(ControlPorts(assignment.cluster_key)) as ports:
        async with aiohttp.ClientSession(headers=headers) as session:
            questions = Questions(HttpClient(session, assignment.timeout_s), ports)
            say("asking who is there")
            facts = await _asked(questions, assignment)
            if assignment.handoffs is None:
                return facts
            probe = functools.partial(
                HandoffProbe,
                questions=questions,
                plan=assignment.handoffs,
                cluster_key=assignment.cluster_key,
                rng=rng,
            )
            directions = list(fitting_directions(facts))
            tried = directions[: assignment.max_pairs]
            pairs = []
            for number, (source, target) in enumerate(tried, start=1):
                say(f"handing over from {source.name} to {target.name} ({number} of {len(tried)})")
                pairs.append(await probe(source=source, target=target).measure())
            num_left_out = len(directions) - len(tried)
            return replace(facts, pairs=tuple(pairs), num_pairs_left_out=num_left_out)


async def _asked(questions: Questions, assignment: Assignment) -> DeploymentFacts:
    """Return what routers and instances answer; no handoff is tried."""
    found = await asyncio.gather(*map(questions.router, assignment.urls))
    routers = tuple(router for router in found if router is not None)
    given = assignment.control_addresses
    targets = _targets(assignment, routers).items()
    instances = await asyncio.gather(
        *(_instance(questions, url, address, is_given=url in given) for url, address in targets)
    )
    is_here = any(await asyncio.gather(*(is_this_host(item.url) for item in instances)))
    return DeploymentFacts(
        instances=tuple(instances),
        routers=routers,
        are_transfers_wanted=assignment.handoffs is not None,
        has_cluster_key=assignment.cluster_key is not None,
        host=host_facts() if is_here else None,
    )


def _targets(assignment: Assignment, routers: tuple[RouterFacts, ...]) -> dict[str, str | None]:
    """Return the instances' URLs, each once, with the control address where one is known."""
    router_urls = {router.url for router in routers}
    targets: dict[str, str | None] = {
        url: None for url in assignment.urls if url not in router_urls
    }
    for item in itertools.chain.from_iterable(router.fleet for router in routers):
        targets[item.url] = targets.get(item.url) or item.control_address or None
    for url, address in assignment.control_addresses.items():
        if url not in targets:
            known = ", ".join(targets) or "none"
            raise ConfigError(f"--control names {url}, which is no instance here (known: {known})")
        targets[url] = address
    return targets


async def _instance(
    questions: Questions, url: str, address: str | None, *, is_given: bool
) -> InstanceFacts:
    """Return what an instance says, over HTTP and where it can be asked at control ports."""
    http = await questions.instance(url)
    facts = InstanceFacts(url=url, http=http, is_control_given=is_given)
    if address is None and http.info is not None:
        address = http.info.control_address
    if address is None:
        return facts
    facts = replace(facts, control=await questions.control(address))
    advertised = None if facts.info is None else facts.info.control_address
    if advertised is not None and advertised != address:
        facts = replace(facts, advertised=await questions.control(advertised))
    return facts


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
        and not one.layout.differing_fields(other.layout)
        and not (one.compatibility and one.compatibility.differing_fields(other.compatibility))
        and all(not item.http.error and item.http.model for item in (first, second))
    )


# -- this host --------------------------------------------------------------------------------


def host_facts(ptrace_scope_file: Path = _PTRACE_SCOPE) -> HostFacts:
    """Return those of this host's settings that KV transfers depend on."""
    try:
        ptrace_scope = int(ptrace_scope_file.read_text())
    except (OSError, ValueError):
        ptrace_scope = None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        ptrace_scope=ptrace_scope,
        locked_memory_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


async def is_this_host(url: str) -> bool:
    """Whether the host in ``url`` is this one: one of its addresses can be bound here."""
    host = host_of(url)
    if host == LOOPBACK:
        return True
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError):
        return False
    return any(_can_bind(family, address[0]) for family, _, _, _, address in found)


def _can_bind(family: int, address: str | int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
