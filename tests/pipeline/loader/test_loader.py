"""make_loader: settings that are clamped with a word, errors that name the sample, workers that never stay behind."""

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import nbformat
import psutil
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

import labkit as lk
from labkit.pipeline.loader import config as settings, loader as loaders, torch_internals
from tests.paths import REPO

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spawned workers cannot import a test file


class Numbers(Dataset):
    """Items are their index; `action(index)` comes first."""

    def __init__(self, n_samples: int = 12, action=lambda index: None):
        self.action, self.n_samples = action, n_samples
        self.keys = [f"key-{index}" for index in range(n_samples)]

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.action(index)
        return torch.tensor([index])


def config(num_workers: int = 2, **settings) -> lk.LoaderConfig:
    return lk.LoaderConfig(**{"batch_size": 4, "num_workers": num_workers, "oversubscribe": True, **settings})


def indices(loader) -> list[int]:
    return [index for batch in loader for index in batch.flatten().tolist()]


@pytest.fixture(autouse=True)
def _no_worker_is_left():
    """Whatever a test did: when its loader is gone, so are the workers."""
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(settings, "usable_cores", lambda: 2)
    monkeypatch.setattr(settings, "core_limits", lambda: {"cpu_count": 64, "affinity": 2})


def warnings_of(make) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    assert {(warning.category, warning.filename) for warning in caught} <= {(lk.LoaderWarning, __file__)}
    return [str(warning.message) for warning in caught]


def test_more_workers_than_cores(two_cores):
    said = warnings_of(lambda: list(lk.make_loader(Numbers(), lk.LoaderConfig(num_workers=5))))
    assert len(said) == 1
    for part in ("num_workers=5", "reduced to 2", "cpu_count 64", "affinity 2", "oversubscribe=True"):
        assert part in said[0]
    with pytest.warns(lk.LoaderWarning):
        assert lk.make_loader(Numbers(), lk.LoaderConfig(num_workers=5)).num_workers == 2


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"num_workers": 0}, {"pin_memory": False}], ids=str)
def test_no_warning_where_nothing_changes(two_cores, settings):
    assert warnings_of(lambda: list(lk.make_loader(Numbers(), lk.LoaderConfig(**settings)))) == []


def test_oversubscribed_without_a_word():
    """Not even torch's own warning, neither when made nor when iterated."""
    workers = (os.cpu_count() or 1) + 1
    made = []
    assert warnings_of(lambda: made.append(lk.make_loader(Numbers(), config(workers)))) == []
    assert made[0].num_workers == workers
    if workers < 20:
        assert warnings_of(lambda: list(made[0])) == []


def test_settings_that_need_workers():
    asked = {"persistent_workers": True, "prefetch_factor": 4, "start_method": "spawn"}
    said = warnings_of(lambda: list(lk.make_loader(Numbers(), config(0, **asked))))
    assert len(said) == 1
    for name, value in asked.items():
        assert f"{name}={value!r}" in said[0]
    assert "num_workers=0" in said[0]
    assert warnings_of(lambda: lk.make_loader(Numbers(), config(0, persistent_workers=False))) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is left out without CUDA")
def test_pinned_memory_without_cuda():
    said = warnings_of(lambda: list(lk.make_loader(Numbers(), config(0, pin_memory=True))))
    assert len(said) == 1
    assert "pin_memory=True is left out" in said[0]


def test_defaults(two_cores, monkeypatch):
    loader = lk.make_loader(Numbers())
    assert (loader.num_workers, loader.batch_size, loader.prefetch_factor, loader.persistent_workers) == (
        2,
        64,
        2,
        True,
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert lk.make_loader(Numbers()).num_workers == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert lk.make_loader(Numbers()).num_workers == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0}, {"batch_size": 2.0}, {"batch_size": True}, {"num_workers": -1}, {"num_workers": "2"},
        {"prefetch_factor": 0}, {"start_method": "thread"}, {"seed": 0.5}, {"seed": None},
    ],
    ids=str,
)  # fmt: skip
def test_bad_values(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
        lk.LoaderConfig(**bad)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        (Stream(), {}, TypeError),
        (iter([1]), {}, TypeError),
        ([], {}, ValueError),
        (Numbers(), {"shuffle": True, "sampler": [1, 2]}, ValueError),
    ],
)
def test_refused(dataset, options, error):
    with pytest.raises(error):
        lk.make_loader(dataset, config(0), **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_attributes_and_lengths(num_workers):
    loader = lk.make_loader(Numbers(10), config(num_workers, prefetch_factor=3 if num_workers else None))
    assert (loader.batch_size, loader.num_workers, len(loader)) == (4, num_workers, 3)
    assert len(iter(loader)) == 3
    assert indices(loader) == list(range(10))
    assert loader.dataset.keys[3] == "key-3"  # the data set's own attributes stay in reach
    assert len(loader.dataset) == 10
    whole = lk.make_loader(Numbers(10), config(num_workers), drop_last=True)
    assert (len(whole), indices(whole)) == (2, list(range(8)))


class Halves(DistributedSampler):
    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]
        super().set_epoch(epoch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_distributed_sampler(num_workers):
    samplers = [Halves(Numbers(), num_replicas=2, rank=rank, seed=5) for rank in range(2)]
    made = [lk.make_loader(Numbers(), config(num_workers), sampler=sampler) for sampler in samplers]
    epochs = [[indices(loader) for loader in made] for _ in range(2)]
    assert [sorted(one + other) for one, other in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    made[0].set_epoch(0)
    assert indices(made[0]) == epochs[0][0]
    told = samplers[0].epochs
    assert [epoch for epoch, _ in itertools.groupby(told)] == [0, 1, 0]  # torch asks twice when workers start
    assert len(made[0]) == 2


class Whole(Numbers):
    """Fetches a batch by one call, and says which."""

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, wanted):
        assert all(type(index) is int for index in wanted)
        return [torch.tensor([index, len(wanted), torch.randint(2**40, ()).item()]) for index in wanted]


def test_getitems_is_called_once_a_batch():
    expected = torch.cat(list(lk.make_loader(Whole(10), config(0))))
    assert expected[:, :2].tolist() == [[index, 4 if index < 8 else 2] for index in range(10)]
    assert len(expected[:, 2].unique()) == 10
    assert torch.equal(torch.cat(list(lk.make_loader(Whole(10), config(2)))), expected)


def with_process_and_noise(batch):
    return batch, os.getpid(), torch.rand(())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_transform_runs_in_the_worker(num_workers):
    loader = lk.make_loader(Numbers(), config(num_workers), batch_transform=with_process_and_noise)
    _, processes, noise = zip(*loader, strict=True)
    assert len(set(processes)) == max(1, num_workers)
    assert (os.getpid() in processes) == (num_workers == 0)
    expected = list(lk.make_loader(Numbers(), config(0), batch_transform=with_process_and_noise))
    assert list(noise) == [drawn for _, _, drawn in expected]
    assert len(set(noise)) == 3


class Sizes(Numbers):
    def __getitem__(self, index):
        return torch.zeros(3, 5 + index % 2, 7), index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_of_different_sizes(num_workers):
    loader = lk.make_loader(Sizes(), config(num_workers), sampler=[4, 5, 6, 7])
    with pytest.raises(RuntimeError) as failure:
        list(loader)
    said = str(failure.value) + "".join(getattr(failure.value, "__notes__", []))
    for part in ("batch of 4", "the first: key-4", "2 sizes", "(3, 5, 7)", "(3, 6, 7)"):
        assert part in said


class Particular(Exception):
    """What cannot be made from a message alone."""

    def __init__(self, code: int, *, reason: str):
        super().__init__(code, reason)


def the_faulty_transform(index: int, make) -> None:
    if index == 6:
        raise make()


def failing(make):
    return lambda index: the_faulty_transform(index, make)


MODES = [(0, None), (2, "fork"), (1, "spawn"), (1, "forkserver")]


@pytest.mark.parametrize(("num_workers", "start_method"), MODES)
@pytest.mark.parametrize("kind", [lk.DecodeError, KeyError])
def test_an_error_keeps_its_type_and_names_the_sample(num_workers, start_method, kind):
    loader = lk.make_loader(
        Numbers(action=failing(lambda: kind("lost"))), config(num_workers, start_method=start_method)
    )
    with pytest.raises(kind) as failure:
        indices(loader)
    shown = "".join(traceback.format_exception(failure.value))
    assert "while loading key-6" in shown
    assert "the_faulty_transform" in shown
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("num_workers", "start_method"), MODES[1:])
def test_an_error_whose_type_cannot_be_made_again(num_workers, start_method):
    """A message is not enough for its constructor and, under spawn, its class cannot be sent."""
    action = failing(lambda: Particular(5, reason="why"))
    loader = lk.make_loader(Numbers(action=action), config(num_workers, start_method=start_method))
    with pytest.raises(RuntimeError) as failure:
        indices(loader)
    for part in ("Particular", "(5, 'why')", "while loading key-6", "the_faulty_transform"):
        assert part in str(failure.value)
    assert type(failure.value) is RuntimeError


def test_an_error_of_a_class_that_no_process_can_name():
    class Local(ValueError):
        pass

    with pytest.raises(RuntimeError, match="Local: here"):
        indices(lk.make_loader(Numbers(action=failing(lambda: Local("here"))), config()))


def test_a_batch_that_cannot_be_sent():
    with pytest.raises(RuntimeError, match="may hold only what can be pickled"):
        list(lk.make_loader(Numbers(), config(), collate_fn=lambda samples: threading.Lock()))


def test_a_data_set_that_cannot_be_pickled():
    loader = lk.make_loader(Numbers(action=threading.Lock()), config(start_method="spawn"))
    with pytest.warns(UserWarning, match="pickle error"), pytest.raises(TypeError) as failure:
        iter(loader)
    assert any("may hold no open file, lock" in note for note in failure.value.__notes__)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Numbers(), "key-3"),
        (Subset(Subset(Numbers(), [1, 3]), [1]), "key-3"),
        (TensorDataset(torch.zeros(9)), "sample 3"),
    ],
)
def test_names_of_samples(dataset, name):
    assert loaders.key_of(dataset, 0 if isinstance(dataset, Subset) else 3) == name


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
    with pytest.raises(lk.WorkerDied, match=said):
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


@pytest.mark.parametrize("symptom", [ConnectionResetError, EOFError, FileNotFoundError])
def test_a_worker_that_dies_before_its_batch_is_fetched(monkeypatch, symptom):
    """Batches lie in shared memory, whose descriptors their worker hands out on request: the dead hand out none."""
    loader = lk.make_loader(Numbers(80, slow), config())
    running = iter(loader)
    next(running)

    def cannot_fetch(self, timeout):
        kill_one()
        raise symptom

    monkeypatch.setattr(torch_internals.WorkersBatches.__base__, "_try_get_data", cannot_fetch)
    assert_dies(lambda: list(running), "SIGKILL")  # the next batch may have come already, out of turn


def test_what_is_no_death_is_passed_on(monkeypatch):
    clock = SimpleNamespace(monotonic=iter(range(99)).__next__, sleep=lambda s: None)
    monkeypatch.setattr(torch_internals, "time", clock)
    running = iter(lk.make_loader(Numbers(80, slow), config()))

    def cannot_fetch(self, timeout):
        raise ConnectionResetError("a cable was pulled")

    monkeypatch.setattr(torch_internals.WorkersBatches.__base__, "_try_get_data", cannot_fetch)
    with pytest.raises(ConnectionResetError, match="cable"):
        next(running)


def test_a_worker_killed_between_epochs():
    loader = lk.make_loader(Numbers(40), config(persistent_workers=True))
    indices(loader)
    kill_one()
    time.sleep(0.3)  # torch's own handler would raise here, wherever the main thread is
    assert_dies(lambda: indices(loader), "SIGKILL")
    assert indices(loader) == list(range(40))


KILL_A_WORKER = """
import sys, torch
import labkit as lk
from tests.pipeline.loader.test_loader import Numbers, die_of
def die(index):
    if index == 35 and torch.utils.data.get_worker_info() is not None:
        die_of(9)()
if __name__ == "__main__":
    loader = lk.make_loader(Numbers(40, die), lk.LoaderConfig(batch_size=2, num_workers=2, oversubscribe=True))
    try:
        list(loader)
    except lk.WorkerDied as error:
        print("SIGKILL" in str(error))
"""


def test_a_killed_worker_leaves_no_temporary_folder(tmp_path):
    """Batches lie in shared memory, and are handed over through sockets in such a folder."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", KILL_A_WORKER]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout == "True\n"
    assert os.listdir(tmp_path) == []


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
    assert [type(error) for error in seen] == [lk.WorkerDied]
    assert "SIGKILL" in str(seen[0])


def test_closed_and_used_again():
    loader = lk.make_loader(Numbers(), config())
    indices(loader)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert multiprocessing.active_children() == []
    loader.close()
    assert indices(loader) == list(range(12))


def test_workers_end_with_a_forgotten_loader():
    loader = lk.make_loader(Numbers(), config())
    indices(loader)
    del loader
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_persist_if_asked(persistent):
    loader = lk.make_loader(Numbers(), config(persistent_workers=persistent), batch_transform=with_process_and_noise)
    epochs = [{process for _, process, _ in loader} for _ in range(2)]
    assert (epochs[0] == epochs[1]) == persistent


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


def session_of(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def eventually(condition, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


INTERRUPTS = [
    ("starting", "fork", False, 0.0), ("starting", "fork", True, 0.03), ("starting", "spawn", True, 0.1),
    ("starting", "spawn", False, 0.6), ("starting", "forkserver", True, 0.1), ("waiting", "fork", True, 0.3),
    ("waiting", "fork", False, 0.3), ("body", "fork", True, 0.1), ("body", "fork", False, 0.1),
]  # fmt: skip


@pytest.mark.parametrize(("moment", "method", "persistent", "after_s"), INTERRUPTS)
def test_ctrl_c_in_a_script(tmp_path, moment, method, persistent, after_s):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    child = subprocess.Popen(
        [sys.executable, str(script), moment, method, str(persistent)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "now\n", child.stderr.read()
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
    finally:
        for pid in session_of(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.communicate()


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


def test_a_kill_of_the_main_process_ends_the_fork_servers_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    child = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "now\n"
        others = [pid for pid in session_of(child.pid) if pid != child.pid]
        assert len(others) >= 2
        child.kill()
        child.wait()
        assert eventually(lambda: not session_of(child.pid), within_s=30)  # torch asks every five seconds
    finally:
        for pid in session_of(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


class Threads(Numbers):
    def __getitem__(self, index):
        import cv2

        return torch.tensor([torch.get_num_threads(), cv2.getNumThreads()])


LATE = """
import sys, torch
import labkit as lk

class Threads(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert "cv2" not in sys.modules
        import cv2
        return torch.tensor([torch.get_num_threads(), cv2.getNumThreads()])

if __name__ == "__main__":
    config = lk.LoaderConfig(batch_size=1, num_workers=1, start_method=sys.argv[1])
    print(next(iter(lk.make_loader(Threads(), config, batch_transform=torch.Tensor.tolist))))
"""


def test_one_thread_in_each_worker():
    import cv2

    cv2.setNumThreads(4)
    try:
        rows = torch.cat(list(lk.make_loader(Threads(), config()))).tolist()
        assert cv2.getNumThreads() == 4  # here nothing changed
    finally:
        cv2.setNumThreads(-1)
    assert rows == [[1, 1]] * 12


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_one_thread_in_an_opencv_that_is_imported_late(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(LATE)
    told = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "[[1, 1]]"


CELLS = [
    "import torch, labkit as lk",
    "class Squares(torch.utils.data.Dataset):\n"
    "    def __len__(self):\n        return 6\n"
    "    def __getitem__(self, index):\n        return power(torch.tensor(index))\n"
    "power = lambda number: number**2",
    *(
        f"config = lk.LoaderConfig(batch_size=4, num_workers=1, start_method={method!r})\n"
        "print(torch.cat(list(lk.make_loader(Squares(), config, batch_transform=lambda batch: batch + 1))).tolist())"
        for method in multiprocessing.get_all_start_methods()
    ),
]


def test_classes_and_lambdas_of_a_notebook(tmp_path):
    from labkit.lab.notebooks import Notebook, execute

    path = tmp_path / "01_cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS]), path)
    executed = execute(Notebook(path, "", "", ""), timeout_s=60)
    assert executed.error == ""
    outputs = [cell.outputs for cell in executed.node.cells]
    assert outputs[:2] == [[], []]
    assert [[output.text for output in cell] for cell in outputs[2:]] == [["[1, 2, 5, 10, 17, 26]\n"]] * 3
