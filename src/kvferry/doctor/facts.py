"""What is to be found out about a deployment, and what was: from that the findings are decided.

Owns the types only. Durations in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvferry.client.control_answer import ControlAnswer
from kvferry.options import option
from kvferry.protocol.keys import UserKeyFile, is_loopback
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import PeerAddress

LOOPBACK = "loopback"
"""The one name of every loopback address: there they all mean the same host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPlan:
    """How much is handed over in each direction, after one handoff that opens the connection."""

    num_tokens: int = option(
        1024,
        "Length of the prompt whose move tells the bandwidth; less where the instances are small.",
        flag="--tokens",
        minimum=128,
        maximum=65_536,
    )
    repeats: int = option(
        2, "Handoffs of each length and direction; the fastest counts.", minimum=1, maximum=20
    )
    timeout_s: float = option(
        60.0, "Bound of each leg of a handoff.", flag="--handoff-timeout-s", minimum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What is to be examined, and how."""

    urls: tuple[str, ...]
    """Of instances and routers, without a trailing slash."""
    control_addresses: Mapping[str, str]
    """By an instance's URL; kvferry's own engines and routers tell theirs themselves."""
    cluster_key: bytes | None = None
    api_key: str | None = None
    handoffs: HandoffPlan | None = None
    """None: no handoff is tried."""
    max_pairs: int = option(12, "Directions that are tried at most.", minimum=1)
    timeout_s: float = option(5.0, "Bound of each question.", minimum=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What an instance has in hand; None: it does not say."""

    num_requests_running: int | None = None
    num_requests_waiting: int | None = None
    num_handoffs_held: int | None = None
    num_blocks_leased: int | None = None
    num_blocks_quarantined: int | None = None
    num_blocks_retained: int | None = None
    num_peers_resting: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFacts:
    """What one instance answered over HTTP."""

    error: str = ""
    """Why nothing answered; empty: something did."""
    health_status: int = 0
    """Of ``GET /health``; 0: it was not answered."""
    round_trip_s: float | None = None
    clock_ahead_s: float | None = None
    """The instance's wall clock less ours, to about a second; None: it does not tell the time."""
    engine: str = ""
    """``kvferry``, or vLLM with its version; empty: unknown."""
    model: str = ""
    """The name that requests give."""
    max_model_len: int | None = None
    models_error: str = ""
    """Why the model's name is unknown."""
    info: InstanceInfo | None = None
    """From ``GET /kvferry/instance``, which only kvferry's own engine answers."""
    user_key: UserKeyFile | None = None
    """Where its key is, if that is a user's own."""
    info_error: str = ""
    """That was answered, and can't be read."""
    load: LoadFacts = field(default_factory=LoadFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """One instance. ``control`` and ``advertised`` are None where no address is known.

    ``control`` was asked at the address that the user or the instance named, ``advertised`` at the
    one that peers are told, where that is another.
    """

    url: str
    http: HttpFacts
    control: ControlAnswer | None = None
    advertised: ControlAnswer | None = None
    is_control_given: bool = False
    """The doctor's user named the control address, by ``--control``."""

    @property
    def info(self) -> InstanceInfo | None:
        """Who it says it is, by either way."""
        if self.control is not None and self.control.info is not None:
            return self.control.info
        return self.http.info

    @property
    def name(self) -> str:
        """How findings call it."""
        return self.url if self.info is None else self.info.instance_id

    @property
    def host(self) -> str:
        """The host in its URL."""
        return host_of(self.url)

    def is_another(self, peer: PeerAddress | None) -> bool:
        """Whether ``peer``, who answered at this URL, is not who the control port says.

        kvferry's own instances say over HTTP who they are, and are compared by that.
        """
        info = self.info
        if peer is None or info is None or self.http.info is not None:
            return False
        return (info.instance_id, info.epoch) != (peer.instance_id, peer.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedInstance:
    """One instance as its router shows it."""

    url: str
    role: str
    health: str
    detail: str = ""
    is_draining: bool = False
    control_address: str = ""
    """The one that the router was given, else what the instance told it; empty: unknown to it."""
    is_control_given: bool = False
    """The router was given it, and asks there."""
    is_identified: bool = True
    """The router knows who it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """A router that was asked for its fleet."""

    url: str
    clock_ahead_s: float | None
    fleet: tuple[RoutedInstance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSample:
    """One handoff that moved the prompt's blocks.

    ``moved_s`` is the target's own time from the request's arrival until the blocks were there
    (``is_reported``), or what the client waited longer than for the same request without a move.
    """

    num_tokens: int
    num_bytes: int
    moved_s: float
    is_reported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """Handoffs from one instance to another. ``error``: why there are no further ones."""

    source_url: str
    target_url: str
    short: tuple[HandoffSample, ...] = ()
    """Of a short prompt: what a handoff costs whatever its size."""
    long: tuple[HandoffSample, ...] = ()
    outcome: str = ""
    """Why the blocks did not come, as the target counts it; empty: they came, or nobody says."""
    error: str = ""
    remedy: str = ""
    """For that error; empty: unknown."""
    answered_by: PeerAddress | None = None
    """Who answered the prefill legs at the source's URL; None: nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """This host, where at least one of the instances is."""

    ptrace_scope: int | None
    """Yama's; None: there is no such restriction here."""
    locked_memory_bytes: int | None
    """The soft limit of this process; None: unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentFacts:
    """All that was found out."""

    instances: tuple[InstanceFacts, ...]
    routers: tuple[RouterFacts, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    num_pairs_left_out: int = 0
    """Directions that were not tried because they are too many."""
    are_transfers_wanted: bool = True
    has_cluster_key: bool = False
    host: HostFacts | None = None
    """None: none of the instances is on this host."""

    def instance(self, url: str) -> InstanceFacts:
        """Return the instance with that URL. Raises ``KeyError``."""
        for instance in self.instances:
            if instance.url == url:
                return instance
        raise KeyError(url)

    def routed(self, url: str) -> RoutedInstance | None:
        """Return the instance with that URL as the first router that has it shows it."""
        found = (item for router in self.routers for item in router.fleet if item.url == url)
        return next(found, None)

    def others_there(self) -> dict[str, PeerAddress]:
        """Return who answered at each URL whose instance is another than its control port's."""
        return {
            pair.source_url: pair.answered_by
            for pair in self.pairs
            if pair.answered_by is not None
            and self.instance(pair.source_url).is_another(pair.answered_by)
        }


def host_of(address: str) -> str:
    """Return the host of a URL or endpoint, the same for all loopback addresses."""
    try:
        host = urlsplit(address).hostname or ""
    except ValueError:
        return ""
    return LOOPBACK if is_loopback(host) else host


def short_name(model_name: str) -> str:
    """Return a model's name, of a path its last part."""
    is_path = model_name.startswith(("/", "."))
    return model_name.rstrip("/").rpartition("/")[2] if is_path else model_name
