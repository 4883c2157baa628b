"""The certificate of a server that speaks HTTPS itself, read again when its files change. Knows nothing about HTTP."""

from __future__ import annotations

import logging
import os
import ssl

from streamdiff.errors import ConfigError

logger = logging.getLogger(__name__)


class Certificate:
    """A certificate chain and its key, PEM files. `context` is what connections are made with."""

    def __init__(self, cert: str, key: str) -> None:
        """
        Raises:
            ConfigError: a file that cannot be read or is no PEM, a key with a password, or that of another certificate.
        """
        self._cert, self._key = cert, key
        self._seen = self._stamps()
        self.context = self._loaded()

    def refresh(self) -> None:
        """Where the files have changed: new connections get the new certificate. One that cannot be used, as while
        somebody is replacing the files, is told in the log and changes nothing. Mutates: context."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._loaded()  # apart, since a pair that does not fit would spoil the context in use
            self.context.load_cert_chain(self._cert, self._key, _no_password)
        except (ConfigError, OSError) as error:
            logger.warning("The certificate stays as it was: %s", error)
        else:
            logger.info("New connections get the certificate that is in %s now.", self._cert)

    def _loaded(self) -> ssl.SSLContext:
        for name, path in (("tls_cert", self._cert), ("tls_key", self._key)):
            if not os.access(path, os.R_OK):
                raise ConfigError(f"serve.{name}: {path} does not exist, or cannot be read")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._cert, self._key, _no_password)
        except (ssl.SSLError, OSError) as error:
            why = "the key is that of another certificate" if "MISMATCH" in str(error) else "one of them is no PEM file"
            raise ConfigError(
                f"serve.tls_cert {self._cert} with serve.tls_key {self._key} cannot be used: {why}, or the key has a "
                "password. Give the certificate with its chain, and its key without a password."
            ) from error
        return context

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What changes with a file, of both."""
        return tuple(map(_stamp, (self._cert, self._key)))


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:  # it is not there, or its folder cannot be looked into at the moment
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _no_password() -> str:
    """Without it OpenSSL would ask for one at the terminal."""
    return ""
