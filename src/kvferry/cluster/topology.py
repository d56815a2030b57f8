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

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvferry.engine.config import EngineConfig
from kvferry.errors import ConfigError
from kvferry.options import check_options, option, read_options, same_as
from kvferry.protocol.params import Role
from kvferry.router.config import RouterConfig
from kvferry.server.config import InstanceConfig

DEFAULT_MODEL = "smollm2-135m"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """``count`` equal instances of one role."""

    count: int = option(1, "How many there are.", flag="", minimum=0)
    cores: int = option(
        1, "Cores of each instance, and its number of threads.", flag="--threads", minimum=1
    )
    num_blocks: int | None = same_as(EngineConfig, "num_blocks")
    kv_cache_gib: float | None = same_as(
        EngineConfig,
        "kv_cache_gib",
        default=None,
        help="Size of the KV pool; at most one of the two.",
        default_text="the engine's",
    )
    arguments: tuple[str, ...] = option(
        (), "Further arguments of `kvferry engine serve`, as they are.", flag=""
    )

    def __post_init__(self) -> None:
        check_options(self, has_flags=False)
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            raise ConfigError("both num_blocks and kv_cache_gib are given; give one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTopology:
    """A router in front of the instances; None leaves an option to the router."""

    port: int = same_as(
        RouterConfig, "port", default=0, help="The router's port; 0 takes a free one."
    )
    mode: str | None = same_as(RouterConfig, "mode", default=None, default_text="auto")
    decode_choice: str | None = same_as(
        RouterConfig, "decode_choice", default=None, default_text="early"
    )
    arguments: tuple[str, ...] = option(
        (), "Further arguments of `kvferry router`, as they are.", flag=""
    )

    def __post_init__(self) -> None:
        check_options(self, has_flags=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A deployment on one machine; by default one prefill, one decode instance and a router."""

    model: str = option(DEFAULT_MODEL, "Bundled model or model folder.", flag="")
    dtype: str | None = same_as(EngineConfig, "dtype", default=None, default_text="auto")
    transport: str | None = same_as(InstanceConfig, "transport", default=None, default_text="auto")
    host: str = option(LOOPBACK, "Address that the router listens on.", flag="")
    prefill: tuple[InstanceGroup, ...] = (InstanceGroup(),)
    decode: tuple[InstanceGroup, ...] = (InstanceGroup(),)
    router: RouterTopology = field(default_factory=RouterTopology)
    further_routers: tuple[RouterTopology, ...] = ()
    """More routers over the same instances, each with options of its own."""

    def __post_init__(self) -> None:
        """Refuse a shape that cannot run. Raises ``ConfigError``."""
        check_options(self, has_flags=False)
        for role, groups in self.groups_by_role().items():
            if sum(group.count for group in groups) < 1:
                raise ConfigError(f"the topology has no {role.value} instance; it needs one")

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
    return read_options(Topology, document, source)
