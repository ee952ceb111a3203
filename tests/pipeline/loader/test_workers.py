"""Workers: what is said when one dies, Ctrl-C at any moment, and one thread in each."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
import torch

import labkit as lk
from labkit.errors import WorkerDied
from labkit.loading.torch_loader import worker_context
from tests.loading import Numbers, config, eventually, indices, script_in_session, session_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file


def once(path: Path, harm):
    """Does harm at sample 9, unless it was done already."""

    def action(index: int) -> None:
        if index == 9 and not path.exists():
            path.touch()
            harm()

    return action


def die_of(number: int):
    def die():
        faulthandler.disable()  # pytest's own report would stand amid the results
        os.kill(os.getpid(), number)

    return die


HARM = {
    "killed": (die_of(signal.SIGKILL), "SIGKILL.*memory.*fewer workers"),
    "exits": (lambda: os._exit(3), "exit status 3.*stderr"),
    "crashes": (die_of(signal.SIGABRT), "SIGABRT.*native code"),
    "bus error": (die_of(signal.SIGBUS), "SIGBUS.*--shm-size"),
}


def assert_dies(iterate, said: str, within_s: float = 10.0) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=said):
        iterate()
    assert time.monotonic() - start < within_s
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("harm", "said"), HARM.values(), ids=HARM)
def test_a_worker_that_dies_amid_an_epoch(tmp_path, harm, said, persistent):
    dataset = Numbers(40, once(tmp_path / "done", harm))
    loader = lk.make_loader(dataset, config(persistent_workers=persistent))
    assert_dies(lambda: indices(loader), said)
    assert indices(loader) == list(range(40))


def slow(index: int) -> None:
    time.sleep(0.05)


def kill_one() -> None:
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def test_a_worker_killed_while_its_batch_is_waited_for():
    loader = lk.make_loader(Numbers(40, lambda index: time.sleep(0.4 if index > 20 else 0)), config())
    killer = threading.Timer(0.5, kill_one)
    killer.start()
    assert_dies(lambda: indices(loader), "SIGKILL")
    killer.join()


def test_a_worker_killed_between_epochs():
    loader = lk.make_loader(Numbers(40), config(persistent_workers=True))
    indices(loader)
    kill_one()
    time.sleep(0.3)  # torch's own handler would raise here, wherever the main thread is
    assert_dies(lambda: indices(loader), "SIGKILL")
    assert indices(loader) == list(range(40))


def test_a_worker_killed_while_the_consumer_works():
    loader = lk.make_loader(Numbers(80, slow), config())
    running = iter(loader)
    next(running)
    kill_one()
    time.sleep(0.3)
    assert_dies(lambda: list(running), "SIGKILL")
    assert list(running) == []


def test_a_worker_killed_while_another_thread_iterates():
    loader, seen = lk.make_loader(Numbers(40, slow), config()), []

    def iterate():
        try:
            for _ in loader:
                kill_one()
                time.sleep(0.2)
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=iterate)
    thread.start()
    thread.join(15)  # here torch's own handler would raise
    assert [type(error) for error in seen] == [WorkerDied]
    assert "SIGKILL" in str(seen[0])


@pytest.mark.parametrize("persistent", [True, False])
def test_an_interrupt_that_is_caught_leaves_no_worker(persistent):
    """As in a notebook's kernel, which lives on."""
    dataset = Numbers(40, lambda index: time.sleep(0.1))
    loader = lk.make_loader(dataset, config(persistent_workers=persistent))
    running = iter(loader)
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert multiprocessing.active_children() == []
    dataset.action = id
    assert indices(loader) == list(range(40))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_an_interrupt_while_workers_start(start_method, monkeypatch):
    def start_and_interrupt(process):
        start(process)
        os.kill(os.getpid(), signal.SIGINT)

    start = multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_and_interrupt)
    loader = lk.make_loader(Numbers(), config(start_method=start_method))
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


INTERRUPTED = """
import multiprocessing, os, sys, time
import torch
import labkit as lk

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.tensor([index])

if __name__ == "__main__":
    multiprocessing.current_process()._config["semprefix"] = f"/of-{os.getpid()}"  # names of semaphores
    moment, method, persistent = sys.argv[1:]
    settings = dict(num_workers=2, oversubscribe=True, start_method=method, persistent_workers=persistent == "True")
    loader = lk.make_loader(Slow(), lk.LoaderConfig(batch_size=20 if moment == "waiting" else 1, **settings))
    if moment == "starting":
        print("now", flush=True)
    for _ in loader:
        print("now", flush=True)
        if moment == "body":
            time.sleep(60)
"""


INTERRUPTS = [
    ("starting", "fork", False, 0.0), ("starting", "fork", True, 0.03), ("waiting", "fork", False, 0.3),
    ("waiting", "fork", True, 0.3), ("body", "fork", False, 0.1), ("body", "fork", True, 0.1),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("moment", "method", "persistent", "after_s"), INTERRUPTS)
def test_ctrl_c_in_a_script(tmp_path, moment, method, persistent, after_s):
    with script_in_session(tmp_path / "script.py", INTERRUPTED, moment, method, persistent) as child:
        time.sleep(after_s)
        named = (f"of-{child.pid}-", *(f"torch_{pid}_" for pid in session_of(child.pid)))
        os.killpg(child.pid, signal.SIGINT)
        _, stderr = child.communicate(timeout=15)
        assert child.returncode != 0
        assert stderr.rstrip().endswith("KeyboardInterrupt")
        assert stderr.count("Traceback") == 1  # the workers' own would be others
        assert "Process" not in stderr
        assert eventually(lambda: not session_of(child.pid))
        if os.path.isdir("/dev/shm"):
            assert eventually(lambda: not [name for name in os.listdir("/dev/shm") if any(n in name for n in named)])


KILLED = """
import time, torch
import labkit as lk

if __name__ == "__main__":
    config = lk.LoaderConfig(1, 2, start_method="forkserver", oversubscribe=True)
    loader = lk.make_loader(torch.utils.data.TensorDataset(torch.arange(9)), config)
    list(loader)
    print("now", flush=True)
    time.sleep(60)
"""


@pytest.mark.exhaustive
def test_a_kill_of_the_main_process_ends_the_fork_servers_workers(tmp_path):
    with script_in_session(tmp_path / "script.py", KILLED) as child:
        others = [pid for pid in session_of(child.pid) if pid != child.pid]
        assert len(others) >= 2
        child.kill()
        child.wait()
        assert eventually(lambda: not session_of(child.pid), within_s=30)  # torch asks every five seconds


@pytest.fixture
def python_default():
    """Sets the start method that Python takes unasked."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield partial(multiprocessing.set_start_method, force=True)
    multiprocessing.set_start_method(before, force=True)


def test_workers_fork_unasked_only_in_a_script(monkeypatch, python_default):
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__file__ = "train.py"
    python_default("fork")
    assert worker_context(None).get_start_method() == "fork"
    del main.__file__  # as in a notebook's kernel, which has threads
    asked = [None, "fork", "spawn"]
    assert [worker_context(method).get_start_method() for method in asked] == ["forkserver", "fork", "spawn"]
    python_default("spawn")
    assert worker_context(None).get_start_method() == "spawn"


def test_a_fork_server_imports_what_data_sets_are_made_of(monkeypatch):
    """Else each worker would, in every epoch that starts new ones."""
    import torchvision.transforms  # noqa: F401

    import labkit.data.depth  # noqa: F401

    context, preloaded = worker_context("forkserver"), []
    monkeypatch.setattr(type(context), "set_forkserver_preload", lambda self, names: preloaded.extend(names))
    worker_context("forkserver")
    assert {"labkit.loading.torch_loader", "labkit.data.depth", "torchvision.transforms"} <= set(preloaded)
    assert "labkit.app.cli" not in preloaded


LATE = """
import sys, torch
import labkit as lk

def threads(batch):
    assert "cv2" not in sys.modules
    import cv2
    return torch.get_num_threads(), cv2.getNumThreads()

if __name__ == "__main__":
    config = lk.LoaderConfig(batch_size=1, num_workers=1, start_method=sys.argv[1])
    print(next(iter(lk.make_loader(range(4), config, batch_transform=threads))))
"""


def test_one_thread_in_each_worker():
    import cv2

    def threads(batch):
        return torch.get_num_threads(), cv2.getNumThreads()

    cv2.setNumThreads(4)
    try:
        found = list(lk.make_loader(Numbers(), config(), batch_transform=threads))
        assert cv2.getNumThreads() == 4  # here nothing changed
    finally:
        cv2.setNumThreads(-1)
    assert found == [(1, 1)] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_one_thread_in_an_opencv_that_is_imported_late(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(LATE)
    told = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "(1, 1)"
