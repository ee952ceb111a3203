"""The workers of make_loader: what is said when one dies, Ctrl-C at any moment, when they stay, one thread in each."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import ModuleType

import cloudpickle
import cv2
import fsspec
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as DataLoaderIter

import labkit as lk
from labkit.errors import WorkerDied
from labkit.loading.workers import explain_death
from tests.loaders import Numbers, eventually, indices, loader_of, script_in_session, session_of, solid
from tests.memory_store import MemoryStore
from tests.serving import QuietFolder, serving

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file


def with_process(batch):
    return os.getpid()


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_persist_if_asked_and_end_when_the_loader_is_closed(persistent):
    loader = loader_of(Numbers(), 2, persistent_workers=persistent, batch_transform=with_process)
    epochs = [set(loader) for _ in range(2)]
    assert (epochs[0] == epochs[1]) == persistent
    assert len(multiprocessing.active_children()) == 2 * persistent
    for _ in range(2):
        loader.close()
        assert multiprocessing.active_children() == []
    assert len(set(loader)) == 2


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
    "bus error": (die_of(signal.SIGBUS), "SIGBUS.*--shm-size"),
}


@pytest.fixture
def _torch_looks_often(monkeypatch):
    """Who waits for a batch looks for dead workers several times a second; torch does so every 5 s."""
    monkeypatch.setattr(DataLoaderIter._try_get_data, "__defaults__", (0.2,))


@pytest.mark.usefixtures("_torch_looks_often")
class TestTheDeathOfAWorker:
    @pytest.mark.parametrize(("harm", "persistent"), [("killed", True), ("exits", False), ("bus error", True)])
    def test_is_told_with_its_reason_and_the_next_epoch_starts_anew(self, tmp_path, harm, persistent):
        do, said = HARM[harm]
        loader = loader_of(Numbers(20, once(tmp_path / "done", do)), 2, persistent_workers=persistent)
        with pytest.raises(WorkerDied, match=said):
            list(loader)
        assert multiprocessing.active_children() == []
        assert indices(loader) == list(range(20))

    def test_is_explained_also_if_its_files_close_long_before_it_ends(self):
        def die_slowly():
            os.closerange(3, 1000)  # as the kernel does, sockets and sentinel included
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

        worker = multiprocessing.get_context("fork").Process(target=die_slowly)
        worker.start()
        assert "SIGKILL" in explain_death(ConnectionResetError(104, "Connection reset by peer"), [worker])

    @pytest.mark.parametrize("moment", ["between epochs", "amid an epoch"])
    def test_is_told_when_a_batch_is_asked_for_and_not_before(self, moment):
        loader = loader_of(Numbers(80, lambda index: time.sleep(0.02)), 2)
        running = iter(loader)
        if moment == "between epochs":
            list(running)
            running = loader
        else:
            next(running)
        worker = multiprocessing.active_children()[0]
        os.kill(worker.pid, signal.SIGKILL)
        assert connection.wait(
            [worker.sentinel], timeout=10
        )  # without reaping it: torch's own handler would raise here
        with pytest.raises(WorkerDied, match="SIGKILL"):
            list(running)
        assert multiprocessing.active_children() == []
        assert indices(loader) == list(range(80))


def test_an_interrupt_that_is_caught_leaves_no_worker():
    """As in a notebook's kernel, which lives on."""
    dataset = Numbers(40, lambda index: time.sleep(0.1))
    loader = loader_of(dataset, 2)
    running = iter(loader)
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        list(running)
    assert multiprocessing.active_children() == []
    dataset.action = id
    assert indices(loader) == list(range(40))


def test_an_interrupt_while_workers_start_leaves_none(monkeypatch):
    def start_and_interrupt(process):
        start(process)
        os.kill(os.getpid(), signal.SIGINT)

    start = multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_and_interrupt)
    loader = loader_of(Numbers(), 2, start_method="fork")
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("moment", "method", "persistent", "after_s"), [
    ("starting", "fork", True, 0.03), ("waiting", "fork", False, 0.3), ("body", "fork", True, 0.1),
])  # fmt: skip
def test_ctrl_c_in_a_script_ends_all_with_one_traceback(tmp_path, moment, method, persistent, after_s):
    with script_in_session(tmp_path / "script.py", INTERRUPTED, moment, method, persistent) as child:
        time.sleep(after_s)
        named = (f"of-{child.pid}-", *(f"torch_{pid}_" for pid in session_of(child.pid)))
        os.killpg(child.pid, signal.SIGINT)
        _, stderr = child.communicate(timeout=15)
        assert child.returncode != 0
        assert stderr.rstrip().endswith("KeyboardInterrupt")
        chained = stderr.count("During handling of the above exception")  # where the signal came as one was handled
        assert stderr.count("Traceback") - chained == 1  # the workers' own would be others
        assert "Process" not in stderr
        assert eventually(lambda: not session_of(child.pid))
        if os.path.isdir("/dev/shm"):
            assert eventually(lambda: not [name for name in os.listdir("/dev/shm") if any(n in name for n in named)])


KILLED = """
import sys, tempfile, time, torch
import labkit as lk

if __name__ == "__main__":
    kind, tempfile.tempdir = sys.argv[1:]
    config = lk.LoaderConfig(1, 2, start_method=kind, oversubscribe=True)
    loader = lk.make_loader(torch.utils.data.TensorDataset(torch.arange(9)), config)
    list(loader)
    print("now", flush=True)
    time.sleep(60)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "signals"), [
    ("forkserver", {"the script": signal.SIGKILL}), ("fork", {"the script": signal.SIGTERM}),
    ("fork", {"a worker": signal.SIGKILL, "the script": signal.SIGINT}),
], ids=["forkserver", "fork", "worker"])  # fmt: skip
def test_a_kill_leaves_no_process_and_no_file(tmp_path, kind, signals):
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:  # short, for sockets
        with script_in_session(tmp_path / "script.py", KILLED, kind, folder) as child:
            others = [pid for pid in session_of(child.pid) if pid != child.pid]
            assert len(others) >= 2
            for whose, number in signals.items():
                os.kill(child.pid if whose == "the script" else others[0], number)
            child.wait()
            assert eventually(lambda: not session_of(child.pid), within_s=30)  # torch asks every five seconds
        assert os.listdir(folder) == []


def test_a_store_of_a_class_in_a_cell_goes_to_workers_that_are_no_forks():
    class Mine(MemoryStore):
        pass

    Mine.__module__ = "__main__"  # which is another one in the workers
    files = {f"class/{number}.png": solid(number) for number in range(4)} | {"class/2.png": b"torn"}
    batches = iter(loader_of(lk.ImageDataset(Mine(files)), 1, batch_size=2, start_method="forkserver"))
    assert next(batches)[0][:, 0, 0, 0].tolist() == [0, 1]
    with pytest.raises(lk.DecodeError, match=r"class/2\.png"):
        next(batches)


@pytest.fixture
def python_default():
    """Sets the start method that Python takes unasked."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield partial(multiprocessing.set_start_method, force=True)
    multiprocessing.set_start_method(before, force=True)


def test_workers_fork_unasked_only_in_a_script(monkeypatch, python_default):
    def methods(*asked):
        loaders = [loader_of(num_workers=1, start_method=method) for method in asked]
        return [loader.multiprocessing_context.get_start_method() for loader in loaders]

    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__file__ = "train.py"
    python_default("fork")
    assert methods(None) == ["fork"]
    del main.__file__  # as in a notebook's kernel, which has threads
    assert methods(None, "fork", "spawn") == ["forkserver", "fork", "spawn"]
    python_default("spawn")
    assert methods(None) == ["spawn"]


def test_a_loader_leaves_the_start_method_to_the_program(python_default):
    python_default(None)
    loader = loader_of(num_workers=1)
    list(loader)
    assert multiprocessing.get_start_method(allow_none=True) is None
    multiprocessing.set_start_method("spawn")  # an error, if it was chosen before
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_a_fork_server_imports_what_data_sets_are_made_of(monkeypatch):
    """Else each worker would, in every epoch that starts new ones."""
    import torchvision.transforms  # noqa: F401

    import labkit.data.depth  # noqa: F401

    context, preloaded = multiprocessing.get_context("forkserver"), []
    monkeypatch.setattr(type(context), "set_forkserver_preload", lambda self, names: preloaded.extend(names))
    loader_of(num_workers=1, start_method="forkserver").multiprocessing_context.Event()
    assert {"labkit.loading.torch_loader", "labkit.data.depth", "torchvision.transforms"} <= set(preloaded)
    assert "labkit.app.cli" not in preloaded


def test_each_worker_has_one_thread():
    cv2.setNumThreads(4)
    try:
        counts = lambda batch: (torch.get_num_threads(), cv2.getNumThreads())  # noqa: E731
        assert list(loader_of(Numbers(), 2, batch_transform=counts)) == [(1, 1)] * 3
        assert cv2.getNumThreads() == 4  # here nothing changed
    finally:
        cv2.setNumThreads(-1)


class Remote:
    """Files of a server, by fsspec: of a file system that it holds, or of one that it asks for each time."""

    def __init__(self, url, is_held):
        self.url, self.files = url, fsspec.filesystem("http") if is_held else None

    def __len__(self):
        return 1

    def __getitem__(self, index):
        files = self.files or fsspec.filesystem("http")
        return torch.frombuffer(bytearray(files.cat_file(self.url)), dtype=torch.uint8)


def test_a_file_system_of_fsspec_works_in_forks_as_the_note_says(tmp_path):
    (tmp_path / "0").write_bytes(b"01")
    with serving(partial(QuietFolder, directory=tmp_path)) as port:
        held, asked = (Remote(f"http://127.0.0.1:{port}/0", is_held) for is_held in (True, False))
        with pytest.raises(RuntimeError, match=r"(?s)not fork-safe.*call fsspec\.filesystem.* within __getitem__"):
            list(loader_of(held, 1, start_method="fork"))
        assert bytes(asked[0].tolist()) == b"01"  # a look before the workers start
        [batch] = loader_of(asked, 1, start_method="fork")
        assert batch.tolist() == [list(b"01")]
