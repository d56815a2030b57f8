"""The border to NIXL: the only module that knows it, and the only place its errors pass through.

No progress thread: it would eat a core, so a peer's transfers advance when we call. One agent per
link, because NIXL cannot cancel a posted transfer: destroying the agent that posted it (or the one
that it reaches) is what ends it, buffered bytes included.
"""

from __future__ import annotations

import enum
import gc
import importlib
import os
import secrets
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.errors import (
    ConfigError,
    FerryError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferFailedError,
)
from kvferry.transport.geometry import MAX_REGIONS, Geometry, Indices, RegionGeometry
from kvferry.transport.host import ProcessIdentity
from kvferry.transport.link import Operation
from kvferry.transport.nixl_options import NixlOptions, engine_options
from kvferry.transport.peer_watch import FarewellReference

NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Import names of NIXL's builds, in order of preference."""
MAX_DESCRIPTORS = 2**24
_LOCAL_SIDE = "NIXL_INIT_AGENT"
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


class Stage(enum.IntEnum):
    """What was being done when NIXL raised: decides whose fault it is."""

    SET_UP = 0
    CONNECT = 1
    TRANSFER = 2


ERROR_TABLE: dict[str, tuple[type[FerryError], type[FerryError], type[FerryError]]] = {
    # NIXL's class: (while setting up, while connecting, while transferring)
    "nixlBackendError": (ConfigError, PeerUnreachableError, TransferFailedError),
    "nixlCancelledError": (ConfigError, PeerUnreachableError, TransferFailedError),
    "nixlInvalidParamError": (ConfigError, RemoteProtocolError, LocalProtocolError),
    "nixlMismatchError": (ConfigError, RemoteProtocolError, LocalProtocolError),
    "nixlNoTelemetryError": (ConfigError, LocalProtocolError, LocalProtocolError),
    "nixlNotAllowedError": (ConfigError, RemoteProtocolError, LocalProtocolError),
    "nixlNotFoundError": (ConfigError, RemoteProtocolError, PeerUnreachableError),
    "nixlNotPostedError": (LocalProtocolError, LocalProtocolError, LocalProtocolError),
    "nixlNotSupportedError": (ConfigError, RemoteProtocolError, TransferFailedError),
    "nixlRemoteDisconnectError": (ConfigError, PeerUnreachableError, PeerUnreachableError),
    "nixlRepostActiveError": (LocalProtocolError, LocalProtocolError, LocalProtocolError),
    "nixlUnknownError": (ConfigError, PeerUnreachableError, TransferFailedError),
}


def load_nixl() -> ModuleType:
    """Import NIXL, whichever build is installed. Raises ``ConfigError`` if none imports."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    reasons = []
    for package in NIXL_PACKAGES:
        try:
            return importlib.import_module(package)
        except ImportError as error:
            reasons.append(f"{package}: {error}")
    raise ConfigError(f"NIXL does not import ({'; '.join(reasons)}); install kvferry[nixl]")


class NixlMetadata(msgspec.Struct, frozen=True):
    """One link's end, as the peer sees it. Descriptors of a peer are made from this geometry, never
    from objects that it serialised."""

    backend: Annotated[str, Meta(max_length=32)]
    agent_name: Annotated[str, Meta(min_length=1, max_length=128)]
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=200_000)]
    regions: Annotated[tuple[RegionGeometry, ...], Meta(min_length=1, max_length=MAX_REGIONS)]
    process: ProcessIdentity
    farewell: FarewellReference


class NixlAgent:
    """One NIXL agent with our memory registered, for one peer.

    Nothing outside may keep a reference to NIXL's objects, or the agent would outlive ``destroy``.
    """

    def __init__(self, nixl: ModuleType, options: NixlOptions, geometry: Geometry) -> None:
        self.name = f"kvferry-{os.getpid()}-{secrets.token_hex(8)}"
        bindings: Any = importlib.import_module(f"{nixl.__name__}._bindings")
        self._foreign = tuple(getattr(bindings, name) for name in ERROR_TABLE)
        self._geometry = geometry
        self._peer_geometry: Geometry = ()
        self._peer_name = ""
        self._sides: list[Any] = []  # Any: NIXL has no type information.
        self._handles: set[TransferHandle] = set()
        configuration = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._nixl: Any = self._call(Stage.SET_UP, nixl.nixl_agent, self.name, configuration)
        self._alive = weakref.ref(self._nixl.agent)
        self._start_backend(options)
        kind = geometry[0].kind.value
        rows = registration_rows(geometry)
        _present(self._call(Stage.SET_UP, self._nixl.register_memory, rows, kind))
        self.metadata: bytes = _present(self._call(Stage.SET_UP, self._nixl.get_agent_metadata))

    def _start_backend(self, options: NixlOptions) -> None:
        settings = engine_options(options)
        try:
            self._call(Stage.SET_UP, self._nixl.create_backend, options.backend, settings)
        except ConfigError as error:
            raise ConfigError(
                f"NIXL's backend {options.backend} does not start ({error}); "
                "with NIXL_LOG_LEVEL=INFO in the environment NIXL says why"
            ) from None

    def attach(self, theirs: NixlMetadata) -> None:
        """Load the peer's agent and prepare the descriptors of all blocks of both sides."""
        stage = Stage.CONNECT
        loaded = _present(self._call(stage, self._nixl.add_remote_agent, theirs.agent_metadata))
        name = _text(loaded)
        if name != theirs.agent_name:
            raise RemoteProtocolError("the peer's agent goes by another name than it says")
        self._peer_name = name
        self._call(stage, self._nixl.make_connection, name)
        self._peer_geometry = theirs.regions
        for owner, geometry in ((_LOCAL_SIDE, self._geometry), (name, theirs.regions)):
            rows, kind = strided_rows(geometry), geometry[0].kind.value
            self._sides.append(
                _present(self._call(stage, self._nixl.prep_xfer_dlist, owner, rows, kind))
            )

    def post(
        self, operation: Operation, local: Indices, remote: Indices, message: bytes = b""
    ) -> tuple[TransferHandle, str]:
        """Post a transfer; return its handle and NIXL's word for its state.

        ``message`` reaches the peer after the last byte has.
        """
        handle = TransferHandle()
        self._handles.add(handle)
        handle.raw = _present(
            self._call(
                Stage.TRANSFER,
                self._nixl.make_prepped_xfer,
                operation.value,
                self._sides[0],
                descriptor_indices(local, self._geometry),
                self._sides[1],
                descriptor_indices(remote, self._peer_geometry),
                message,
            )
        )
        state: str = _present(self._call(Stage.TRANSFER, self._nixl.transfer, handle.raw, message))
        return handle, state

    def state(self, handle: TransferHandle) -> str:
        """Advance everything of this agent and return NIXL's word for the transfer's state."""
        state: str = _present(self._call(Stage.TRANSFER, self._nixl.check_xfer_state, handle.raw))
        return state

    def take_messages(self) -> list[bytes]:
        """Serve what the peer has posted; return the messages that it sent since."""
        arrived = self._call(Stage.TRANSFER, self._nixl.get_new_notifs)
        return [
            message
            for sender, messages in _present(arrived).items()
            if _text(sender) == self._peer_name
            for message in messages
        ]

    def send_message(self, message: bytes) -> None:
        """Send ``message`` to the peer, outside of any transfer."""
        self._call(Stage.TRANSFER, self._nixl.send_notif, self._peer_name, message)

    def release(self, handle: TransferHandle) -> None:
        """Give back a terminal transfer's handle."""
        if handle in self._handles:
            self._handles.discard(handle)
            self._call(Stage.TRANSFER, handle.raw.release)
            handle.raw = None

    def destroy(self) -> bool:
        """End all that this agent posted and cut all that reaches it; return whether it is gone.

        Repeatable. Handles go first, since each keeps the agent alive.
        """
        for handle in self._handles:
            self._let_go(handle.raw)
            handle.raw = None
        self._handles.clear()
        while self._sides:
            self._let_go(self._sides.pop())
        self._nixl = None
        if self._alive() is not None:
            gc.collect()
        return self._alive() is None

    def _let_go(self, raw: Any) -> None:  # noqa: ANN401  # NIXL has no type information
        if raw is None:
            return
        try:
            raw.release()
        except self._foreign:
            return  # Active and not to be cancelled: it dies with its agent.

    def _call(self, stage: Stage, function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401  # as above
        """Call NIXL with its errors mapped.

        The mapped error must not lead to NIXL's objects, by its cause or by its traceback's local
        variables: whoever keeps it would keep the agent alive. For that reason no caller has such
        an object in a local variable.
        """
        try:
            return function(*args)
        except self._foreign as error:
            mapped = ERROR_TABLE[type(error).__name__][stage](f"NIXL: {error}")
        del function, args
        raise mapped


class TransferHandle:
    """NIXL's handle of one transfer, which can be taken away from whoever holds this."""

    def __init__(self) -> None:
        self.raw: Any = None  # Any: NIXL has no type information.


def _present(result: Any) -> Any:  # noqa: ANN401  # NIXL has no type information
    """Return ``result``; NIXL logs some errors and returns None, which must not get through."""
    if result is None:
        raise LocalProtocolError("NIXL returned nothing; its log says why")
    return result


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def registration_rows(geometry: Geometry) -> list[tuple[int, int, int, str]]:
    """Return one (address, bytes, device, "") per region, from its first byte to its last."""
    return [(region.start, region.span_bytes, region.device_index, "") for region in geometry]


def strided_rows(geometry: Geometry) -> npt.NDArray[np.uint64]:
    """Return rows of (address, block bytes, device, stride, count): all blocks, region by region.

    Block ``i`` of region ``r`` has index ``r * num_blocks + i`` in the list that NIXL makes of it.
    """
    return np.array(
        [
            (
                region.start,
                region.block_bytes,
                region.device_index,
                region.stride_bytes,
                region.num_blocks,
            )
            for region in geometry
        ],
        dtype=np.uint64,
    )


def num_descriptors(geometry: Geometry) -> int:
    """Return how many descriptors NIXL makes of ``strided_rows``."""
    return sum(region.num_blocks for region in geometry)


def descriptor_indices(blocks: Indices, geometry: Geometry) -> npt.NDArray[np.int32]:
    """Return the indices of ``blocks`` in every region, region by region.

    Within a region the order of ``blocks`` is kept, so that runs of neighbours stay together.
    """
    first = np.arange(len(geometry), dtype=np.int64) * geometry[0].num_blocks
    return (first[:, None] + blocks[None, :]).reshape(-1).astype(np.int32)
