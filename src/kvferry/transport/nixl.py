"""Moves bytes by NIXL. The only module that knows it, and the only place its errors pass through.

No progress thread: it would eat a core, so a peer's transfers advance in ``progress``. One agent
per link, because NIXL cannot cancel a posted transfer: destroying the agent that posted it (or the
one that it reaches) is what ends it, buffered bytes included.
"""

from __future__ import annotations

import enum
import gc
import importlib
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

from kvferry.errors import (
    CapacityError,
    ConfigError,
    FerryError,
    LocalProtocolError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferFailedError,
)
from kvferry.transport.base import MemoryRegion, TransferStatus, Transport
from kvferry.transport.geometry import (
    Geometry,
    Indices,
    describe,
    require_matching,
)
from kvferry.transport.host import ProcessIdentity, this_process
from kvferry.transport.link import LinkState, Operation, TrackedLink, Work
from kvferry.transport.metadata import decode_metadata, encode_metadata
from kvferry.transport.nixl_descriptors import (
    MAX_DESCRIPTORS,
    NixlMetadata,
    descriptor_indices,
    num_descriptors,
    registration_rows,
    strided_rows,
)
from kvferry.transport.nixl_options import NixlOptions, engine_options
from kvferry.transport.peer_watch import FarewellPage, PeerWatch
from kvferry.transport.shared_memory import prefault

NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Import names of NIXL's builds, in order of preference."""
_LOCAL_SIDE = "NIXL_INIT_AGENT"
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


class _Stage(enum.IntEnum):
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


class _Agent:
    """One NIXL agent with our memory registered, for one peer.

    Nothing outside may keep a reference to NIXL's objects, or the agent would outlive ``destroy``.
    """

    def __init__(self, nixl: ModuleType, options: NixlOptions, geometry: Geometry) -> None:
        self.name = f"kvferry-{os.getpid()}-{secrets.token_hex(8)}"
        bindings: Any = importlib.import_module(f"{nixl.__name__}._bindings")
        self._foreign = tuple(getattr(bindings, name) for name in ERROR_TABLE)
        self._geometry = geometry
        self._peer_geometry: Geometry = ()
        self._sides: list[Any] = []  # Any: NIXL has no type information.
        self._handles: set[_Handle] = set()
        configuration = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._nixl: Any = self._call(_Stage.SET_UP, nixl.nixl_agent, self.name, configuration)
        self._alive = weakref.ref(self._nixl.agent)
        self._call(
            _Stage.SET_UP, self._nixl.create_backend, options.backend, engine_options(options)
        )
        kind = geometry[0].kind.value
        rows = registration_rows(geometry)
        _present(self._call(_Stage.SET_UP, self._nixl.register_memory, rows, kind))
        self.metadata: bytes = _present(self._call(_Stage.SET_UP, self._nixl.get_agent_metadata))

    def attach(self, theirs: NixlMetadata) -> None:
        """Load the peer's agent and prepare the descriptors of all blocks of both sides."""
        stage = _Stage.CONNECT
        loaded = _present(self._call(stage, self._nixl.add_remote_agent, theirs.agent_metadata))
        name = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
        if name != theirs.agent_name:
            raise RemoteProtocolError("the peer's agent goes by another name than it says")
        self._call(stage, self._nixl.make_connection, name)
        self._peer_geometry = theirs.regions
        for owner, geometry in ((_LOCAL_SIDE, self._geometry), (name, theirs.regions)):
            rows, kind = strided_rows(geometry), geometry[0].kind.value
            self._sides.append(
                _present(self._call(stage, self._nixl.prep_xfer_dlist, owner, rows, kind))
            )

    def post(self, operation: Operation, local: Indices, remote: Indices) -> tuple[_Handle, str]:
        """Post a transfer; return its handle and NIXL's word for its state."""
        handle = _Handle()
        self._handles.add(handle)
        handle.raw = _present(
            self._call(
                _Stage.TRANSFER,
                self._nixl.make_prepped_xfer,
                operation.value,
                self._sides[0],
                descriptor_indices(local, self._geometry),
                self._sides[1],
                descriptor_indices(remote, self._peer_geometry),
            )
        )
        state: str = _present(self._call(_Stage.TRANSFER, self._nixl.transfer, handle.raw))
        return handle, state

    def state(self, handle: _Handle) -> str:
        """Advance everything of this agent and return NIXL's word for the transfer's state."""
        state: str = _present(self._call(_Stage.TRANSFER, self._nixl.check_xfer_state, handle.raw))
        return state

    def progress(self) -> None:
        """Serve what the peer has posted."""
        self._call(_Stage.TRANSFER, self._nixl.get_new_notifs)

    def release(self, handle: _Handle) -> None:
        """Give back a terminal transfer's handle."""
        if handle in self._handles:
            self._handles.discard(handle)
            self._call(_Stage.TRANSFER, handle.raw.release)
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

    def _call(self, stage: _Stage, function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401  # as above
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


class _Handle:
    """NIXL's handle of one transfer, which can be taken away from whoever holds this."""

    def __init__(self) -> None:
        self.raw: Any = None  # Any: NIXL has no type information.


def _present(result: Any) -> Any:  # noqa: ANN401  # NIXL has no type information
    """Return ``result``; NIXL logs some errors and returns None, which must not get through."""
    if result is None:
        raise LocalProtocolError("NIXL returned nothing; its log says why")
    return result


class _NixlWork(Work):
    def __init__(self, agent: _Agent, handle: _Handle, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def advance(self) -> TransferStatus:
        if self._state == "PROC":
            self._state = self._agent.state(self._handle)
        match self._state:
            case "DONE":
                return TransferStatus.DONE
            case "PROC":
                return TransferStatus.IN_PROGRESS
            case _:
                return TransferStatus.ERROR

    def free(self) -> None:
        self._agent.release(self._handle)


class NixlLink(TrackedLink):
    """The local end of one connection, with an agent of its own."""

    def __init__(
        self, peer_name: str, transport: NixlTransport, agent: _Agent, *, peer_writes: bool
    ) -> None:
        super().__init__(peer_name, transport.geometry, peer_writes=peer_writes)
        self._backend = transport.options.backend
        self._process = transport.process
        self._agent = agent
        self._farewell = FarewellPage()
        self._metadata = encode_metadata(
            NixlMetadata(
                self._backend,
                agent.name,
                agent.metadata,
                transport.geometry,
                self._process,
                self._farewell.reference,
            )
        )

    @property
    def local_metadata(self) -> bytes:
        """What the peer needs to connect to this end."""
        return self._metadata

    def progress(self) -> None:
        """Serve what the peer has posted; an error ends the link, which its next use tells."""
        if self.state is not LinkState.CONNECTED:
            return
        try:
            self._agent.progress()
        except FerryError:
            self._break()

    def _attach(self, peer_metadata: bytes) -> None:
        theirs = decode_metadata(peer_metadata, NixlMetadata)
        if theirs.backend != self._backend:
            raise RemoteProtocolError(f"the peer uses {theirs.backend}, we use {self._backend}")
        if theirs.agent_name == self._agent.name:
            raise RemoteProtocolError("the peer sent our own metadata")
        require_matching(self._geometry, theirs.regions)
        if num_descriptors(theirs.regions) > MAX_DESCRIPTORS:
            raise RemoteProtocolError("the peer has too many blocks")
        watch = PeerWatch(self._process, theirs.process)
        if watch.is_dead():
            raise PeerUnreachableError(f"{self.peer_name}: process {theirs.process.pid} is dead")
        if watch.is_beside:
            watch.try_map_farewell(theirs.farewell)
        self._watch = watch
        self._peer_geometry = theirs.regions
        self._agent.attach(theirs)

    def _post(self, operation: Operation, local: Indices, remote: Indices) -> Work:
        handle, state = self._agent.post(operation, local, remote)
        if state not in ("DONE", "PROC"):
            raise TransferFailedError(f"NIXL refused a {operation} to {self.peer_name}")
        return _NixlWork(self._agent, handle, state)

    def _end(self) -> bool:
        return self._agent.destroy()

    def _say_done(self) -> None:
        self._farewell.say_done()


class NixlTransport(Transport):
    """Moves bytes between any memory that NIXL's backend can register."""

    name: ClassVar[str] = "nixl"

    def __init__(
        self, options: NixlOptions | None = None, process: ProcessIdentity | None = None
    ) -> None:
        """``process`` is who we say we are; tests pass another host's."""
        self.options = options or NixlOptions()
        self.process = process or this_process()
        self.geometry: Geometry = ()
        self._module = load_nixl()
        self._spare: _Agent | None = None
        self._links: list[NixlLink] = []
        self._memory: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> memoryview:
        """Return anonymous memory, in huge pages where the kernel gives them."""
        try:
            memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"{num_bytes} bytes of memory: {error}") from error
        _advise_huge_pages(memory)
        prefault(memory)
        self._memory.append(memory)
        return memoryview(memory)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Describe ``regions`` and make a first agent, so that a wrong option fails here.

        Raises ``ConfigError``.
        """
        if self.geometry:
            raise LocalProtocolError("register may be called once")
        geometry = describe(regions)
        if num_descriptors(geometry) > MAX_DESCRIPTORS:
            raise ConfigError(f"more than {MAX_DESCRIPTORS} runs of memory")
        self._spare = _Agent(self._module, self.options, geometry)
        self.geometry = geometry

    def open_link(self, peer_name: str, *, peer_writes: bool = True) -> NixlLink:
        """Return a link with an agent of its own."""
        if not self.geometry:
            raise LocalProtocolError("open_link before register")
        agent, self._spare = self._spare, None
        if agent is None:
            agent = _Agent(self._module, self.options, self.geometry)
        link = NixlLink(peer_name, self, agent, peer_writes=peer_writes)
        self._links = [known for known in self._links if not known.is_quiet()] + [link]
        return link

    def close(self) -> None:
        """Disconnect every link and drop our hold on the memory."""
        for link in self._links:
            link.disconnect()
        if self._spare is not None:
            self._spare.destroy()
            self._spare = None
        self._memory.clear()


def _advise_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return  # A kernel without them; ordinary pages do.
