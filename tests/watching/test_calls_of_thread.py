"""The calls of another thread, by what that thread says of itself."""

import gc
import subprocess
import sys
import threading
import traceback
from types import SimpleNamespace

import pytest

from labkit.watching import lines
from labkit.watching.lines import calls_of_thread, line_at
from tests.paths import REPO


class Waiting:
    """A thread that waits some calls deep, and notes these calls itself."""

    def __init__(self, depth):
        self.ready, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.go_deeper, args=(depth,))

    def go_deeper(self, depth):
        if depth:
            return self.go_deeper(depth - 1)
        self.calls = [(frame.f_code, number) for frame, number in traceback.walk_stack(sys._getframe())]
        self.ready.set()
        return self.go_on.wait()

    def __enter__(self):
        self.thread.start()
        self.ready.wait()
        return self

    def __exit__(self, *error):
        self.go_on.set()
        self.thread.join()


@pytest.mark.parametrize("depth", [0, 40])
def test_they_are_those_that_it_is_in(depth):
    with Waiting(depth) as waiting:
        found = [(at[0], line_at(at)) for at in calls_of_thread(waiting.thread.ident)]
    n_outside = len(waiting.calls) - 1  # all but the innermost, which has gone on to wait
    assert found[-n_outside:] == waiting.calls[1:]
    assert waiting.calls[0][0] in {code for code, _ in found[:-n_outside]}


def test_a_thread_that_has_ended_is_in_none():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert calls_of_thread(thread.ident) == []


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects):
    usual = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert calls_of_thread(threading.get_ident())
        assert gc.isenabled() == collects
    finally:
        (gc.enable if usual else gc.disable)()


def test_nothing_has_a_frame_when_other_threads_run_on(monkeypatch):
    """It would keep alive what the call had, such as a loader of the epoch before."""

    def n_references():
        frame = sys._current_frames()[waiting.thread.ident]
        return sys.getrefcount(frame)

    def enable():
        seen.append(n_references())
        gc.enable()

    with Waiting(3) as waiting:
        seen = [n_references()]
        monkeypatch.setattr(lines, "gc", SimpleNamespace(isenabled=gc.isenabled, disable=gc.disable, enable=enable))
        calls_of_thread(waiting.thread.ident)
    assert len(set(seen)) == 1


@pytest.mark.exhaustive
def test_threads_that_run_on_meanwhile_neither_crash_nor_hang():
    command = [sys.executable, "-m", "tests.hardening.stress_calls", "--minutes", "0", "--seconds", "4"]
    result = subprocess.run(command, check=False, cwd=REPO, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
