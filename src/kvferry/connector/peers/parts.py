"""What the impure half of the connector is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.machine.events import Event
from kvferry.connector.planner import Planner
from kvferry.observe.metrics import ExchangeMetrics
from kvferry.protocol.messages import Hello, InstanceInfo
from kvferry.transport.base import Transport


@dataclass(slots=True)
class MoverParts:
    """What a mover is made of; each is used on its thread only, but for the planner."""

    config: ExchangeConfig
    hello: Hello
    transport: Transport
    planner: Planner
    clock: Clock
    metrics: ExchangeMetrics
    describe: Callable[[str], InstanceInfo]
    """Control address → the answer to ``InstanceQuery``."""
    on_results: Callable[[], None] = field(default=lambda: None)
    events: deque[Event] = field(default_factory=deque)
    """What has happened, for the planner: parts add to it, the mover takes out."""
