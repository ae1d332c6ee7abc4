"""The certificate that the server shows, from files.

Owns what can be wrong with them. Does not know sockets.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from jaxserve.config import HttpConfig
from jaxserve.errors import ConfigError


def load_tls(config: HttpConfig) -> ssl.SSLContext | None:
    """TLS with `certfile`, which has the private key too where there is no `keyfile`; None without them.

    Raises:
        ConfigError: a file cannot be read, is not PEM, is encrypted, or the key is another certificate's.
    """
    if not config.certfile:
        if config.keyfile:
            raise ConfigError(f"keyfile ({config.keyfile}) needs certfile, the certificate that goes with it")
        return None
    for name in ("certfile", "keyfile"):
        if path := getattr(config, name):
            _check_readable(name, Path(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.certfile, config.keyfile or None, password=_refuse_password)
    except ssl.SSLError as error:
        key = config.keyfile or config.certfile
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"keyfile {key}: the key does not belong to the certificate in {config.certfile}") from None
        raise ConfigError(
            f"certfile {config.certfile} and key {key}: not a certificate chain and its private key in PEM ({error.reason})"
        ) from None
    return context


def _check_readable(name: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from None


def _refuse_password() -> str:
    raise ConfigError("keyfile: the private key is encrypted; decrypt it first (openssl pkey -in KEY -out PLAIN_KEY)")
