"""JSON over HTTP, with every failure as one sentence: temporary ones as TemporaryError, the others as EngineError.

An answer is read in chunks, and refused as soon as it is longer than its request can need. Packed answers are unpacked
here in chunks too, so a small body that unpacks to gigabytes is refused as early.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from treepack.errors import TreepackError, install_hint
from treepack.rollout.engine import EngineError, TemporaryError

if TYPE_CHECKING:
    import aiohttp

# Time-outs, overload, and gateways in front of a server that starts or restarts. A dying vLLM engine answers 500.
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
_SECONDS_TO_CONNECT = 30.0
_LONGEST_MESSAGE = 300
LONGEST_ANSWER = 64_000_000  # bytes without any continuation: fields of a server, and the prompt if it comes back

_READABLE = 10_000  # characters of an answer that may be shown
_CHUNK_BYTES = 1 << 20  # bytes that are unpacked at once
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class _HttpAnswer:
    """An HTTP answer: `status`, the JSON value of the body (None if it is not JSON), and the beginning of its text."""

    status: int
    value: Any
    text: str

    @property
    def message(self) -> str:
        """The server's own words about an error, on one line and shortened."""
        words = self.value
        # {"error": {"message": "..."}}, {"error": "..."}, {"message": "..."}, {"detail": "..."}
        for key in ("error", "message", "detail"):
            if isinstance(words, dict) and key in words:
                words = words[key]
        text = words if isinstance(words, str) else self.text
        line = re.sub(r"\s+", " ", text).strip()
        return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 3] + "..."


class HttpClient:
    """A connection pool for one server."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Check the address. Needs a running event loop.

        Raises:
            TreepackError: `url` is not the address of a server, or aiohttp is not installed.
        """
        try:
            import aiohttp
        except ImportError as error:
            raise TreepackError(f"{url}: a server needs the package aiohttp; {install_hint('rollout')}") from error
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
            raise TreepackError(f"{url}: is not the address of a server; expected one such as http://localhost:8000")
        # Users copy the address of an OpenAI client, which ends in /v1.
        self.url = url.rstrip("/").removesuffix("/v1")
        self._failures = (aiohttp.ClientError, ConnectionError, TimeoutError)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._session: aiohttp.ClientSession = aiohttp.ClientSession(
            headers=headers | {"Accept-Encoding": "gzip, deflate"},
            auto_decompress=False,  # see _unpacked
            # The caller limits the requests and the time of each; a second limit here would hide the first.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_SECONDS_TO_CONNECT),
        )

    async def get(self, path: str) -> _HttpAnswer:
        """Return the answer to GET.

        Raises:
            TemporaryError: there is none.
            EngineError: it is longer than `LONGEST_ANSWER`, or the address is invalid.
        """
        return await self._send("GET", path, None, LONGEST_ANSWER)

    async def post(self, path: str, body: Any, *, longest: int = LONGEST_ANSWER) -> _HttpAnswer:
        """Return the answer to POST with the JSON `body`.

        Raises:
            TemporaryError: there is none.
            EngineError: it is longer than `longest` bytes, or the address is invalid.
        """
        return await self._send("POST", path, orjson.dumps(body), longest)

    async def _send(self, method: str, path: str, data: bytes | None, longest: int) -> _HttpAnswer:
        try:
            async with self._session.request(method, self.url + path, data=data) as response:
                content, status = await self._read(response, path, longest), response.status
        except self._failures as error:
            reason = str(error) or type(error).__name__
            raise TemporaryError(f"{self.url}: no answer ({reason}); check that the server runs there") from error
        except ValueError as error:  # of a name of a host, a port or a key that HTTP cannot send
            raise EngineError(f"{self.url}: cannot be reached ({error}); check the address and the API key") from error
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError:
            value = None
        return _HttpAnswer(status, value, content[:_READABLE].decode(errors="replace"))

    async def _read(self, response: aiohttp.ClientResponse, path: str, longest: int) -> bytes:
        """Return the unpacked body of an answer.

        Raises:
            EngineError: it is longer than `longest` bytes, or packed in a way that was not asked for.
        """
        packing = response.headers.get("Content-Encoding", "identity").strip().lower()
        if packing not in ("identity", "", "gzip", "x-gzip", "deflate"):
            raise EngineError(
                f"{self.url}{path}: the answer is packed with {packing[:40]}, which was not asked for; check the proxy "
                "before the server"
            )
        content = bytearray()
        try:
            async for chunk in _chunks(response, is_packed=packing not in ("identity", "")):
                content += chunk
                if len(content) > longest:
                    raise EngineError(
                        f"{self.url}{path}: the answer is longer than {longest / 1e6:,.0f} MB, more than its request "
                        "can need; check the server, and a proxy before it"
                    )
        except zlib.error as error:
            raise EngineError(
                f"{self.url}{path}: the answer cannot be unpacked ({error}); check the proxy before the server"
            ) from error
        return bytes(content)

    def checked(self, answer: _HttpAnswer, path: str) -> Any:
        """Return the JSON value of a successful answer.

        Raises:
            TemporaryError: the server is overloaded, or not ready.
            EngineError: the server refused the request.
        """
        if answer.status == 200 and answer.value is not None:
            return answer.value
        if answer.status in _TEMPORARY:
            raise TemporaryError(f"{self.url}{path}: status {answer.status} ({answer.message}); check the server's log")
        if answer.status in (401, 403):
            raise EngineError(f"{self.url}{path}: the server refuses the request ({answer.message}); check the API key")
        if answer.status == 200:
            raise EngineError(
                f"{self.url}{path}: the answer is not JSON, in which NaN and Infinity are not allowed either "
                f"({answer.message}); check the server's log, and a proxy before it"
            )
        raise EngineError(f"{self.url}{path}: status {answer.status} ({answer.message}); check the request's options")

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        await self._session.close()


async def _chunks(response: aiohttp.ClientResponse, *, is_packed: bool) -> AsyncIterator[bytes]:
    """Yield the body of an answer in bounded chunks, unpacked."""
    stream: Any = None
    async for chunk in response.content.iter_any():
        if not is_packed:
            yield chunk
            continue
        if stream is None:
            # "deflate" is with a header of zlib in the standard, and without one by some servers.
            has_header = chunk[0] & 0xF == zlib.DEFLATED or chunk[:1] == b"\x1f"
            stream = zlib.decompressobj(_GZIP_OR_ZLIB if has_header else -zlib.MAX_WBITS)
        while chunk:
            yield stream.decompress(chunk, _CHUNK_BYTES)
            chunk = stream.unconsumed_tail
    if stream is not None:
        yield stream.flush()
