"""Which kind of engine a router drives, and where its instances can be asked who they are. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.errors import ConfigError
from kvferry.options import REQUIRED, option
from kvferry.protocol.params import is_port

_Value = TypeVar("_Value")
_ENDPOINT = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.%]+\]|[^\[\]:/\s@]+):[0-9]{1,5}")
_NIXL = re.compile(
    r"(?P<engine_id>[^@\s]{1,256})@(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\[\]:/\s@]+):(?P<port>[0-9]{1,5})"
    r"(?:/tp(?P<tp_size>[1-9][0-9]{0,3}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of what the instances are. Raises ``ConfigError``."""

    kind: EngineKind = option(
        EngineKind.AUTO,
        "What all instances are: kvferry's own engine; vLLM with FerryConnector; vLLM with its "
        "NixlConnector (pull) or its NixlPushConnector. auto: as --control or --nixl tells, else "
        "kvferry.",
        flag="--engine",
        choices=tuple(EngineKind),
    )
    control_addresses: Mapping[str, str] = option(
        REQUIRED,
        "The control port of an instance given by --prefill or --decode, for vLLM with "
        "FerryConnector; repeat for more. Without it an instance takes part in pulls only. With a "
        "cluster key both sides must have the same.",
        flag="--control",
        metavar="URL=tcp://HOST:PORT",
        parse=lambda texts: parse_control_addresses(texts),
        default_factory=dict,
    )
    """By instance URL, of those that do not answer ``GET /kvferry/instance``."""
    nixl_addresses: Mapping[str, NixlAddress] = option(
        REQUIRED,
        "For vllm-nixl-push: the engine_id in the kv-transfer-config of a prefill instance, and "
        "the host and port of its side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT), with /tpN "
        "after them for N tensor-parallel ranks; repeat for more. Without it decode is asked only "
        "after prefill has answered.",
        flag="--nixl",
        metavar="URL=ENGINE_ID@HOST:PORT",
        parse=lambda texts: parse_nixl_addresses(texts),
        default_factory=dict,
    )
    """By the URL of a prefill instance: with these both legs of a push go at once."""

    def __post_init__(self) -> None:
        if self.control_addresses and self.nixl_addresses:
            raise ConfigError("give --control or --nixl, not both: a router drives one kind")
        kind = self.resolved_kind
        if self.control_addresses and kind not in (EngineKind.KVFERRY, EngineKind.VLLM):
            raise ConfigError(f"--control is not for --engine {kind}, which has no control port")
        _require_different(self.control_addresses)
        if self.nixl_addresses and kind is not EngineKind.VLLM_NIXL_PUSH:
            raise ConfigError(f"--nixl is for --engine {EngineKind.VLLM_NIXL_PUSH} only")

    @property
    def resolved_kind(self) -> EngineKind:
        """The kind, never ``AUTO``."""
        if self.kind is not EngineKind.AUTO:
            return self.kind
        if self.nixl_addresses:
            return EngineKind.VLLM_NIXL_PUSH
        return EngineKind.VLLM if self.control_addresses else EngineKind.KVFERRY

    @property
    def uses_key(self) -> bool:
        """Whether such instances know kvferry's keys."""
        return self.resolved_kind in (EngineKind.KVFERRY, EngineKind.VLLM)

    def check_urls(self, prefill_urls: Collection[str], decode_urls: Collection[str]) -> None:
        """Raise ``ConfigError`` for an address of an instance that the router does not have."""
        for url in self.control_addresses:
            if url not in prefill_urls and url not in decode_urls:
                raise ConfigError(f"--control: {url} is not among --prefill and --decode")
        for url in self.nixl_addresses:
            if url not in prefill_urls:
                raise ConfigError(f"--nixl: {url} is not among --prefill")


def parse_control_addresses(texts: Iterable[str]) -> dict[str, str]:
    """Return the control ports in ``URL=tcp://HOST:PORT`` texts. Raises ``ConfigError``."""
    return _by_url("control", texts, _control_address)


def parse_nixl_addresses(texts: Iterable[str]) -> dict[str, NixlAddress]:
    """Return the addresses in ``URL=ENGINE_ID@HOST:PORT[/tpN]`` texts. Raises ``ConfigError``."""
    return _by_url("nixl", texts, _nixl_address)


def _by_url(option: str, texts: Iterable[str], parse: Callable[[str], _Value]) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    for text in texts:
        url_text, separator, value_text = text.partition("=")
        if not separator:
            raise ConfigError(f"--{option}: {text!r} has no instance URL before a '='")
        url = normalise_url(url_text)
        if url in found:
            raise ConfigError(f"--{option}: {url} is given twice")
        found[url] = parse(value_text.strip())
    return found


def _require_different(control_addresses: Mapping[str, str]) -> None:
    url_of: dict[str, str] = {}
    for url, address in control_addresses.items():
        other = url_of.setdefault(address, url)
        if other != url:
            raise ConfigError(
                f"--control: {address} is given for {other} and for {url}; "
                "each instance has a control port of its own"
            )


def _control_address(text: str) -> str:
    if not _ENDPOINT.fullmatch(text) or not is_port(text.rpartition(":")[2]):
        raise ConfigError(f"--control: {text!r} is not of the form tcp://HOST:PORT")
    return text


def _nixl_address(text: str) -> NixlAddress:
    match = _NIXL.fullmatch(text)
    if match is None or not is_port(match["port"]):
        raise ConfigError(f"--nixl: {text!r} is not of the form ENGINE_ID@HOST:PORT or .../tpN")
    host = match["host"].removeprefix("[").removesuffix("]")
    return NixlAddress(match["engine_id"], host, int(match["port"]), int(match["tp_size"] or 1))


def normalise_url(text: str) -> str:
    """Return an instance's base URL without a trailing slash.

    Raises ``ConfigError`` for anything but ``http(s)://host[:port][/path]``.
    """
    wrong = f"instance URL {text!r} is not of the form http://host:port"
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{wrong}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(wrong)
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{wrong}: no user, query or fragment is allowed")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return (
        f"{parts.scheme}://{host}{f':{port}' if port is not None else ''}{parts.path.rstrip('/')}"
    )
