"""Values made once in each process, whatever forks and threads do."""

import copy
import multiprocessing
import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from labkit.util.process import Lazy, PerProcess
from tests.children import in_children


def pid_and_noise() -> tuple[int, float]:
    return os.getpid(), random.SystemRandom().random()


def in_child(function, start_method: str):
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
    value = kind(lambda: pause.wait(10) and (made.append(object()) or made[-1]))
    with ThreadPoolExecutor(20) as threads:
        got = [threads.submit(value) for _ in range(20)]
        pause.set()
    assert len(made) == 1
    assert {future.result() for future in got} == set(made)


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
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(value() != os.getpid()))
    child.start()
    child.join(20)
    child.kill()
    child.join()
    assert child.exitcode == 0
    release.set()
    thread.join()
    assert value() == parent


def test_a_failure_is_not_kept():
    value = PerProcess(Mock(side_effect=[OSError("not yet"), 5]))
    with pytest.raises(OSError, match="not yet"):
        value()
    assert value() == value() == 5


@pytest.mark.parametrize("kind", [Lazy, PerProcess])
@pytest.mark.parametrize("copied", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_copies_make_their_own(kind, copied):
    value = kind(pid_and_noise)
    assert copied(value)() != value()
    assert type(copied(value)) is kind
