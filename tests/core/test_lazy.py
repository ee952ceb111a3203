"""Values made once in each process, whatever forks and threads do."""

import copy
import os
import pickle
import random
import threading
import time
from functools import partial

import pytest

from labkit.core.lazy import Lazy, PerProcess
from tests.children import in_children


def pid_and_noise() -> tuple[int, float]:
    return os.getpid(), random.SystemRandom().random()


def slowly(pause: threading.Event, made: list) -> float:
    pause.wait(10)
    made.append(random.SystemRandom().random())
    return made[-1]


def in_child(function, start_method: str = "fork"):
    (result,) = in_children(start_method, function, ())
    return result


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_value_for_each_process(start_method, used_before):
    value = PerProcess(pid_and_noise)
    if used_before:
        assert value() == value()
        assert value()[0] == os.getpid()
    assert in_child(value, start_method)[0] != os.getpid()
    assert value()[0] == os.getpid()


def test_a_value_that_forks_keep():
    value = Lazy(pid_and_noise)
    assert in_child(value, "fork")[0] != os.getpid()  # there it was used for the first time
    made = value()
    assert made == value() == in_child(value, "fork")
    assert made[0] == os.getpid()
    assert in_child(value, "spawn")[0] != os.getpid()


@pytest.mark.parametrize("kind", [Lazy, PerProcess])
def test_threads_share_one_value(kind):
    pause, made = threading.Event(), []
    value = kind(partial(slowly, pause, made))
    got: list[float] = []
    threads = [threading.Thread(target=lambda: got.append(value())) for _ in range(20)]
    for thread in threads:
        thread.start()
    pause.set()
    for thread in threads:
        thread.join()
    assert got == made * 20
    assert len(made) == 1


@pytest.mark.parametrize(("kind", "owner"), [(Lazy, None), (PerProcess, None), (PerProcess, -1)])
def test_a_fork_while_another_thread_makes_the_value(kind, owner):
    """The child must not wait for a lock whose holder it does not have."""
    parent, entered, release = os.getpid(), threading.Event(), threading.Event()

    def make() -> int:
        if os.getpid() == parent:
            entered.set()
            release.wait(30)
        return os.getpid()

    value = kind(make)
    value._owner = owner  # -1: made in an ancestor, of which this process is a fork
    thread = threading.Thread(target=value)
    thread.start()
    entered.wait(10)
    child = os.fork()
    if not child:
        os._exit(0 if value() == os.getpid() else 1)
    assert status_within(child, 20) == 0
    release.set()
    thread.join()
    assert value() == parent


def status_within(child: int, seconds: float) -> int | None:
    """The exit status, or None for a child that had to be killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_a_failure_is_not_kept():
    answers = iter([OSError("not yet"), 5])

    def make() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    value = PerProcess(make)
    with pytest.raises(OSError, match="not yet"):
        value()
    assert value() == value() == 5


@pytest.mark.parametrize("kind", [Lazy, PerProcess])
@pytest.mark.parametrize("copied", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_copies_make_their_own(kind, copied):
    value = kind(pid_and_noise)
    assert copied(value)() != value()
    assert type(copied(value)) is kind
