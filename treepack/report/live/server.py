"""A web server for browsers on this machine alone, which shows a watched run and changes nothing.

    GET /TOKEN/             the page            GET /TOKEN/run.css, run.js, vega.js
    GET /TOKEN/events       server-sent events: snapshot or reset, then steps; see `watch`
    GET /TOKEN/rollouts     the explorer of the newest steps as JSON; with ?step=N of the steps up to N

It listens on 127.0.0.1 only. TOKEN is random, so that other users of the machine cannot guess the address. The name in
the header Host must be one of this machine: if an attacker makes the name of a site point here (DNS rebinding),
the name is a different one. The content policy lets the page load from this server alone, and run no inline script.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from treepack.errors import TreepackError
from treepack.report.live.run_page import live_page, page_scripts
from treepack.report.live.watch import RunWatch, ViewerPlace
from treepack.report.page import page_file, vega

POLL_SECONDS = 0.5
_KEEP_ALIVE_SECONDS = 15  # a comment is sent to a viewer without news, which shows whether it is still there
_TIMEOUT_SECONDS = 60  # for a viewer that reads slowly
HEAD_SECONDS = 5.0  # for a whole request; somebody without the address could otherwise hold all connections
_LAST_NEWS_SECONDS = 2.0  # for viewers to take the last news at the end
_MAX_PORT = 65_535
ADDRESS = re.compile(r"http://127\.0\.0\.1:(?P<port>[0-9]{1,5})/(?P<token>[A-Za-z0-9_-]{22})/")
MAX_CONNECTIONS = 64  # a browser opens up to six; each has a thread
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
JSON, HTML, SCRIPT, STYLE = (
    f"{kind}; charset=utf-8" for kind in ("application/json", "text/html", "text/javascript", "text/css")
)


class RunServer:
    """A server for one watched run; `url` is the address of its page, and `session` names this server in its events."""

    def __init__(self, watch: RunWatch, *, earlier: str = "") -> None:
        """Listen on a port of 127.0.0.1; nothing is answered before `serve`.

        Args:
            watch: the run.
            earlier: an address of such a server, which is taken again if its port is free; else a new one is taken.

        Raises:
            TreepackError: no port is free.
        """
        self.watch, self.token, self.session = watch, secrets.token_urlsafe(16), secrets.token_hex(8)
        self._stopped = threading.Event()
        self._server = self._listen_again(earlier) or self._listen(0)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/{self.token}/"

    def _listen_again(self, earlier: str) -> _LoopbackServer | None:
        match = ADDRESS.fullmatch(earlier)
        if match is None or int(match["port"]) > _MAX_PORT:
            return None
        with suppress(TreepackError):
            server = self._listen(int(match["port"]))
            self.token = match["token"]
            return server
        return None

    def _listen(self, port: int) -> _LoopbackServer:
        try:
            return _LoopbackServer(("127.0.0.1", port), _handler(self))
        except OSError as error:
            raise TreepackError(f"127.0.0.1: no port can be opened ({error.strerror or error})") from error

    def serve(self) -> None:
        """Answer viewers until `stop` is called from another thread or by a signal; then send them the last news.

        Raises:
            TreepackError: metrics.jsonl cannot be read any more.
        """
        thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True)
        thread.start()
        try:
            while not self._stopped.wait(POLL_SECONDS):
                self.watch.poll()
            self.watch.poll()
        finally:
            self._stopped.set()
            self.watch.close()  # its viewers get the last news
            self._server.shutdown()
            self._server.wait_until_idle(_LAST_NEWS_SECONDS)
            self._server.server_close()

    def stop(self) -> None:
        """End `serve`."""
        self._stopped.set()


class _RequestStream(io.RawIOBase):
    """The request of a connection, which has to arrive within `HEAD_SECONDS`, in however many pieces."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._end = connection, time.monotonic() + HEAD_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raise TimeoutError if the time is over."""
        self._connection.settimeout(max(0.001, self._end - time.monotonic()))
        number = self._connection.recv_into(buffer)
        self._connection.settimeout(_TIMEOUT_SECONDS)
        return number


class _LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a viewer that reads nothing would keep the process alive

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # the browser tries again later
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until no connection is open, at most some seconds."""
        end = time.monotonic() + seconds
        for _ in range(MAX_CONNECTIONS):
            self._free.acquire(timeout=max(0.0, end - time.monotonic()))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a viewer that has gone or reads nothing, and print any other one."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _handler(run: RunServer) -> type[BaseHTTPRequestHandler]:
    """Return the handler of the requests to `run`."""
    files: dict[str, tuple[str, Callable[[], str]]] = {
        "": (HTML, lambda: live_page(run.watch)),
        "run.css": (STYLE, lambda: page_file("page.css") + page_file("live/run.css")),
        "run.js": (SCRIPT, page_scripts),
        "vega.js": (SCRIPT, vega),
    }

    class RunHandler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_SECONDS
        server_version, sys_version = "treepack", ""

        def setup(self) -> None:
            super().setup()
            self.rfile = io.BufferedReader(_RequestStream(self.connection))

        def do_GET(self) -> None:
            if not _HOSTS.fullmatch(self.headers.get("Host", "")):
                self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"open the page at its own address\n")
                return
            # Not `urlsplit`, which fails on some paths, such as "http://[".
            path, _, query = self.path.partition("?")
            token, _, name = path.removeprefix("/").partition("/")
            if not secrets.compare_digest(token.encode(), run.token.encode()):
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"nothing is here\n")
            elif name in files:
                kind, make = files[name]
                self._send(HTTPStatus.OK, kind, make().encode("utf-8", "replace"))
            elif name == "events":
                self._send_events()
            elif name == "rollouts":
                self._send_rollouts(parse_qs(query).get("step", [""])[0])
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"nothing is here\n")

        def log_message(self, *_: Any) -> None:
            """Requests are not logged."""

        def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
            self._head(status, kind, {"Content-Length": str(len(content))})
            self.wfile.write(content)

        def _head(self, status: HTTPStatus, kind: str, more: dict[str, str]) -> None:
            self.send_response(status)
            for header, value in {"Content-Type": kind, **_HEADERS, **more}.items():
                self.send_header(header, value)
            self.end_headers()

        def _send_rollouts(self, step: str) -> None:
            if step and not re.fullmatch("[0-9]{1,15}", step):
                self._send(HTTPStatus.BAD_REQUEST, JSON, b'{"error":"the step is not a number"}')
                return
            try:
                self._send(HTTPStatus.OK, JSON, run.watch.rollouts(int(step) if step else None))
            except TreepackError as error:
                self._send(HTTPStatus.NOT_FOUND, JSON, json.dumps({"error": str(error)}).encode())

        def _send_events(self) -> None:
            place = _place_of(self.headers.get("Last-Event-ID", ""), run.session)
            self._head(HTTPStatus.OK, "text/event-stream", {"Connection": "close"})
            while True:
                message = run.watch.wait(place, _KEEP_ALIVE_SECONDS)
                if message is None:
                    self.wfile.write(b": still here\n\n")
                    continue
                place = message.place
                head = f"id: {run.session}-{place.view}-{place.num_steps}\nevent: {message.event}\ndata: "
                self.wfile.write(head.encode() + message.content + b"\n\n")
                if message.is_last:
                    self.wfile.write(b"event: end\ndata: {}\n\n")
                    return

    return RunHandler


def _place_of(event_id: str, session: str) -> ViewerPlace:
    """Return the place of a viewer that connects again, from the id of its last event; the start for any other id."""
    match = re.fullmatch(session + r"-(\d{1,9})-(\d{1,15})", event_id)
    # Version 0 is older than any: the facts are sent in any case.
    return ViewerPlace(int(match[1]), int(match[2])) if match else ViewerPlace()
