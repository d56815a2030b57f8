"""The key of the user that the tests run as, and what is signed with it by hand."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import zmq

from kvferry.errors import LocalProtocolError
from kvferry.protocol.codec import derive_curve_keys
from kvferry.protocol.ids import TransferId
from kvferry.protocol.keys import OwnKey, load_user_key
from kvferry.protocol.signing import signature_headers


def own_key() -> OwnKey:
    key = load_user_key(os.environ)
    assert key is not None
    return key


def prove_own_key(socket: zmq.Socket[Any]) -> None:
    """Have a socket reach control ports, before it connects."""
    derive_curve_keys(own_key().secret).prove_to_server(socket)


def signed_body(body: bytes) -> dict[str, str]:
    """The headers that a leg's body goes with; none for a body that names no proper transfer."""
    try:
        return signed(body, json.loads(body)["kv_transfer_params"]["transfer_id"])
    except (ValueError, LookupError, TypeError, LocalProtocolError):
        return {}


def signed(body: bytes, transfer_id: str) -> dict[str, str]:
    return signature_headers(own_key().secret, body, TransferId(transfer_id), time.time())
