"""What a deployment consists of: groups of instances and one router; read from TOML.

Owns the file's format and its defaults; starts nothing. Example::

    model = "smollm2-135m"
    dtype = "bfloat16"
    transport = "nixl"

    [[prefill]]
    count = 2
    cores = 1
    num_blocks = 2048

    [[decode]]
    count = 2

    [router]
    port = 8000
    mode = "push"
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError
from kvferry.protocol.params import Role

DEFAULT_MODEL = "smollm2-135m"
LOOPBACK = "127.0.0.1"
ROUTE_MODES = ("auto", "pull", "push")
DECODE_CHOICES = ("early", "late")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """``count`` equal instances of one role."""

    count: int = 1
    cores: int = 1
    """Cores of each instance, and its number of threads."""
    num_blocks: int | None = None
    """KV blocks of each instance; None leaves it to the engine."""
    kv_cache_gib: float | None = None
    """The same in GiB; at most one of the two."""
    arguments: tuple[str, ...] = ()
    """Further arguments of ``kvferry engine serve``, as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTopology:
    """A router in front of the instances."""

    port: int = 0
    """0 takes a free one."""
    mode: str | None = None
    """How KV moves: pull, push or auto; None leaves it to the router."""
    decode_choice: str | None = None
    """When a push's decode instance is chosen: early or late; None leaves it to the router."""
    arguments: tuple[str, ...] = ()
    """Further arguments of ``kvferry router``, as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A deployment on one machine; by default one prefill, one decode instance and a router."""

    model: str = DEFAULT_MODEL
    """Name of a bundled model, or a model folder."""
    dtype: str | None = None
    """None leaves it to the engine."""
    transport: str | None = None
    """None leaves it to the engine."""
    host: str = LOOPBACK
    prefill: tuple[InstanceGroup, ...] = (InstanceGroup(),)
    decode: tuple[InstanceGroup, ...] = (InstanceGroup(),)
    router: RouterTopology = field(default_factory=RouterTopology)
    further_routers: tuple[RouterTopology, ...] = ()
    """More routers over the same instances, each with options of its own."""

    def __post_init__(self) -> None:
        """Refuse a shape that cannot run. Raises ``ConfigError``."""
        for role, groups in self.groups_by_role().items():
            if sum(group.count for group in groups) < 1:
                raise ConfigError(f"the topology has no {role.value} instance; it needs one")
            for group in groups:
                _require_sane_group(role, group)
        for router in self.routers:
            _require_sane_router(router)

    @property
    def routers(self) -> tuple[RouterTopology, ...]:
        """Every router, the one that clients are told of first."""
        return (self.router, *self.further_routers)

    def groups_by_role(self) -> dict[Role, tuple[InstanceGroup, ...]]:
        """Return the groups of each role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}

    def with_counts(self, *, prefill: int | None = None, decode: int | None = None) -> Topology:
        """Return this topology with one group of ``prefill`` (``decode``) instances, where given.

        The group is the first of its role with another count.
        """
        changed = self
        if prefill is not None:
            changed = replace(changed, prefill=(replace(self.prefill[0], count=prefill),))
        if decode is not None:
            changed = replace(changed, decode=(replace(self.decode[0], count=decode),))
        return changed

    def with_engine_arguments(self, *arguments: str) -> Topology:
        """Return this topology with further arguments of ``kvferry engine serve`` everywhere."""

        def extended(groups: tuple[InstanceGroup, ...]) -> tuple[InstanceGroup, ...]:
            return tuple(
                replace(group, arguments=(*group.arguments, *arguments)) for group in groups
            )

        return replace(self, prefill=extended(self.prefill), decode=extended(self.decode))


def _require_sane_router(router: RouterTopology) -> None:
    if not 0 <= router.port <= 65_535:
        raise ConfigError(f"router.port is {router.port}; it must be 0 to 65535")
    if router.mode not in (None, *ROUTE_MODES):
        raise ConfigError(f"router.mode is {router.mode!r}; it must be {', '.join(ROUTE_MODES)}")
    if router.decode_choice not in (None, *DECODE_CHOICES):
        raise ConfigError(
            f"router.decode_choice is {router.decode_choice!r}; "
            f"it must be {' or '.join(DECODE_CHOICES)}"
        )


def _require_sane_group(role: Role, group: InstanceGroup) -> None:
    if group.count < 0:
        raise ConfigError(f"{role.value}.count is {group.count}; it must not be negative")
    if group.cores < 1:
        raise ConfigError(f"{role.value}.cores is {group.cores}; it must be at least 1")
    if group.num_blocks is not None and group.kv_cache_gib is not None:
        raise ConfigError(f"{role.value} has both num_blocks and kv_cache_gib; give one of them")


def load_topology(path: Path) -> Topology:
    """Read a topology file. Raises ``ConfigError`` naming what is wrong and where."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the topology file {path}: {error}") from error
    return parse_topology(text, source=str(path))


def parse_topology(text: str, *, source: str) -> Topology:
    """Return the topology that the TOML document ``text`` describes.

    Raises ``ConfigError``; an unknown key is refused naming the nearest valid one.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}") from error
    _require_known_keys(document, _field_names(Topology), where=source)
    for role in (Role.PREFILL.value, Role.DECODE.value):
        for group in _tables(document.get(role, []), where=f"{source}: [[{role}]]"):
            _require_known_keys(group, _field_names(InstanceGroup), where=f"{source}: [[{role}]]")
    router_tables = {
        "[router]": [document.get("router", {})],
        "[[further_routers]]": document.get("further_routers", []),
    }
    for name, tables in router_tables.items():
        for table in _tables(tables, where=f"{source}: {name}"):
            _require_known_keys(table, _field_names(RouterTopology), where=f"{source}: {name}")
    try:
        return msgspec.convert(document, Topology)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def _field_names(kind: type[Topology | InstanceGroup | RouterTopology]) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(kind))


def _tables(value: object, *, where: str) -> list[dict[str, object]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{where}: must be a table")
    return value


def _require_known_keys(table: Iterable[str], known: tuple[str, ...], *, where: str) -> None:
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
