"""GET from a server that fails in every way: what is retried, for how long, and what is reported."""

import logging
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit import HttpStore
from tests.scripted_server import ScriptedServer, cut, drop, noise, stall, status

KEY, PATH = "a.jpg", "/p/a.jpg"
DATA = random.Random(0).randbytes(10_000)


@pytest.fixture(autouse=True)
def _photo(server):
    server.files[PATH] = DATA


def make_get(server: ScriptedServer, **options) -> Callable[[], bytes]:
    """Read the photo from a store that gives up soon."""
    store = HttpStore(f"{server.url}/p", **{"retries": 2, "timeout_s": 5.0, **options})
    return lambda: store.read(KEY)


def test_connections_are_kept(server):
    get = make_get(server)
    assert [get() for _ in range(20)] == [DATA] * 20
    server.script[PATH] = [status(404)]
    with pytest.raises(KeyError):
        get()
    get()
    assert (len(server.asked), server.connections) == (22, 1)


def test_threads_have_connections_of_their_own(server):
    get = make_get(server, num_connections=3)
    with ThreadPoolExecutor(8) as pool:
        assert {future.result() for future in [pool.submit(get) for _ in range(100)]} == {DATA}
    assert 1 <= server.connections <= 3


@pytest.mark.parametrize(("allowed", "expected"), [(6, 6), (1, 3)])
def test_more_connections_when_they_are_asked_for(server, allowed, expected):
    store, meet = HttpStore(f"{server.url}/p", num_connections=3), threading.Barrier(expected, timeout=20)
    store.allow_requests(allowed)
    server.script[PATH] = [lambda handler: meet.wait() + 1 and handler.answer(handler.whole())] * 12
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(store.read, [KEY] * 12)) == {DATA}
    assert server.connections == expected


def test_a_connection_that_the_server_closed_is_opened_again(server):
    get = make_get(server, retries=0)

    def close_after(handler):
        handler.answer(handler.whole())
        handler.close_connection = True

    for _ in range(3):
        server.script[PATH] = [close_after]
        get()
        time.sleep(0.05)  # until it has reached this end
    assert get() == DATA


TRANSIENT = [*map(status, (500, 502, 503, 504, 408)), status(429, Retry_After="0"), cut, drop, noise]


@pytest.mark.parametrize("fault", TRANSIENT)
def test_transient_faults_are_retried_a_number_of_times(server, fault):
    server.script[PATH] = [fault] * 2
    assert make_get(server)() == DATA
    assert len(server.asked) == 3
    server.script[PATH] = [fault] * 9
    said = rf"{server.url}{PATH} gave no complete answer in 3 tries \(\w+\): check the server"
    with pytest.raises(OSError, match=said):
        make_get(server)()
    assert len(server.asked) == 6


def test_a_stalled_body_is_given_up(server):
    server.script[PATH] = [stall]
    assert make_get(server, timeout_s=0.3)() == DATA
    server.script[PATH] = [stall] * 9
    with pytest.raises(OSError, match=r"gave no complete answer in 2 tries \(ReadTimeoutError\)"):
        make_get(server, timeout_s=0.2, retries=1)()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(OSError, match=f"{url}/a.jpg gave no complete answer in 2 tries"):
        HttpStore(url, retries=1).read(KEY)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The seconds of each wait, which is not waited."""
    waits = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waits.append)
    return waits


@pytest.mark.parametrize(("retry_after", "longest"), [("1000000", 10), ("Fri, 31 Dec 2100 23:59:59 GMT", 10), ("2", 2)])
def test_a_server_may_ask_for_a_bounded_wait(server, waits, retry_after, longest):
    server.script[PATH] = [status(503, Retry_After=retry_after)] * 2
    assert make_get(server)() == DATA
    assert waits == [longest] * 2


def test_waits_grow_and_are_bounded(server, waits):
    server.script[PATH] = [status(500)] * 12
    make_get(server, retries=12)()
    assert len(waits) >= 10
    assert max(waits) == 10
    assert all(later > earlier for earlier, later in zip(waits, waits[2:], strict=False) if earlier < 10)


@pytest.mark.parametrize("code", [400, 418, 501, 204, 401, 403])
def test_other_statuses_are_errors_at_once(server, code):
    server.script[PATH] = [lambda handler: handler.say(code)]
    said = rf": access denied \({code}\); check the credentials" if code in (401, 403) else f" answered {code}"
    with pytest.raises(OSError, match=PATH + said):
        make_get(server)()
    assert len(server.asked) == 1


def test_redirects_are_followed(server):
    server.files["/elsewhere/b.jpg"] = b"moved"
    server.script[PATH] = [status(302, Location="/elsewhere/b.jpg")]
    assert make_get(server)() == b"moved"
    server.script[PATH] = [status(302, Location=PATH)] * 9
    with pytest.raises(OSError, match=f"{PATH} gave no complete answer in 3 tries"):
        make_get(server)()


@pytest.mark.parametrize(
    "fault",
    [*(status(code) for code in (400, 403, 500)), cut, drop, noise, status(302, Location=f"{PATH}?sig=s1gnature")],
)
def test_no_error_or_log_holds_a_secret(server, caplog, fault):
    """But they are sent where they belong."""
    caplog.set_level(logging.INFO)
    url = f"{server.url}/p?sig=s1gnature#fr4gment".replace("//", "//me:pa55word@")
    server.script[PATH] = [fault] * 2
    with pytest.raises(OSError) as failure:
        HttpStore(url, retries=1).read(KEY)
    texts = "".join(traceback.format_exception(failure.value)) + repr(failure.value) + caplog.text
    assert [secret for secret in ("pa55word", "s1gnature", "fr4gment") if secret in texts] == []
    assert server.asked[0] == (f"{PATH}?sig=s1gnature", None)
    assert server.authorization[0] == "Basic bWU6cGE1NXdvcmQ="


def test_credentials_do_not_go_to_other_hosts(server):
    server.files["/elsewhere/b.jpg"] = b"moved"
    server.script[PATH] = [status(302, Location=server.url.replace("127.0.0.1", "localhost") + "/elsewhere/b.jpg")]
    assert HttpStore(server.url.replace("//", "//me:pa55word@") + "/p").read(KEY) == b"moved"
    assert [bool(sent) for sent in server.authorization] == [True, False]
