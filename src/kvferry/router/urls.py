"""How an instance's URL is written: one form for each, so that it can name the instance. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvferry.errors import ConfigError


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
