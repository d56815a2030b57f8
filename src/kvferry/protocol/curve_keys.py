"""The key pair by which both ends of a control connection prove that they know the cluster key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CurveZMQ key pair in Z85 text."""

    public: bytes
    secret: bytes

    def prove_to_server(self, socket: zmq.Socket[Any]) -> None:
        """Have an unconnected socket reach only who has these keys, too."""
        socket.curve_serverkey = self.public
        self._identify(socket)

    def demand_from_clients(self, socket: zmq.Socket[Any]) -> None:
        """Have an unbound socket talk CurveZMQ; who is let in, an authenticator says."""
        socket.curve_server = True
        self._identify(socket)

    def _identify(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def derive_curve_keys(cluster_key: bytes) -> CurveKeys:
    """Return the key pair that everyone with this cluster key has."""
    raw = hashlib.blake2b(cluster_key, digest_size=32, person=b"kvferry-curve").digest()
    secret = z85.encode(raw)
    return CurveKeys(zmq.curve_public(secret), secret)
