"""A real S3 server on this machine (moto's), and a proxy before it that injects faults.

client --HTTP--> Proxy --HTTP--> moto
                 `fault` may answer in moto's place, cut the connection, or wait
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

CUT = 0  # instead of a status: close the connection without an answer
LOST = -1  # forward the request, and then close the connection without an answer

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "2",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

# Called with the method and the path of a request; returns None to forward it, or a status.
Fault = Callable[[str, str], int | None]


@dataclass
class Store:
    """A bucket of the server. `client` is boto3's, and goes to the server without the proxy."""

    client: Any
    bucket: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    downloads: list[tuple[str, int]] = field(default_factory=list)  # path and bytes of each answer to a GET
    fault: Fault = lambda method, path: None

    def address(self, name: str = "") -> str:
        return f"s3://{self.bucket}/{name}".rstrip("/")

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def read(self, name: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        return content

    def write(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=name, Body=content)

    def upload(self, folder: Path, name: str) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.write(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())


@contextmanager
def running_store(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Store]:
    """Start a server, and let AWS_ENDPOINT_URL and the credentials of the environment lead to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TREEPACK_CACHE", str(cache))
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    # The objects of moto belong to this process, not to a server: every test has a bucket of its own.
    bucket = f"bucket-{os.urandom(4).hex()}"
    client.create_bucket(Bucket=bucket)
    store = Store(client, bucket)
    proxy = _Proxy(store, f"{host}:{port}")
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield store
    finally:
        proxy.stop()
        server.stop()


class _Proxy:
    def __init__(self, store: Store, target: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size)
                store.requests.append((self.command, self.path))
                status = store.fault(self.command, self.path)
                if status == CUT:
                    self.close_connection = True
                    return
                if status not in (None, LOST):
                    code = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}[status]
                    error = f"<Error><Code>{code}</Code><Message>made by this test</Message></Error>"
                    self._answer(status, {"Content-Type": "application/xml"}, error.encode())
                    return
                connection = http.client.HTTPConnection(target, timeout=60)
                skipped = ("connection", "expect")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                content = response.read()
                connection.close()
                if self.command == "GET":
                    store.downloads.append((self.path, len(content)))
                if status == LOST:
                    self.close_connection = True
                    return
                self._answer(response.status, dict(response.getheaders()), content)

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                is_head = self.command == "HEAD"
                for name, value in headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "date", "server") and (
                        is_head or name.lower() != "content-length"
                    ):
                        self.send_header(name, value)
                if not is_head:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not is_head:
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 (names of the base class)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
