"""HTTPS from the server itself: a page, a viewer, a certificate that is renewed, and files that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from streamdiff.config import Config, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.server import http_server, main
from streamdiff.server.http_server import Certificate, HttpServer
from tests.server.test_main import REAL
from tests.server.test_restart import serving

pytestmark = pytest.mark.slow


def write_pair(folder: Path, password: bytes | None = None) -> tuple[str, str]:
    """A new certificate for localhost, signed by its own key; the paths of both."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    kept = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, kept))
    return str(cert_file), str(key_file)


def trusting(cert: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=cert)


async def test_the_server_speaks_https_and_says_so(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path)
    async with serving("--tls-cert", cert, "--tls-key", key) as (_, untrusting):
        url = str(untrusting.base_url).replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        with httpx.Client(base_url=url, verify=trusting(cert), timeout=20) as http:
            assert "streamdiff" in http.get("/").text
            change = http.patch("/api/sessions/default", headers={"Origin": url.rstrip("/")}, json={"prompt": "blue"})
            assert change.status_code == 200, "the page is known as the server's own"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"), timeout=20)


async def test_a_renewed_certificate_is_used_and_a_half_replaced_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CERTIFICATE_TICKS", 1)
    cert, key = write_pair(tmp_path)
    first = Path(cert).read_text()
    write_pair(tmp_path / "next")
    second = (tmp_path / "next" / "cert.pem").read_text()

    async def application(scope: object, receive: object, send: object) -> None: ...

    with main.listen("127.0.0.1", 0) as listener:
        server = HttpServer(application, ServeConfig(tls_cert=cert, tls_key=key))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]

        async def shown() -> str:
            return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=20)

        assert (await shown()).split() == first.split()
        (tmp_path / "next" / "cert.pem").replace(cert)
        refreshed = asyncio.Event()
        plain = server._certificate.refresh  # type: ignore[union-attr]
        monkeypatch.setattr(server._certificate, "refresh", lambda: (plain(), refreshed.set()))
        await asyncio.wait_for(refreshed.wait(), 20)
        assert (await shown()).split() == first.split(), "with the old key the new certificate is of no use"
        (tmp_path / "next" / "key.pem").replace(key)
        refreshed.clear()
        await asyncio.wait_for(refreshed.wait(), 20)
        assert (await shown()).split() == second.split()
        server.should_exit = True
        await serving


def test_files_that_cannot_be_used_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cert, key = write_pair(tmp_path)
    other, locked = write_pair(tmp_path / "other"), write_pair(tmp_path / "locked", b"secret")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for pair, field in (
        ((str(tmp_path / "none"), key), "serve.tls_cert"),
        ((cert, str(tmp_path / "none")), "serve.tls_key"),
        ((cert, other[1]), "serve.tls_cert"),
        ((str(text), key), "serve.tls_cert"),
        (locked, "serve.tls_cert"),
    ):
        with pytest.raises(ConfigError) as caught:
            Certificate(*pair)
        assert caught.value.field == field, pair
    assert main.run(Config(serve=ServeConfig(port=0, tls_cert=str(text), tls_key=key))) == 2
    assert "serve.tls_cert" in capfd.readouterr().err


async def test_where_descriptors_are_used_up_it_is_logged_once(tmp_path: Path) -> None:
    """TLS handshakes are among no limit."""
    cert, key = write_pair(tmp_path)
    options = ("--tls-cert", cert, "--tls-key", key)
    async with serving(*options, python=REAL, descriptors=(96, 96)) as (server, http):
        with contextlib.ExitStack() as silent:
            for _ in range(200):
                silent.enter_context(socket.create_connection(("127.0.0.1", http.base_url.port), timeout=20))
            while len(os.listdir(f"/proc/{server.process.pid}/fd")) < 96:
                assert server.process.poll() is None
            while "LimitNOFILE" not in server.complaints:
                await asyncio.sleep(0.01)
        assert httpx.get(f"{http.base_url}healthz", timeout=20, verify=False).status_code == 200
    assert server.complaints.count("LimitNOFILE") == 1 and server.complaints.count("\n") < 6
