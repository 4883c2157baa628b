"""Tokens and roles: who may watch a session, and who may control it. Knows nothing about HTTP.

The server may have a token for each role, read from files so that none stands in a configuration, a command line or a
log. A session that was opened over the API has two of its own, shown once to who opened it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from streamdiff.atomic_write import open_private, temporary_sibling
from streamdiff.config import ServeConfig
from streamdiff.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_TOKEN_CHARACTERS, MAX_TOKEN_CHARACTERS = 16, 512
_NO_TOKEN_CHARACTER = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
"""What RFC 7230 lets no `token` have. A page can show a token only as a WebSocket subprotocol, which is one: neither
`=` nor `/` of base64 may be in it."""
_MAKE_ONE = 'Make one with: python -c "import secrets; print(secrets.token_urlsafe(32))", or: openssl rand -hex 32'


class Role(IntEnum):
    """What a caller may do; each may do what those before it may."""

    NOBODY = 0
    VIEWER = 1
    CONTROLLER = 2


@dataclass(frozen=True)
class Tokens:
    """One token per role, or None."""

    view: str | None = field(default=None, repr=False)
    control: str | None = field(default=None, repr=False)

    @classmethod
    def fresh(cls) -> Tokens:
        """Two random tokens."""
        return cls(secrets.token_urlsafe(24), secrets.token_urlsafe(24))

    def role_of(self, token: str) -> Role:
        """The role that a token grants. Takes the same time whatever the token is."""
        given = token.encode("utf-8", "replace")
        control = hmac.compare_digest(given, (self.control or "").encode()) and self.control is not None
        view = hmac.compare_digest(given, (self.view or "").encode()) and self.view is not None
        return Role.CONTROLLER if control else Role.VIEWER if view else Role.NOBODY


def read_tokens(config: ServeConfig) -> Tokens:
    """The server's tokens.

    Raises:
        ConfigError: a file that cannot be read, a token of another length or with other characters than tokens have,
            or one to watch without one to steer.
    """
    if config.view_token_file is not None and config.control_token_file is None:
        why = "serve.view_token_file is set, but serve.control_token_file is not: who may watch could steer. Set both."
        raise ConfigError(why, field="serve.view_token_file")
    return Tokens(
        _read(config.view_token_file, "serve.view_token_file"),
        _read(config.control_token_file, "serve.control_token_file"),
    )


def read_snapshot_key(config: ServeConfig) -> bytes:
    """The key that saved sessions are signed with; made, readable by its user only, where the file is not there. Where
    the user's state folder cannot be written to, as in a container, one that holds until the process ends.

    Raises:
        ConfigError: serve.snapshot_key_file cannot be read or made, or has a key of another length.
    """
    given = config.snapshot_key_file
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "streamdiff" / "snapshot.key" if given is None else Path(given).expanduser()
    try:
        if not path.exists():
            _make_snapshot_key(path, parents=given is None)
        key = path.read_bytes().strip()
    except OSError as error:
        if given is None:
            logger.info("Saved sessions are signed with a key of this process: %s: %s", path, error.strerror)
            return secrets.token_bytes(32)
        why = f"serve.snapshot_key_file: {path} cannot be read or made: {error.strerror or error}"
        raise ConfigError(why, field="serve.snapshot_key_file") from error
    if not MIN_TOKEN_CHARACTERS <= len(key) <= MAX_TOKEN_CHARACTERS:
        size = f"{len(key)} bytes; it must have {MIN_TOKEN_CHARACTERS} to {MAX_TOKEN_CHARACTERS}"
        why = f"serve.snapshot_key_file: the key in {path} has {size}. Make one with: openssl rand -hex 32"
        raise ConfigError(why, field="serve.snapshot_key_file")
    return key


def _make_snapshot_key(path: Path, parents: bool) -> None:
    """Of servers that start at once on one path, all use the first one's. Raises OSError."""
    if parents:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with temporary_sibling(path) as temporary:
        with open_private(temporary) as file:
            file.write(secrets.token_hex(32).encode() + b"\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)


def read_setting_file(path: str, key: str, hint: str = "") -> str:
    """The text of the file that the setting `key` names. Raises ConfigError, whose words end with the `hint`."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{key}: {path} cannot be read: {why}{hint}", field=key) from error


def _read(path: str | None, key: str) -> str | None:
    if path is None:
        return None
    token = read_setting_file(path, key, f". Make it: (umask 077; openssl rand -hex 32 > {path})").strip()
    if not MIN_TOKEN_CHARACTERS <= len(token) <= MAX_TOKEN_CHARACTERS:
        why = f"{len(token)} characters; it must have {MIN_TOKEN_CHARACTERS} to {MAX_TOKEN_CHARACTERS}"
        raise ConfigError(f"{key}: the token in {path} has {why}. {_MAKE_ONE}", field=key)
    if wrong := sorted(set(_NO_TOKEN_CHARACTER.findall(token))):
        raise ConfigError(
            f"{key}: the token in {path} has {' '.join(map(repr, wrong[:5]))} in it, which browsers cannot send as a "
            "WebSocket subprotocol; it must be one line of letters, digits and !#$%&'*+-.^_`|~ (of base64: no / and no "
            f"=). {_MAKE_ONE}",
            field=key,
        )
    return token


def role_of(token: str | None, server: Tokens, session: Tokens | None = None) -> Role:
    """Role of a caller with `token` for a session that has tokens `session` (None: the default session).

    The tokens of `server` open every session. Without a token everybody may steer the default session where the server
    has no token, and watch it where it has none to watch. A session with tokens of its own may be watched by everybody
    where the server has no token at all; else that takes one.
    """
    if token is not None:
        return max(server.role_of(token), session.role_of(token) if session else Role.NOBODY)
    if server.view is not None:
        return Role.NOBODY
    if server.control is not None:
        return Role.VIEWER if session is None else Role.NOBODY
    return Role.CONTROLLER if session is None else Role.VIEWER


def link_role(link: str, session: str, now_s: float, signers: Sequence[Tokens]) -> Role:
    """The role that a signed link grants for a session: to watch it until it expires, or none. `link` is
    `EXPIRY.SIGNATURE`: seconds since 1970 and, as hexadecimal digits, HMAC-SHA256 of `view SESSION EXPIRY` under a
    control token of one of the `signers`. `now_s` is wall-clock time."""
    expiry, _, signature = link.partition(".")
    if not re.fullmatch("[0-9]{1,12}", expiry) or int(expiry) <= now_s:
        return Role.NOBODY
    said, given = f"view {session} {expiry}".encode(), signature.encode("utf-8", "replace")
    keys = [signer.control.encode() for signer in signers if signer.control is not None]
    good = [hmac.compare_digest(given, hmac.new(key, said, "sha256").hexdigest().encode()) for key in keys]
    return Role.VIEWER if any(good) else Role.NOBODY
