"""GET with kept connections, and retries that end."""

import logging
import re
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit, urlunsplit

import urllib3
from urllib3.util import Retry, Timeout, make_headers

from labkit.data.blobs import PerProcess

_LONGEST_WAIT_S = 10.0  # between two tries, whatever the server asks for
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


class _WithoutQueries(logging.Filter):
    """urllib3 logs addresses when it tries again or is redirected; a query may hold a signature."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = re.sub(r"\?[^\s'\"]*", "?...", record.getMessage()), ()
        return True


for _name in ("urllib3.connectionpool", "urllib3.poolmanager", "urllib3.util.retry"):
    logging.getLogger(_name).addFilter(_WithoutQueries())


class _BoundedRetry(Retry):
    """A server may name the time of the next try; not a time next week."""

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        after = super().get_retry_after(response)
        return None if after is None else min(after, _LONGEST_WAIT_S)


@dataclass
class HttpClient:
    """A connection pool for each process.

    Args:
        num_connections: Kept open, for as many threads.
        retries: Tries after the first, on refused connections, cut or stalled bodies and statuses 408, 429, 5xx.
        timeout_s: Longest wait for a connection, and for the next byte.
    """

    num_connections: int = 8
    retries: int = 5
    timeout_s: float = 30.0
    _pool: PerProcess = field(init=False, repr=False)

    def __post_init__(self):
        self._pool = PerProcess(partial(_make_pool, self.num_connections, self.retries, self.timeout_s))

    def get(self, url: str, start: int | None = None, end: int | None = None) -> urllib3.BaseHTTPResponse:
        """The answer, read to its end: all of `url`, or bytes `start` to `end` (left out). 404 and 416 are answers.

        Raises:
            OSError: no whole answer after all tries, or another error status; names the address without credentials.
        """
        return self._ask(url, {} if start is None else {"Range": f"bytes={start}-{end - 1}"})

    def probe(self, url: str) -> urllib3.BaseHTTPResponse:
        """The answer to a request for the first byte, its body left: a server without ranges sends the whole file."""
        answer = self._ask(url, {"Range": "bytes=0-0"}, preload_content=False)
        if answer.status == 200:
            answer.close()
        else:
            answer.drain_conn()
        return answer

    def _ask(self, url: str, headers: dict[str, str], **options: bool) -> urllib3.BaseHTTPResponse:
        plain, own_headers = _without_credentials(url)
        try:
            answer = self._pool().request("GET", plain, headers={**own_headers, **headers}, **options)
        except urllib3.exceptions.HTTPError as error:
            cause = getattr(error, "reason", None) or error
            raise OSError(
                f"{shown(url)} gave no whole answer in {self.retries + 1} tries ({type(cause).__name__}): "
                "check the server and the network, then run again"
            ) from None  # the chained text would hold the whole address
        if answer.status in (401, 403):
            raise OSError(f"{shown(url)} is refused ({answer.status}): check the credentials in the address")
        if answer.status not in (200, 206, 404, 416):
            raise OSError(f"{shown(url)} answered {answer.status} {answer.reason}")
        return answer


def shown(url: str) -> str:
    """An address fit for messages: without user, password and signed query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """The address without `user:password@`, and the headers that carry them instead."""
    parts = urlsplit(url)
    credentials, _, place = parts.netloc.rpartition("@")
    headers = {"Accept-Encoding": "identity"}  # a range is one of the stored bytes, not of compressed ones
    if credentials:
        headers.update(make_headers(basic_auth=credentials))
    return urlunsplit((parts.scheme, place, parts.path, parts.query, "")), headers


def _make_pool(num_connections: int, retries: int, timeout_s: float) -> urllib3.PoolManager:
    retry = _BoundedRetry(
        retries, status_forcelist=_TRANSIENT, allowed_methods={"GET"}, backoff_factor=0.1, backoff_jitter=0.1,
        backoff_max=_LONGEST_WAIT_S,
    )  # fmt: skip
    return urllib3.PoolManager(
        maxsize=num_connections, block=True, retries=retry, timeout=Timeout(timeout_s, timeout_s)
    )
