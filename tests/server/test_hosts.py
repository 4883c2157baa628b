"""The names that a server is called by: which are its own."""

from __future__ import annotations

import pytest

from streamdiff.config import ServeConfig
from streamdiff.server.middleware import HostPolicy
from streamdiff.server.problem import Problem

POLICY = HostPolicy(ServeConfig(host="Studio.local", hosts=["stream.example.org"]))


def status(*hosts: str) -> int:
    try:
        POLICY.check([(b"host", host.encode("latin-1")) for host in hosts])
    except Problem as problem:
        return problem.status
    return 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "localhost:",
            "127.0.0.1",
            "127.8.9.1:80",
            "[::1]",
            "[::1]:8000",
        ),
        *(
            "[::1]:8000",
            "192.0.2.7:8000",
            "[2001:db8::7]",
            "studio.local:9",
            "stream.example.org",
            "Stream.Example.ORG.:443",
        ),
    ],
)
def test_own_names_and_any_address(host: str) -> None:
    assert status(host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "example.org", "127.1", "a" * 5000],
)
def test_names_of_other_servers(host: str) -> None:
    assert status(host) == 421


@pytest.mark.parametrize(
    "hosts",
    [
        *((), ("",), ("localhost", "localhost"), ("::1",), ("[127.0.0.1]",), ("[::g]",), ("[1::2::3]",), ("[::1",)),
        *(("a b",), ("é",), ("localhost:80x",), ("user@localhost",), ("localhost/x",), ("localhost:123456",)),
    ],
)
def test_what_is_no_name_at_all(hosts: tuple[str, ...]) -> None:
    assert status(*hosts) == 400


def test_the_refusal_says_the_way_out() -> None:
    with pytest.raises(Problem, match=r"--allowed-host evil\.example") as refused:
        POLICY.check([(b"host", b"evil.example:8000")])
    assert "serve.hosts" in str(refused.value)
