"""HTTP GET over connections that are kept open, with a bounded number of retries."""

import logging
import re
from base64 import b64encode
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import urllib3

from labkit.core import MAX_FILE_VARIABLE, PerProcess, max_file_bytes, strip_credentials

_MAX_WAIT_S = 10  # between two attempts, whatever the server asks for
_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_BLOCK_BYTES = 1 << 20


class Answer(NamedTuple):
    """A server's answer. url: Where the last redirect led."""

    status: int
    headers: Any
    data: bytes
    url: str


class _StripQueries(logging.Filter):
    """urllib3 logs URLs when it retries or is redirected; their queries may hold a signature."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = re.sub(r"\?[^\s'\"]*", "?...", record.getMessage()), ()
        return True


for _name in ("urllib3.connectionpool", "urllib3.poolmanager", "urllib3.util.retry"):
    logging.getLogger(_name).addFilter(_StripQueries())


class HttpClient:
    """A pool of connections in each process.

    Args:
        num_connections: Connections kept open; use as many as there are threads.
        retries: Attempts after the first, on refused connections, truncated or stalled bodies and statuses 408, 429,
            5xx.
        timeout_s: Longest wait for a connection, and for the next byte.
    """

    def __init__(self, num_connections: int = 8, retries: int = 5, timeout_s: float = 30.0):
        self.retries, self._num_connections, self._timeout_s = retries, num_connections, timeout_s
        self._pool = self._make_pool()

    def _make_pool(self) -> PerProcess[urllib3.PoolManager]:
        return PerProcess(
            partial(urllib3.PoolManager, maxsize=self._num_connections, block=True, timeout=self._timeout_s)
        )

    def allow_requests(self, n_at_once: int) -> None:
        """Keep at least so many connections. Those that are open by now are given up."""
        if n_at_once > self._num_connections:
            self._num_connections = n_at_once
            self._pool = self._make_pool()

    def get(self, url: str, start: int | None = None, end: int | None = None) -> Answer:
        """All of `url`, or bytes `start` to `end` (exclusive), read to the end. 404 and 416 are answers, not errors.

        The body may be `labkit.core.max_file_bytes()` long, or as long as the requested range if that is more. It is
        returned as it is stored: if a server compresses it unasked, it stays compressed.

        Raises:
            OSError: no complete answer after all attempts, one that is too long, or another error status; names the URL
                without credentials.
        """
        if start is None or end is None:
            return self._request(url, {}, max_file_bytes())
        limit = max(end - start, max_file_bytes())  # a server without range requests may send the whole file
        return self._request(url, {"Range": f"bytes={start}-{end - 1}"}, limit)

    def probe(self, url: str) -> Answer:
        """The answer to a request for the first byte, without its body: the server may send the whole file."""
        return self._request(url, {"Range": "bytes=0-0"}, None)

    def _request(self, url: str, headers: dict[str, str], limit: int | None) -> Answer:
        """urllib3 retries until an answer begins; an answer that breaks off is retried here."""
        plain_url, own_headers = split_credentials(url)
        retry = urllib3.Retry(
            self.retries, status_forcelist=_TRANSIENT_STATUSES, allowed_methods={"GET"}, backoff_factor=0.1,
            backoff_jitter=0.1, backoff_max=_MAX_WAIT_S, retry_after_max=_MAX_WAIT_S,
        )  # fmt: skip
        while True:
            answer = None
            try:
                answer = self._pool().request(
                    "GET", plain_url, headers={**own_headers, **headers}, retries=retry, preload_content=False
                )
                _check_status(url, answer)
                return Answer(answer.status, answer.headers, _read_body(url, answer, limit), answer.geturl() or "")
            except urllib3.exceptions.HTTPError as error:
                if answer is None or answer.retries is None or not answer.retries.total:
                    cause = getattr(error, "reason", None) or error
                    raise OSError(
                        f"{strip_credentials(url)} gave no complete answer in {self.retries + 1} tries "
                        f"({type(cause).__name__}): check the server and the network, then run again"
                    ) from None  # the chained text would hold the whole URL
                retry = answer.retries.increment("GET", "", error=error)
            finally:
                if answer is not None:
                    answer.close()  # ends the connection, unless a complete answer has released it
            retry.sleep()


def split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """A URL without `user:password@`, and the headers that carry them instead (percent-encoding undone)."""
    parts = urlsplit(url)
    credentials, _, place = parts.netloc.rpartition("@")
    headers = {"Accept-Encoding": "identity"}  # a range counts the stored bytes, not compressed ones
    if credentials:
        headers["Authorization"] = f"Basic {b64encode(unquote(credentials).encode()).decode()}"
    return urlunsplit((parts.scheme, place, parts.path, parts.query, "")), headers


def _check_status(url: str, answer: urllib3.BaseHTTPResponse) -> None:
    if answer.status in (401, 403):
        raise OSError(f"{strip_credentials(url)}: access denied ({answer.status}); check the credentials in the URL")
    if answer.status not in (200, 206, 404, 416):
        raise OSError(f"{strip_credentials(url)} answered {answer.status} {answer.reason}")


def _read_body(url: str, answer: urllib3.BaseHTTPResponse, limit: int | None) -> bytes:
    """The body, of at most `limit` bytes; without a limit, nothing of it. Releases the connection if it can be reused.

    Nothing is decompressed: compressed bytes that nobody asked for may unpack to a thousand times as many.
    """
    if limit is None:
        if answer.status != 200 and len(answer.read(_BLOCK_BYTES, decode_content=False)) < _BLOCK_BYTES:
            answer.release_conn()
        return b""
    length = answer.headers.get("Content-Length", "")
    data = bytearray()
    if not length.isdecimal() or int(length) <= limit:
        while len(data) <= limit and (block := answer.read(_BLOCK_BYTES, decode_content=False)):
            data += block
        if len(data) <= limit:
            answer.release_conn()
            return bytes(data)
    raise OSError(
        f"{strip_credentials(url)} has {length or 'an unknown number of'} bytes, more than the limit of {limit}: "
        f"is it an image? {MAX_FILE_VARIABLE} sets the limit, in MB"
    )
