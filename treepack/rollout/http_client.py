"""JSON over HTTP, with every failure as one sentence: temporary ones as TemporaryError, the others as EngineError."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from treepack.errors import TreepackError, install_hint
from treepack.rollout.engine import EngineError, TemporaryError

if TYPE_CHECKING:
    import aiohttp

# Time-outs, overload, and gateways in front of a server that starts or restarts. A dying vLLM engine answers 500.
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
SECONDS_TO_CONNECT = 30.0
LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer: `status`, and the JSON value of the body (None if it is no JSON)."""

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
        return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 3] + "..."


class Client:
    """A connection pool for one server."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """Check the address. Needs a running event loop.

        Raises:
            TreepackError: `url` is no address of a server, or aiohttp is not installed.
        """
        try:
            import aiohttp
        except ImportError as error:
            raise TreepackError(f"{url}: a server needs the package aiohttp; {install_hint('rollout')}") from error
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", url):
            raise TreepackError(f"{url}: is no address of a server; expected one such as http://localhost:8000")
        # Users copy the address of an OpenAI client, which ends in /v1.
        self.url = url.rstrip("/").removesuffix("/v1")
        self._failures = (aiohttp.ClientError, ConnectionError, TimeoutError)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._session: aiohttp.ClientSession = aiohttp.ClientSession(
            headers=headers,
            # The caller limits the requests and the time of each; a second limit here would hide the first.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=SECONDS_TO_CONNECT),
        )

    async def get(self, path: str) -> Answer:
        """Return the answer to GET; raises TemporaryError if there is none."""
        return await self._send("GET", path, None)

    async def post(self, path: str, body: Any) -> Answer:
        """Return the answer to POST with the JSON `body`; raises TemporaryError if there is none."""
        return await self._send("POST", path, orjson.dumps(body))

    async def _send(self, method: str, path: str, data: bytes | None) -> Answer:
        try:
            async with self._session.request(method, self.url + path, data=data) as response:
                content, status = await response.read(), response.status
        except self._failures as error:
            reason = str(error) or type(error).__name__
            raise TemporaryError(f"{self.url}: no answer ({reason}); check that the server runs there") from error
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError:
            value = None
        return Answer(status, value, content.decode(errors="replace"))

    def checked(self, answer: Answer, path: str) -> Any:
        """Return the JSON value of a successful answer.

        Raises:
            TemporaryError: the server is overloaded, or not ready.
            EngineError: the server refused the request.
        """
        if answer.status == 200 and answer.value is not None:
            return answer.value
        if answer.status in TEMPORARY:
            raise TemporaryError(f"{self.url}{path}: status {answer.status} ({answer.message}); check the server's log")
        if answer.status in (401, 403):
            raise EngineError(f"{self.url}{path}: the server refuses the request ({answer.message}); check the API key")
        raise EngineError(f"{self.url}{path}: status {answer.status} ({answer.message}); check the request's options")

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        await self._session.close()
