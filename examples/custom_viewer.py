"""Serves custom_viewer.html and passes its requests for the stream on, so that both have one address.

    streamdiff serve                       # in one terminal
    python examples/custom_viewer.py       # in another; then open http://127.0.0.1:8080/

The video itself does not pass through here: it goes from streamdiff to the browser over UDP.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

PAGE = Path(__file__).with_name("custom_viewer.html")
ASKED = ("Content-Type", "Host", "Origin")  # by the last two streamdiff knows its own pages from strangers'
PASSED_ON = ("Content-Type", "Location", "Retry-After")


def make_server(port: int, streamdiff: str) -> ThreadingHTTPServer:
    """A server on this machine for the page, in front of the streamdiff at the address `streamdiff`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200 if self.path == "/" else 404, {"Content-Type": "text/html"}, PAGE.read_bytes())

        def do_POST(self) -> None:
            self.pass_on()

        def do_DELETE(self) -> None:
            self.pass_on()

        def pass_on(self) -> None:
            if not self.path.startswith("/whep"):
                return self.answer(404, {}, b"")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: self.headers[name] for name in ASKED if name in self.headers}
            request = Request(streamdiff + self.path, body or None, headers, method=self.command)
            try:
                with urlopen(request, timeout=15) as reply:
                    self.answer(reply.status, dict(reply.headers), reply.read())
            except HTTPError as error:
                self.answer(error.code, dict(error.headers), error.read())
            except URLError as error:
                self.answer(502, {}, f"streamdiff at {streamdiff} does not answer: {error.reason}.".encode())

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            wanted = {name.lower() for name in PASSED_ON}
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() in wanted:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with make_server(8080, address.rstrip("/")) as server:
        print(f"open http://127.0.0.1:{server.server_port}/ (the stream comes from {address})")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("bye")
