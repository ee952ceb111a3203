"""GET with kept connections, and retries that end."""

import logging
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import urllib3
from urllib3.util import Retry, Timeout

from labkit.core import MAX_FILE_VARIABLE, PerProcess, max_file_bytes, strip_credentials

_LONGEST_WAIT_S = 10.0  # between two tries, whatever the server asks for
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_BLOCK_BYTES = 1 << 20


class Answer(NamedTuple):
    """What a server said. url: Where the last redirect led."""

    status: int
    headers: Any
    data: bytes
    url: str


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
        self._pool = PerProcess(partial(_make_pool, self.num_connections, self.timeout_s))

    def get(self, url: str, start: int | None = None, end: int | None = None) -> Answer:
        """The answer, read to its end: all of `url`, or bytes `start` to `end` (left out). 404 and 416 are answers.

        Its body may have `labkit.core.limits.max_file_bytes()`, or the bytes asked for where those are more. It is
        taken as it is stored: a server that compresses unasked is not unpacked.

        Raises:
            OSError: no whole answer after all tries, a longer one, or another error status; names the address without
                credentials.
        """
        if start is None:
            return self._ask(url, {}, partial(_whole, url, max_file_bytes()))
        most = max(end - start, max_file_bytes())  # a server without ranges may send all
        return self._ask(url, {"Range": f"bytes={start}-{end - 1}"}, partial(_whole, url, most))

    def probe(self, url: str) -> Answer:
        """The answer to a request for the first byte, its body left: a server without ranges sends the whole file."""
        return self._ask(url, {"Range": "bytes=0-0"}, _unread)

    def _ask(self, url: str, headers: dict[str, str], take: Callable[[urllib3.BaseHTTPResponse], Any]) -> Any:
        """What `take` makes of the answer. urllib3 tries again until there is one; for a cut body that is done here."""
        plain, own_headers = without_credentials(url)
        retry = _retry(self.retries)
        while True:
            answer = None
            try:
                answer = self._pool().request(
                    "GET", plain, headers={**own_headers, **headers}, retries=retry, preload_content=False
                )
                _check_status(url, answer)
                return take(answer)
            except urllib3.exceptions.HTTPError as error:
                retry = _next_try(url, error, answer, self.retries)
            except BaseException:
                if answer is not None:
                    answer.close()
                raise
            retry.sleep()


def without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """The address without `user:password@`, and the headers that carry them instead, `%2F` and its like as `/`."""
    parts = urlsplit(url)
    credentials, _, place = parts.netloc.rpartition("@")
    headers = {"Accept-Encoding": "identity"}  # a range is one of the stored bytes, not of compressed ones
    if credentials:
        headers["Authorization"] = f"Basic {b64encode(unquote(credentials).encode()).decode()}"
    return urlunsplit((parts.scheme, place, parts.path, parts.query, "")), headers


def _check_status(url: str, answer: urllib3.BaseHTTPResponse) -> None:
    if answer.status in (401, 403):
        raise OSError(f"{strip_credentials(url)} is refused ({answer.status}): check the credentials in the address")
    if answer.status not in (200, 206, 404, 416):
        raise OSError(f"{strip_credentials(url)} answered {answer.status} {answer.reason}")


def _next_try(url: str, error: Exception, answer: urllib3.BaseHTTPResponse | None, retries: int) -> Retry:
    """How often to try on, after a body was cut or stalled. Raises OSError where all tries are used."""
    if answer is not None:
        answer.close()
        try:
            return answer.retries.increment("GET", "", error=error)
        except urllib3.exceptions.HTTPError as last:
            error = last
    cause = getattr(error, "reason", None) or error
    raise OSError(
        f"{strip_credentials(url)} gave no whole answer in {retries + 1} tries ({type(cause).__name__}): "
        "check the server and the network, then run again"
    ) from None  # the chained text would hold the whole address


def _whole(url: str, most: int, answer: urllib3.BaseHTTPResponse) -> Answer:
    said = answer.headers.get("Content-Length", "")
    data = bytearray()
    if not said.isdecimal() or int(said) <= most:
        # Not decoded: compressed bytes that nobody asked for may unpack to a thousand times as many.
        while len(data) <= most and (block := answer.read(_BLOCK_BYTES, decode_content=False)):
            data += block
        if len(data) <= most:
            answer.release_conn()
            return Answer(answer.status, answer.headers, bytes(data), answer.geturl() or "")
    answer.close()
    raise OSError(
        f"{strip_credentials(url)} has {said or 'endless'} bytes, more than the limit of {most}: is it an image? "
        f"{MAX_FILE_VARIABLE} sets the limit, in MB"
    )


def _unread(answer: urllib3.BaseHTTPResponse) -> Answer:
    if answer.status == 200 or len(answer.read(_BLOCK_BYTES, decode_content=False)) == _BLOCK_BYTES:
        answer.close()
    answer.release_conn()
    return Answer(answer.status, answer.headers, b"", answer.geturl() or "")


def _retry(retries: int) -> Retry:
    return _BoundedRetry(
        retries, status_forcelist=_TRANSIENT, allowed_methods={"GET"}, backoff_factor=0.1, backoff_jitter=0.1,
        backoff_max=_LONGEST_WAIT_S,
    )  # fmt: skip


def _make_pool(num_connections: int, timeout_s: float) -> urllib3.PoolManager:
    return urllib3.PoolManager(maxsize=num_connections, block=True, timeout=Timeout(timeout_s, timeout_s))
