"""API keys: who asks, what share of the engine is theirs, and what they may ask for.

Owns the file of keys and the comparison with what a client sends. Does not know HTTP beyond the `Authorization` header.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.config import HttpConfig
from jaxserve.errors import ConfigError, Forbidden, Unauthorized
from jaxserve.from_mapping import from_mapping
from jaxserve.request import MAX_PRIORITY, MIN_PRIORITY, PRIORITY_NAMES

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]{1,512}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key.

    Attributes:
        label: names the key in metrics, and the tenant whose share its requests use.
        weight: its share against other keys' while both have requests waiting.
        priority: the most urgent that its requests may have and, where that is later than the usual one, what they have if
            they do not say; None for any.
        admin: whether it may call what changes the server for everyone.
    """

    label: str
    key: str = field(repr=False)
    weight: float = 1.0
    priority: Any = None
    admin: bool = False

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.label):
            raise ConfigError(f"label must be up to 64 letters, digits, dots, dashes and underscores, found {self.label!r}")
        if not _KEY.fullmatch(self.key):
            raise ConfigError(f"the key of {self.label!r} must be 1 to 512 printable ASCII characters without spaces")
        if not 0.0 < self.weight < math.inf:
            raise ConfigError(f"the weight of {self.label!r} must be above 0, found {self.weight}")
        object.__setattr__(self, "priority", self._priority_number())

    def _priority_number(self) -> int | None:
        value = PRIORITY_NAMES.get(self.priority, self.priority) if isinstance(self.priority, str) else self.priority
        if value is not None and not (type(value) is int and MIN_PRIORITY <= value <= MAX_PRIORITY):
            names = ", ".join(map(repr, PRIORITY_NAMES))
            raise ConfigError(
                f"the priority of {self.label!r} must be {names} or an integer from {MIN_PRIORITY} to {MAX_PRIORITY}, "
                f"found {self.priority!r}"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever sent a request. The defaults are of a server without keys, where everyone may do everything."""

    label: str = ""
    weight: float = 1.0
    priority: int | None = None
    admin: bool = True

    def require_admin(self) -> None:
        """Raise `Forbidden` unless the key is an administrator's."""
        if not self.admin:
            raise Forbidden(f"the API key {self.label!r} may not do this; it takes one with admin = true")


class KeyRing:
    """All keys of a server. Where there are no API keys, everyone is let in, though not as an administrator.

    Args:
        admin_key: whoever has it is an administrator, and nothing else; "" for none.
    """

    def __init__(self, keys: Iterable[ApiKey] = (), *, admin_key: str = "") -> None:
        self._admin_digest = _digest(admin_key) if admin_key else None
        keys = list(keys)
        for name in ("label", "key"):
            values = [getattr(key, name) for key in keys]
            repeated = [key.label for key in keys if values.count(getattr(key, name)) > 1]
            if repeated:
                raise ConfigError(f"two API keys have the same {name}: see {', '.join(map(repr, sorted(set(repeated))))}")
        self._callers = [
            (_digest(key.key), Caller(label=key.label, weight=key.weight, priority=key.priority, admin=key.admin))
            for key in keys
        ]

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def has_keys(self) -> bool:
        """Whether there is any key, an administrator's alone or others."""
        return bool(self._callers) or self._admin_digest is not None

    def identify(self, authorization: str | None) -> Caller:
        """Whose key `authorization`, a header's value, has. Takes as long for a wrong key as for any other.

        Raises:
            Unauthorized: it has none, or one that is not here.
        """
        if not self._callers:
            return Caller()
        digest = _bearer_digest(authorization)
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthorized("the API key is not known to this server")
        return found[0]

    def named(self, label: str) -> Caller | None:
        """Whoever has the key with that label now; everyone, where there are no keys, is called ""."""
        if not self._callers:
            return None if label else Caller()
        return next((caller for _, caller in self._callers if caller.label == label), None)

    def require_admin(self, authorization: str | None) -> None:
        """Check that `authorization`, a header's value, has the key of an administrator.

        Raises:
            Unauthorized: it has none, or one that is not here.
            Forbidden: it has another's, or nobody is an administrator here.
        """
        if self._admin_digest is None and not self._callers:
            raise Forbidden("nobody is an administrator of this server: it was started without --admin-key or API keys")
        if self._admin_digest is not None and hmac.compare_digest(self._admin_digest, _bearer_digest(authorization)):
            return
        if not self._callers:
            raise Unauthorized("the key is not this server's admin key")
        self.identify(authorization).require_admin()


def _bearer_digest(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("an API key is needed: send the header `Authorization: Bearer KEY`")
    return _digest(key.strip())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def load_keys(config: HttpConfig) -> KeyRing:
    """The keys of `api_key`, which is an administrator's and is called "default", and of `api_keys_file`.

    Raises:
        ConfigError: the file cannot be read, or a key in it cannot be used.
    """
    keys = [ApiKey(label="default", key=config.api_key, admin=True)] if config.api_key else []
    if config.api_keys_file:
        keys += _read_keys(Path(config.api_keys_file))
    return KeyRing(keys, admin_key=config.admin_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeysFile:
    keys: Any = ()


def _read_keys(path: Path) -> list[ApiKey]:
    where = f"api_keys_file {path}"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None
    tables = from_mapping(_KeysFile, values, where=where).keys
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{where} must have a [[keys]] table for each key")
    return [_read_key(table, f"{where}: key {number}") for number, table in enumerate(tables, 1)]


def _read_key(table: dict[str, Any], where: str) -> ApiKey:
    missing = [name for name in ("label", "key") if name not in table]
    if missing:
        raise ConfigError(f"{where} has no {missing[0]!r}")
    try:
        key: ApiKey = from_mapping(ApiKey, table, where=where)
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(where) else f"{where}: {message}") from None
    return key
