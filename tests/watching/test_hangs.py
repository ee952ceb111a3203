"""A training that hangs: `labkit watch` says in what, by real workers that hang, and the script goes on."""

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import labkit as lk
from labkit.watching import linux, stalls
from labkit.watching.stalls import StallWatch, name_of_sample
from labkit.watching.worker import Hand, hand_here
from tests.loaders import eventually
from tests.watching.trained import ENVIRONMENT, train


class Photos(Dataset):
    """Makes sample 8 as `make` does."""

    def __init__(self, make):
        self.make, self.paths = make, [f"photos/{number}.jpg" for number in range(12)]

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 8:
            self.make()
        return torch.full((4,), float(index))


SEEN = SimpleNamespace(kind="DataLoader", number=0, folder="")


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(12))


@pytest.fixture
def hangs(tmp_path):
    """By kind: what hangs, and what ends it."""
    lock, event, quiet = multiprocessing.Lock(), multiprocessing.Event(), socket.create_server(("127.0.0.1", 0))
    fifo, (read, write) = str(tmp_path / "photo.jpg"), os.pipe()
    os.mkfifo(fifo)
    lock.acquire()

    def ask():
        with socket.create_connection(quiet.getsockname()) as client:
            client.recv(1)

    def answer():
        connection, _ = quiet.accept()
        connection.close()

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def go_on():
        [worker] = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGCONT)

    yield {
        "lock": (lambda: lock.acquire(), lock.release),
        "file": (lambda: os.close(os.open(fifo, os.O_RDONLY)), lambda: os.close(os.open(fifo, os.O_WRONLY))),
        "server": (ask, answer),
        "stopped": (stop, go_on),
        "python": (lambda: event.wait(), event.set),
        "C": (lambda: ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1), lambda: os.write(write, b"x")),
    }
    quiet.close()
    os.close(read)
    os.close(write)


class Report:
    """A terminal, and what it was told."""

    descriptor = None

    def __init__(self):
        self.said = []
        self.tell = self.said.append


def hung(make_loader, end, is_there):
    """What is reported of a training that hangs until `end` is called, and its losses; looked at once `is_there`."""
    terminal, losses = Report(), []

    def look():
        try:
            deadline = time.monotonic() + 60
            while not is_there(watched.record) and time.monotonic() < deadline:
                os.sched_yield()
            for _ in range(10):
                watched.record.stalls.look()
        finally:
            end()

    with lk.watch() as watched, ThreadPoolExecutor(1) as pool:
        watched.record.watch_stalls(1e6, terminal)  # only the looks above
        looks = pool.submit(look)
        train(make_loader(), lambda batch: losses.append(batch.sum().item()))
        looks.result()
    return terminal.said, losses, watched


def in_hand(record, n_batches=(4,)):
    """Whether sample 8 is being made while its batch is waited for, after so many."""
    doing = record.doing
    if doing is None or doing.what != "waits":
        return False
    hand = Hand.from_file(os.path.join(doing.folder, "0.hand")) if doing.worker == 0 else hand_here
    is_made = hand is not None and hand.index in (8, Hand.UNKNOWN) and doing.n_batches in n_batches
    pids = [worker.pid for worker in multiprocessing.active_children()] or [os.getpid()]
    return is_made and any(linux.system_call(pid, pid) or linux.state_of(pid) == "T" for pid in pids)


def is_in_loader():
    """Whether the training, which has said that it waits, has come to torch's own code."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/data/dataloader.py"):
        frame = frame.f_back
    return frame is not None


LOOKS_LIKE = {
    "lock": r"Worker 0 waits for a lock, in .*with photos/8\.jpg for 0 s\. It was forked: .*forkserver",
    "file": r"Worker 0 waits for a file: open.*test_hangs\.py:\d+ <lambda>, with photos/8\.jpg",
    "server": r"Worker 0 waits for .*127\.0\.0\.1:\d+.*does not answer.*in .*test_hangs\.py:\d+ ask",
    "stopped": r"worker 0 \(process \d+\) is stopped by a signal or a debugger: kill -CONT \d+ lets it go on",
    "python": r"Worker 0 waits for a lock, in multiprocessing/synchronize\.py",
    "C": r"Worker 0 waits for another process: read pipe:.*in .*test_hangs\.py:\d+ <lambda>",
}


class TestAHang:
    @pytest.mark.parametrize("kind", LOOKS_LIKE)
    def test_of_a_worker_is_told_once_and_the_training_goes_on(self, hangs, kind):
        make, end = hangs[kind]
        loader = lambda: DataLoader(Photos(make), 2, num_workers=1, multiprocessing_context="fork")  # noqa: E731
        # a worker that is stopped, or whose Python is, may not have handed over the batch before
        received = (3, 4) if kind in ("stopped", "C") else (4,)
        waits = lambda record: in_hand(record, received) and is_in_loader()  # noqa: E731
        [report], losses, watched = hung(loader, end, waits)
        first, *lines = report.splitlines()
        assert re.match(r"no batch for 1000000 s: DataLoader 0 waits for batch [45]; the script goes on\. ", first)
        assert re.search(LOOKS_LIKE[kind], first), report
        assert re.search(r"^  worker 0 \(process \d+\): .*makes photos/8\.jpg", report, re.MULTILINE)
        assert any("torch/utils/data/dataloader.py" in line for line in lines), "the training's own stack"
        assert "MB of /dev/shm are free" in lines[-1]
        assert losses == [4.0, 20.0, 36.0, 52.0, 68.0, 84.0]
        assert watched.record.hung == [f"It hung: {first.partition('goes on. ')[2]}"]

    def test_is_told_of_any_loader_without_workers_too(self, hangs):
        kinds = {
            "a subset": lambda make: DataLoader(Subset(Photos(make), range(12)), 2),
            "a stream": lambda make: DataLoader(Stream(Photos(make)), 2),
            "make_loader": lambda make: lk.make_loader(Photos(make), lk.LoaderConfig(2, 0), collate_fn=torch.stack),
        }
        make, end = hangs["lock"]
        for kind, loader in kinds.items():
            [report], losses, _ = hung(lambda: loader(make), end, in_hand)  # noqa: B023 - called at once
            assert losses[4] == 68.0
            name = "a sample of its stream" if kind == "a stream" else r"photos/8\.jpg"
            assert re.search(rf"The training waits for a lock, in .*, with {name} for", report), (kind, report)

    def test_of_the_step_is_told_as_one(self, hangs):
        make, end = hangs["lock"]

        def steps(loader):
            for number, batch in enumerate(loader):
                yield batch
                if number == 2:
                    make()

        data = TensorDataset(torch.zeros(20, 4))
        loader = lambda: steps(DataLoader(data, 4, collate_fn=lambda each: torch.stack([x for (x,) in each])))  # noqa: E731
        is_there = lambda record: (doing := record.doing) and doing.what == "steps" and doing.n_batches == 3  # noqa: E731
        [report], losses, _ = hung(loader, end, lambda record: is_there(record) and waits_for_a_lock())
        assert report.startswith("no batch was asked for in 1000000 s: the step with batch 3 of DataLoader 0;")
        assert len(losses) == 5

    def test_is_none_while_batches_come_or_when_they_have_ended(self):
        terminal = Report()
        with lk.watch() as watched:
            watched.record.watch_stalls(1e6, terminal)
            for _ in DataLoader(TensorDataset(torch.zeros(40, 4)), 2):
                for _ in range(3):
                    watched.record.stalls.look()
            for _ in range(20):
                watched.record.stalls.look()
        assert terminal.said == []

    def test_is_told_three_times_at_most(self):
        said, doing = [], [stalls.Doing("waits", SEEN, 3, None, None)]
        watch = StallWatch(1.0, lambda: doing[0], said.append)
        for _ in range(5):
            doing[0] = doing[0]._replace(n_batches=doing[0].n_batches + 1)
            for _ in range(20):
                watch.look()
        assert len(said) == len(watch.found) == 3


def waits_for_a_lock():
    return "futex" in linux.system_call(os.getpid(), threading.main_thread().native_id)


class TestWhatIsFull:
    @pytest.mark.parametrize(("free", "all_bytes", "is_full"), [(1e6, 64e6, True), (40e6, 64e6, False), (0, 0, False)])
    def test_is_told_of_shared_memory(self, monkeypatch, free, all_bytes, is_full):
        found = SimpleNamespace(f_bavail=free, f_blocks=all_bytes, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda path: found)
        words, _ = stalls.describe_stall(stalls.Doing("steps", SEEN, 3, None, None))
        assert words.startswith("Shared memory is full") == is_full

    def test_is_told_of_open_files(self, monkeypatch):
        n_open = len(os.listdir("/proc/self/fd"))
        for limit, is_full in ((n_open, True), (4 * n_open, False)):
            monkeypatch.setattr("resource.getrlimit", lambda kind, limit=limit: (limit, limit))
            words, _ = stalls.describe_stall(stalls.Doing("steps", SEEN, 3, None, None))
            assert ("ulimit -n" in words) == is_full


class TestSamples:
    def test_have_the_name_that_their_data_set_lists(self):
        photos = Photos(None)
        folder = type("Folder", (), {"__len__": lambda self: 2})()
        folder.samples = [("cat/1.jpg", 0), ("cat/2.jpg", 0)]
        assert name_of_sample(photos, 3) == "photos/3.jpg"
        assert name_of_sample(folder, 1) == "cat/2.jpg"
        assert name_of_sample(Subset(Subset(photos, [4, 5, 6]), [2]), 0) == "photos/6.jpg"
        assert name_of_sample(ConcatDataset([folder, photos]), 3) == "photos/1.jpg"
        assert name_of_sample(TensorDataset(torch.zeros(9)), 7) == "sample 7"
        assert name_of_sample(None, 7) == "sample 7"

    def test_in_a_hand_may_have_any_index(self, tmp_path):
        hand, path = Hand.shared(str(tmp_path / "hand")), str(tmp_path / "hand")
        for index in (0, 17, torch.tensor(3), ("cat", 256), None):
            for n_before in (0, 300):  # more than there is room for at first
                noted = hand.begin([1] * n_before + [index])
                noted[: 2 * n_before + 1 : 2] = array("d", range(1, n_before + 2))
                found, is_number = Hand.from_file(path), not isinstance(index, tuple | None)
                assert found.index == (index if is_number else Hand.UNKNOWN)
                assert found.since_s == n_before + 1
                hand.rest(noted)
                assert Hand.from_file(path).index is None
        assert name_of_sample(Photos(None), Hand.UNKNOWN) == "a sample"

    def test_of_another_thread_are_in_no_hand(self):
        hand = Hand()
        first, second = hand.begin([3]), hand.begin([4])
        first[0] = second[0] = 1.0
        hand.rest(second)
        assert hand.index == 3
        hand.rest(first)
        assert hand.index is None

    def test_are_in_no_hand_where_there_is_no_file(self, tmp_path):
        assert Hand.from_file(str(tmp_path / "none")) is None


def test_a_script_that_sets_faulthandlers_clock_has_it_from_then_on(monkeypatch, tmp_path):
    armed, looks = [], []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *words, **options: armed.append(options))
    stop = StallWatch(0.04, lambda: looks.append(1), print, lambda: 2).start(str(tmp_path / "stacks"))
    try:
        assert eventually(lambda: {"file": 2} in armed)
        faulthandler.dump_traceback_later(3, **(theirs := {"file": sys.stderr}))
        n_looks = len(looks)
        assert eventually(lambda: len(looks) > n_looks + 3)
    finally:
        stop()
    assert armed[-1] == theirs


SCRIPT = """
import ctypes, faulthandler, os, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 12:
            if not (child := os.fork()):
                sys.exit(3)  # as Python ends, it waits for a thread of faulthandler's, which a fork has not
            print(os.waitpid(child, 0)[1], flush=True)
            ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # with Python's lock
        return torch.full((4,), float(index))

model = torch.nn.Linear(4, 1)
steps = torch.optim.SGD(model.parameters(), 0.1)
for batch in DataLoader(Data(), 2):
    loss = model(batch).mean()
    loss.backward()
    steps.step()
print(len(batch), flush=True)
"""


def test_c_code_that_holds_pythons_lock_is_shown_and_forks_end(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "labkit", "watch", "--stall", "0.2", str(path)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **options) as process:
        assert process.stdout.readline() == "768\n"
        said = ""
        # To the outermost call: faulthandler reads the calls of a thread that runs on as they go.
        while not re.search(r'train\.py", line 15 in __getitem__\n(.*\n)*.*start\.py", line \d+ in <module>\n', said):
            said += (line := process.stderr.readline())
            assert line, said
        process.stdin.write("x")
        process.stdin.flush()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "2\n")
    assert "Timeout (0:00:00" in said
    assert "C code held Python's lock, or the process was stopped" in " ".join(err.split())
