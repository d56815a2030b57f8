"""The instances of a router: one record for each, with its health, its legs and what waits for it.

Owns the mutable state, on the event loop's thread only; policies see immutable snapshots. Knows no
HTTP: whoever talks to an instance reports what it saw. Who wants to hear of changes subscribes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvferry.client.dialects import Dialect, KvferryDialect
from kvferry.errors import LocalProtocolError
from kvferry.protocol.params import PeerAddress, Role
from kvferry.router.fleet.identity import InstanceIdentity
from kvferry.router.fleet.silence import InstanceWaits

_KVFERRY = KvferryDialect()


class Health(enum.StrEnum):
    """What the router last learnt of an instance."""

    UNKNOWN = "unknown"
    """Not probed yet; gets nothing."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Was healthy, then a connection failed or a probe was slow: used when nothing better is."""
    DOWN = "down"


class FleetEvent(enum.StrEnum):
    """What has happened to an instance."""

    SUSPECT = "suspect"
    """A leg failed on it: it should be probed at once."""
    NEW_EPOCH = "new_epoch"
    """It was started anew: blocks of its last start do not exist."""
    DRAINED = "drained"
    """It gets nothing new, and its last leg has ended."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance in one role, at one moment. ``url`` names it."""

    url: str
    role: Role
    health: Health
    is_draining: bool
    num_inflight: int
    identity: InstanceIdentity | None = None
    """None while it is not known, or may have changed since."""
    apart_from: frozenset[str] = frozenset()
    """URLs of the instances with which it is known to exchange nothing."""
    last_turn: int = 0
    """When it last got a leg of the role, counted in the role's legs; 0: never."""
    dialect: Dialect = _KVFERRY
    """How its kind of engine is spoken to."""

    @property
    def peer(self) -> PeerAddress | None:
        """Who it is to other instances, as far as that is known."""
        return None if self.identity is None else self.identity.peer

    @property
    def can_push(self) -> bool:
        """Whether it is known to take part in pushes."""
        return self.identity is not None and self.identity.can_push

    @property
    def can_read_back(self) -> bool:
        """Whether it is known to take part in read-backs."""
        return self.identity is not None and self.identity.can_read_back


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All instances at one moment."""

    prefill: tuple[InstanceView, ...]
    decode: tuple[InstanceView, ...]

    def of(self, role: Role) -> tuple[InstanceView, ...]:
        """Return the instances that take ``role``."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def is_divided(self) -> bool:
        """Whether some instances are known to exchange nothing with some others."""
        return any(view.apart_from for view in (*self.prefill, *self.decode))


@dataclass(slots=True)
class _Instance:
    url: str
    dialect: Dialect
    health: Health = Health.UNKNOWN
    is_draining: bool = False
    detail: str = "not probed yet"
    identity: InstanceIdentity | None = None
    last_epoch: int | None = None
    apart_from: frozenset[str] = frozenset()
    num_doubts: int = 0
    """So many probes have to be answered well before it counts as healthy."""
    num_inflight: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    last_turn: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    views: dict[Role, InstanceView] = field(default_factory=dict)
    """Made when asked for, dropped when anything in them changes."""
    waits: InstanceWaits = field(init=False)

    def __post_init__(self) -> None:
        self.waits = InstanceWaits(self.url)

    @property
    def is_drained(self) -> bool:
        return self.is_draining and not any(self.num_inflight.values())

    def view(self, role: Role) -> InstanceView:
        view = self.views.get(role)
        if view is None:
            view = self.views[role] = InstanceView(
                self.url,
                role,
                self.health,
                self.is_draining,
                self.num_inflight[role],
                self.identity,
                self.apart_from,
                self.last_turn[role],
                self.dialect,
            )
        return view


class Fleet:
    """The instances of one router; a URL in both roles is one instance with one health."""

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        dialect: Dialect = _KVFERRY,
    ) -> None:
        """``dialect``: that of all instances, which are of one kind."""
        self._instances = {url: _Instance(url, dialect) for url in (*prefill_urls, *decode_urls)}
        self._urls = {
            Role.PREFILL: tuple(dict.fromkeys(prefill_urls)),
            Role.DECODE: tuple(dict.fromkeys(decode_urls)),
        }
        self._turns = dict.fromkeys(Role, 0)
        self._listeners: list[Callable[[FleetEvent, str], None]] = []

    @property
    def urls(self) -> tuple[str, ...]:
        """Every instance once, in the order of the configuration."""
        return tuple(self._instances)

    def subscribe(self, listener: Callable[[FleetEvent, str], None]) -> None:
        """Have ``listener`` called with each event and the URL of its instance, once it is over."""
        self._listeners.append(listener)

    def snapshot(self) -> FleetSnapshot:
        """Return how all instances stand now."""
        return FleetSnapshot(self._views(Role.PREFILL), self._views(Role.DECODE))

    def _views(self, role: Role) -> tuple[InstanceView, ...]:
        return tuple([self._instances[url].view(role) for url in self._urls[role]])

    def view(self, url: str, role: Role) -> InstanceView | None:
        """Return how ``url`` stands in ``role`` now, None where it does not take that role."""
        return self._instances[url].view(role) if url in self._urls[role] else None

    def waits(self, url: str) -> InstanceWaits:
        """Return what waits for ``url``."""
        return self._find(url).waits

    def open_ticket(self, url: str, role: Role) -> ExitStack:
        """Count one more leg on ``url``, which has had its turn, until the ticket is closed."""
        instance = self._find(url)
        self._turns[role] += 1
        instance.last_turn[role] = self._turns[role]
        self._count(instance, role, 1)
        ticket = ExitStack()
        ticket.callback(self._count, instance, role, -1)
        return ticket

    def _count(self, instance: _Instance, role: Role, change: int) -> None:
        instance.num_inflight[role] += change
        instance.views.pop(role, None)
        if change < 0 and instance.is_drained:
            self._tell(FleetEvent.DRAINED, instance)

    def identity(self, url: str) -> InstanceIdentity | None:
        """Return who ``url`` was when it was last asked; None where that may have changed."""
        return self._find(url).identity

    def set_health(self, url: str, health: Health, detail: str = "") -> None:
        """Record what a probe found; ``detail`` is for people.

        Unless it is healthy, its identity is forgotten: it may be starting anew. One that is still
        doubted stays suspect.
        """
        instance = self._find(url)
        if health is Health.HEALTHY and instance.num_doubts:
            instance.num_doubts -= 1
            return
        if health is Health.DOWN:
            instance.num_doubts = 0
        instance.health = health
        instance.detail = detail
        if health is not Health.HEALTHY:
            self._identify(instance, None)
        instance.views.clear()

    def set_identity(self, url: str, identity: InstanceIdentity | None) -> None:
        """Record who ``url`` says it is; None when it does not say."""
        instance = self._find(url)
        self._identify(instance, identity)
        instance.views.clear()
        if identity is not None:
            before, instance.last_epoch = instance.last_epoch, identity.epoch
            if before not in (None, identity.epoch):
                self._tell(FleetEvent.NEW_EPOCH, instance)

    def report_connection_failure(self, url: str, detail: str, *, num_doubts: int = 0) -> None:
        """A request could not reach ``url``, or its connection broke: have it probed at once.

        One with doubts stays suspect for as many probes that are answered well.
        """
        instance = self._find(url)
        if instance.health in (Health.HEALTHY, Health.SUSPECT):
            instance.num_doubts = max(instance.num_doubts, num_doubts)
        if instance.health is Health.HEALTHY:
            instance.health = Health.SUSPECT
            instance.detail = detail
            self._identify(instance, None)
            instance.views.clear()
            self._tell(FleetEvent.SUSPECT, instance)

    def set_draining(self, url: str, is_draining: bool) -> None:
        """A draining instance finishes what it has and gets nothing new."""
        instance = self._find(url)
        was_drained = instance.is_drained
        instance.is_draining = is_draining
        instance.views.clear()
        if instance.is_drained and not was_drained:
            self._tell(FleetEvent.DRAINED, instance)

    def detail(self, url: str) -> str:
        """Return why ``url`` has the health it has, for people."""
        return self._find(url).detail

    def set_detail(self, url: str, detail: str) -> None:
        """Record what people should know of ``url``, whatever its health."""
        self._find(url).detail = detail

    def health(self, url: str) -> Health:
        """Return the health of ``url``."""
        return self._find(url).health

    def _identify(self, instance: _Instance, identity: InstanceIdentity | None) -> None:
        """Note who it is, and with whom it exchanges nothing: no request need compare."""
        before, instance.identity = instance.identity, identity
        if (before and before.terms) == (identity and identity.terms):
            return
        for other in self._instances.values():
            is_apart = identity is not None and bool(identity.difference_from(other.identity))
            if is_apart != (other.url in instance.apart_from):
                instance.apart_from ^= {other.url}
                other.apart_from ^= {instance.url}
                other.views.clear()

    def _tell(self, event: FleetEvent, instance: _Instance) -> None:
        for listener in self._listeners:
            listener(event, instance.url)

    def _find(self, url: str) -> _Instance:
        instance = self._instances.get(url)
        if instance is None:
            raise LocalProtocolError(f"{url} is not a configured instance")
        return instance
