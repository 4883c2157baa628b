"""The names that a server is called by: which are its own."""

from __future__ import annotations

import pytest

from streamdiff.config import ServeConfig
from streamdiff.server.middleware import HostPolicy
from streamdiff.server.problem import Problem

POLICY = HostPolicy(ServeConfig(host="Studio.local", hosts=["stream.example.org"]))
OWN = "localhost LOCALHOST:8000 localhost. localhost: 127.0.0.1 127.8.9.1:80 [::1] [::1]:8000 192.0.2.7:8000"
OWN += " [2001:db8::7] studio.local:9 stream.example.org Stream.Example.ORG.:443"
OTHERS = f"evil.example localhost.evil.example 127.0.0.1.evil.example:8000 example.org 127.1 {'a' * 5000}"
NO_NAMES = "::1 [127.0.0.1] [::g] [1::2::3] [::1 é localhost:80x user@localhost localhost/x localhost:123456"


@pytest.mark.parametrize(
    ("status", "hosts"),
    [(200, (host,)) for host in OWN.split()]
    + [(421, (host,)) for host in OTHERS.split()]
    + [(400, (host,)) for host in ("", "a b", *NO_NAMES.split())]
    + [(400, ()), (400, ("localhost", "localhost"))],
)
def test_own_names_and_addresses_alone_are_answered(status: int, hosts: tuple[str, ...]) -> None:
    try:
        POLICY.check([(b"host", host.encode("latin-1")) for host in hosts])
    except Problem as problem:
        assert (problem.status, problem.code) == (status, "host")
    else:
        assert status == 200
