"""A small server with the part of the interface of Google Cloud Storage that gcsfs needs for small objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


@dataclass
class Bucket:
    """Objects by name: content and metadata."""

    objects: dict[str, tuple[bytes, dict[str, Any]]] = field(default_factory=dict)
    generation: int = 0
    lock: Lock = field(default_factory=Lock)

    def entry(self, name: str) -> dict[str, Any]:
        content, about = self.objects[name]
        return {"kind": "storage#object", "bucket": "bucket", "name": name, "size": str(len(content)), **about}


@contextmanager
def running_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Serve one bucket, `gs://bucket`, to which STORAGE_EMULATOR_HOST leads."""
    bucket = Bucket()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            name = unquote(url.path.partition("/b/bucket/o")[2]).removeprefix("/")
            if "/b/bucket/" not in url.path:
                self._answer(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
            elif self.command == "POST":
                self._write(query, body)
            elif not name:
                self._answer(200, self._list(query))
            elif name not in bucket.objects:
                self._answer(404, {"error": {"code": 404, "message": "No such object"}})
            elif self.command == "DELETE":
                del bucket.objects[name]
                self._answer(204, None)
            else:
                self._answer(200, bucket.objects[name][0] if query.get("alt") == "media" else bucket.entry(name))

        def _write(self, query: dict[str, str], body: bytes) -> None:
            # --==0== header, blank line, JSON, --==0== header, blank line, content, --==0==--
            _, first, rest = body.split(b"--==0==", 2)
            about = json.loads(first.partition(b"\n\n")[2])
            content = rest.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")
            with bucket.lock:
                if query.get("ifGenerationMatch") == "0" and about["name"] in bucket.objects:
                    self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
                    return
                bucket.generation += 1
                facts = {"generation": str(bucket.generation), "metadata": about.get("metadata") or {}}
                bucket.objects[about["name"]] = content, facts
            self._answer(200, bucket.entry(about["name"]))

        def _list(self, query: dict[str, str]) -> dict[str, Any]:
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
            names = sorted(name for name in bucket.objects if name.startswith(prefix))
            inner = {name for name in names if delimiter and delimiter in name[len(prefix) :]}
            folders = sorted({prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter for name in inner})
            items = [bucket.entry(name) for name in names if name not in inner]
            return {"kind": "storage#objects", "items": items, "prefixes": folders}

        def _answer(self, status: int, body: Any) -> None:
            content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/octet-stream" if body is content else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _serve  # noqa: N815 (names of the base class)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
