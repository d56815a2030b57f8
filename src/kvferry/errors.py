"""Every exception that kvferry raises.

FerryError
├── ConfigError                  an option, file or environment value is wrong
├── RequestError                 a client's request is wrong (becomes an HTTP 4xx)
├── ProtocolError
│   ├── LocalProtocolError       we broke the rules: a bug in kvferry
│   ├── RemoteProtocolError      the peer broke them: malformed, oversized, out of order
│   ├── IncompatiblePeerError    the peer is another model, layout or protocol version
│   └── LeaseNotFoundError       the lease is unknown, released or past its time
├── TransferError
│   ├── PeerUnreachableError     no connection, or it broke
│   └── TransferFailedError      a posted transfer ended in an error
├── CapacityError                not enough blocks, or a cap was reached
├── EngineError                  the engine failed
├── ClusterError                 a process of a deployment did not start, or died
└── MeasurementError             a benchmark could not measure what it says it measures

The blame is in the type: *local* is ours, *remote* is the peer's.
"""

from __future__ import annotations


class FerryError(Exception):
    """Base of all errors that kvferry raises."""


class ConfigError(FerryError):
    """An option, a file or an environment value is wrong; the message names it and the remedy."""


class RequestError(FerryError):
    """A client's request cannot be served as it is.

    ``param`` names the offending field, ``code`` is OpenAI's error code, ``status`` the
    HTTP status.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status

    @classmethod
    def invalid_value(cls, param: str, message: str) -> RequestError:
        """Return the error for a field that has the right type and a value that cannot be."""
        return cls(message, param=param, code="invalid_value")


class ProtocolError(FerryError):
    """The exchange between two instances went wrong."""


class LocalProtocolError(ProtocolError):
    """This process broke the protocol: a bug in kvferry."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: malformed, oversized or out of order."""


class IncompatiblePeerError(ProtocolError):
    """The peer serves another model, layout or protocol version.

    ``field`` names the first differing field, ``ours`` and ``theirs`` its two values; ``remedy``
    says what makes them alike.
    """

    def __init__(self, field: str, ours: object, theirs: object, remedy: str = "") -> None:
        found = f"{field} differs: ours is {ours!r}, the peer's is {theirs!r}"
        super().__init__(f"{found}: {remedy}" if remedy else found)
        self.field = field
        self.ours = ours
        self.theirs = theirs
        self.remedy = remedy


class LeaseNotFoundError(ProtocolError):
    """A lease is unknown, was released or is past its time; its blocks may hold anything."""


class TransferError(FerryError):
    """KV could not be moved."""


class PeerUnreachableError(TransferError):
    """There is no connection to the peer, or it broke."""


class TransferFailedError(TransferError):
    """A posted transfer ended in an error."""


class CapacityError(FerryError):
    """There are not enough blocks, or a cap was reached."""


class EngineError(FerryError):
    """The engine itself failed."""


class ClusterError(FerryError):
    """A process of a deployment did not start in time, or died; the message names it."""


class MeasurementError(FerryError):
    """A deployment answered otherwise than a measurement needs; the message says how."""
