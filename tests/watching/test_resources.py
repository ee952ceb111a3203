"""What a training has of its machine: what files of the kernel say of it, and what a report says where it is scarce."""

import os
import resource
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import labkit as lk
from labkit.watching import linux, record, resources, worker
from labkit.watching.accounts import find_accounts
from labkit.watching.linux import Mount, Pressure, Throttling, mount_of, parse_cpu_stat, parse_pressure
from labkit.watching.loaders import Batch, Epoch, LoaderTraits, SeenLoader, names_of
from labkit.watching.record import Record
from labkit.watching.resources import Resources, ResourceWatch, data_places, place_of
from labkit.watching.worker import BatchTiming
from tests.watching.trained import watched_while

V1_STAT = "nr_periods 230\nnr_throttled 46\nthrottled_time 5750000000\nnr_bursts 0\nburst_time 0\n"
V2_STAT = (
    "usage_usec 9000000\nuser_usec 8000000\nsystem_usec 1000000\nnice_usec 0\ncore_sched.force_idle_usec 0\n"
    "nr_periods 230\nnr_throttled 46\nthrottled_usec 5750000\nnr_bursts 0\nburst_usec 0\n"
)
STOPPED = Throttling(230, 46, 5.75)
SOME = "some avg10=14.13 avg60=25.00 avg300=15.82 total=25190586803\n"
PRESSURE = SOME + "full avg10=1.00 avg60=2.00 avg300=3.00 total=7\n"


def files(folder, contents):
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


class TestTheKernel:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (V1_STAT, STOPPED),
            (V2_STAT, STOPPED),
            ("usage_usec 9\nuser_usec 8\nsystem_usec 1\n", None),  # the root of version 2, or no controller
            ("nr_periods 0\nnr_throttled 0\nthrottled_time 0\n", Throttling(0, 0, 0.0)),  # no quota
            ("", None),
        ],
    )
    def test_counts_what_a_quota_stopped(self, text, expected):
        assert parse_cpu_stat(text) == expected

    @pytest.mark.parametrize(
        ("membership", "contents", "expected"),
        [
            ("0::/pod/job\n", {"pod/cpu.stat": V2_STAT, "pod/job/cpu.stat": "usage_usec 1\n"}, {"pod": STOPPED}),
            ("4:memory:/x\n3:cpu,cpuacct:/job\n", {"cpu,cpuacct/job/cpu.stat": V1_STAT}, {"cpu,cpuacct/job": STOPPED}),
            # in a container of version 1 the names are the host's, and the mounts begin at its own group
            ("3:cpu:/docker/1f\n0::/\n", {"cpu/cpu.stat": V1_STAT}, {"cpu": STOPPED}),
            ("0::/job\n", {}, {}),
        ],
        ids=["v2", "v1", "v1 in a container", "none"],
    )
    def test_counts_it_for_the_group_or_its_parents(self, tmp_path, membership, contents, expected):
        root = files(tmp_path / "cgroup", contents)
        found = linux.throttling(root, files(tmp_path, {"membership": membership}) / "membership")
        assert found == {str(root / group): each for group, each in expected.items()}

    def test_counts_for_how_long_something_stood_still(self, tmp_path):
        assert parse_pressure(PRESSURE) == Pressure(25190.586803, 0.25)
        assert parse_pressure(SOME) == parse_pressure(PRESSURE)  # of cpu, before Linux 5.13
        assert parse_pressure("") is None
        machine = files(tmp_path / "pressure", {"cpu": PRESSURE, "io": "nonsense"})
        cgroup = files(
            tmp_path / "cgroup", {"job/cpu.pressure": "some avg10=0.00 avg60=0.50 avg300=0.00 total=500000\n"}
        )
        for names, expected in (("0::/job", Pressure(0.5, 0.005)), ("3:cpu:/job", Pressure(25190.586803, 0.25))):
            membership = files(tmp_path, {"membership": names}) / "membership"
            assert linux.pressures(cgroup, membership, machine) == {"cpu": expected}
        assert linux.pressures(tmp_path, tmp_path / "none", tmp_path / "none") == {}

    def test_tells_the_mount_of_a_path(self):
        table = (
            "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
            "40 27 0:40 / /mnt/my\\040photos rw - nfs4 server:/photos rw\n"
            "41 27 0:41 / /data rw,nosuid shared:1 master:2 - ext4 /dev/vdb rw\n"
            "42 41 0:42 / /data rw - fuse.s3fs s3fs rw\n"  # over the one before
        )
        assert mount_of("/mnt/my photos/1.jpg", table) == Mount("nfs4", "/mnt/my photos")
        assert mount_of("/data/1.jpg", table) == Mount("fuse.s3fs", "/data")
        assert mount_of("/database/1.jpg", table) == Mount("ext4", "/")
        assert mount_of("/data", "") == Mount("?", "")
        broken = "\n27\n27 1 254:0 /\n27 1 254:0 / /data\n27 1 254:0 / /data rw - \n27 1 254:0 / /d\\999 rw - ext4 a\n"
        assert mount_of("/data/1.jpg", broken + table) == Mount("fuse.s3fs", "/data")

    @pytest.mark.parametrize("text", ["", "0 x", "\ufffd\n1 2 3\n", "0 1:2 1 3 4 5 6 7 8 {inode}", "²"])
    def test_tells_nothing_of_what_the_kernel_says_otherwise(self, monkeypatch, tmp_path, text):
        with socket.socket() as opened:
            inode = os.fstat(opened.fileno()).st_ino
            monkeypatch.setattr(
                linux, "read_text", lambda path: "header\n" * ("net" in str(path)) + text.format(inode=inode)
            )
            opened_files, n_open = linux.open_files(os.getpid())
        assert n_open > 0
        assert not any(name.startswith("[") for name in opened_files if name != "[socket]")
        assert isinstance(linux.state_of(os.getpid()), str)
        assert "[" not in linux.system_call(os.getpid(), os.getpid())
        membership = files(tmp_path, {"membership": "0::/job"}) / "membership"
        assert linux.throttling(tmp_path, membership) == {}
        assert linux.pressures(tmp_path, membership, tmp_path) == {}


class Listed(Dataset):
    def __init__(self, paths):
        self.samples = [(path, 0) for path in paths]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.zeros(4)


def test_the_data_lie_where_a_data_set_or_its_store_says(tmp_path, first_photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1.jpg").touch()
    store, here = lk.FolderStore(first_photos(2)), mount_of(str(tmp_path.resolve()))
    loaders = [
        DataLoader(Listed(["1.jpg"])),
        DataLoader(Subset(Listed(["none.jpg", str(tmp_path / "1.jpg")]), [1])),
        DataLoader(lk.ImageDataset(store)),
        lk.BatchLoader(store, size=8, batch_size=2),
    ]
    places = [data_places(each, names_of(getattr(each, "dataset", None))(0)) for each in loaders]
    monkeypatch.chdir("/")  # as the script may, before its report
    for each in places:
        assert place_of(each) == {"mount": here.path, "file_system": here.kind}
    for unknown in (DataLoader(TensorDataset(torch.zeros(4))), DataLoader(Listed(["https://host/1.jpg"])), [1]):
        assert place_of(data_places(unknown, "sample 0")) == {}


class Machine:
    """A machine of which all is known."""

    def __init__(self, monkeypatch):
        self.now_s, self.shm, self.stopped, self.pressure = 100.0, (40, 64), STOPPED, Pressure(10.0, 0.5)
        clocks = {"perf_counter": lambda: 100.0, "monotonic": lambda: self.now_s}  # the first is a simulated device's
        monkeypatch.setattr(resources, "time", SimpleNamespace(**clocks))
        monkeypatch.setattr(resources, "shared_memory", lambda: self.shm)
        monkeypatch.setattr(resources, "throttling", lambda: {"job": self.stopped, "/": Throttling(0, 0, 0.0)})
        monkeypatch.setattr(resources, "pressures", lambda: {"io": self.pressure})


class TestATraining:
    def test_counts_from_its_beginning_and_keeps_the_fullest_look(self, monkeypatch):
        machine, watch = Machine(monkeypatch), ResourceWatch()
        watch.begin()
        for passed_s, free in (
            (0.0, 30),
            (0.5, 1),
            (0.6, 9),
            (0.7, 2),
            (1.0, 20),
        ):  # those at 0.5 and 1.8 are not looked at
            machine.now_s, machine.shm = machine.now_s + passed_s, (free, 64)
            watch.look(machine.now_s)
        machine.now_s, machine.stopped, machine.pressure = 120.0, Throttling(330, 96, 8.0), Pressure(15.0, 0.9)
        found = watch.read(torch_threads=3)
        assert (found.shm_free_bytes, found.shm_bytes) == (9, 64)
        assert (found.n_periods, found.n_throttled, found.throttled_s) == (100, 50, 2.25)
        assert found.pressure == {"io": 0.25}
        assert (found.seconds, found.torch_threads) == (20.0, 3)

    def test_that_has_not_begun_has_what_was_counted_so_far(self, monkeypatch):
        Machine(monkeypatch)
        found = ResourceWatch().read()
        assert (found.n_periods, found.pressure, found.seconds) == (230, {"io": 0.5}, None)
        assert found.facts()["pressure"] == "io 50% of the last minute"

    def test_opens_files_up_to_a_limit(self):
        watch, before = ResourceWatch(), len(os.listdir("/proc/self/fd")) - 1
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        watch.look(0.0)
        for each in opened:
            os.close(each)
        found = watch.read()
        assert found.files_open == before + 20
        assert found.files_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def test_goes_on_where_nothing_can_be_read(self, monkeypatch):
        def refuse(*_):
            raise PermissionError

        machine = Machine(monkeypatch)
        for name in ("throttling", "pressures"):
            monkeypatch.setattr(resources, name, refuse)
        monkeypatch.setattr("os.listdir", refuse)
        machine.shm = (0, 0)
        watch = ResourceWatch()
        watch.begin()
        watch.look(machine.now_s)
        with monkeypatch.context() as patched:
            for name in ("throttling", "pressures"):
                patched.setattr(resources, name, dict)
            assert watch.read().facts() == {}


SHARES = {"compute": 0.5, "fetch": 0.2, "prepare": 0.3, "copy": 0.0, "hand-over": 0.0, "start": 0.0}
WELL = Resources(
    seconds=60.0, usable_cores=4, shm_bytes=64_000_000, shm_free_bytes=50_000_000, files_limit=1024, files_open=90,
    n_periods=600, n_throttled=3, throttled_s=0.1, pressure={"cpu": 0.6, "io": 0.3, "memory": 0.0}, mount="/data",
    file_system="ext4", torch_threads=4, num_workers=4, worker_threads={"torch": 1, "cv2": 4}, step_queued=0.02,
    making_queued=0.03,
)  # fmt: skip


class TestTheReport:
    def test_says_one_sentence_where_all_is_well(self):
        [told] = WELL.sentences(SHARES, 0.04)
        assert told == (
            "The machine: usable cores 4; CPU quota used up in 3 of 600 periods; waiting for a core 2% of the step, "
            "3% of making batches; threads torch 4, in each worker torch 1 and cv2 4; pressure cpu 60%, io 30%, "
            "memory 0%; shared memory 50 of 64 MB free; open files 90 of 1024; data on ext4 at /data; "
            "other programs 4% of the cores."
        )

    @pytest.mark.parametrize(
        ("scarce", "others_share", "words"),
        [
            ({"n_throttled": 240, "throttled_s": 31.25}, 0, "stopped the training in 40% of its periods, for 31.2 s"),
            ({"shm_free_bytes": 3_000_000}, 0, "nearly full (3 of 64 MB of /dev/shm free)"),
            ({"files_open": 980}, 0, "980 of 1024 files were open: raise the limit (ulimit -n)"),
            ({"pressure": {"memory": 0.12}}, 0, "tasks waited for it 12% of the time"),
            ({"step_queued": 0.2, "worker_threads": {}}, 0, "(4 workers and 4 threads of torch share 4 usable cores)."),
            ({"step_queued": 0.2, "num_workers": 1}, 0.1, "waits for a core 20% .* torch.set_num_threads(3)."),
            ({"step_queued": 0.2, "num_workers": 1}, 0.3, "30% of the cores, or compute .* set_num_threads(1)."),
            (
                {"step_queued": 0.2, "torch_threads": 1, "worker_threads": {}},
                0.3,
                "end the other programs, which used 30% of the cores.",
            ),
            (
                {"step_queued": 0.2, "num_workers": 0, "worker_threads": {}},
                0,
                "3%: 0 workers and 4 threads of torch share",
            ),
            ({"step_queued": 0.2, "n_throttled": 240, "num_workers": 1}, 0, "stopped the training in 40%"),
            ({"making_queued": 0.2, "worker_threads": {}}, 0, "and the making of batches 20%: use fewer workers"),
            ({"torch_threads": 32}, 0, "32 threads in the training on 4 usable cores: torch.set_num_threads(4)"),
            ({}, 0.3, "Other programs used 30% of the cores"),
            ({"file_system": "nfs4"}, 0, "on nfs4 at /data, and 20% of the time goes into waiting for storage"),
        ],
    )
    def test_says_what_is_scarce_and_what_to_do(self, scarce, others_share, words):
        _, told = replace(WELL, **scarce).sentences(SHARES, others_share)
        assert all(part in told for part in words.split(" .* ")), told

    def test_names_the_library_whose_threads_crowd_the_workers(self):
        _, crowded, told = replace(WELL, step_queued=0.2).sentences(SHARES, 0.0)
        assert crowded.startswith("The step waits for a core 20%")
        assert (
            told == "4 workers with 4 threads of cv2 each share 4 usable cores: cv2.setNumThreads(0) in worker_init_fn."
        )

    @pytest.mark.parametrize(
        ("fine", "shares"),
        [
            ({"step_queued": 0.5, "making_queued": 0.5}, {"compute": 0.05, "prepare": 0.05, "fetch": 0.9}),
            ({"file_system": "nfs4"}, {"fetch": 0.01}),
            ({"file_system": "fuse.fuse-overlayfs"}, {}),
            ({"pressure": {"cpu": 1.0, "io": 1.0}}, {}),  # what workers are there for
        ],
    )  # fmt: skip
    def test_is_silent_on_what_costs_little(self, fine, shares):
        assert len(replace(WELL, **fine).sentences(SHARES | shares, 0.0)) == 1


class TestTheCore:
    """Seconds in the run queue, by readings that are known."""

    def test_is_waited_for_within_steps_and_within_the_making(self):
        epoch = Epoch(0.0, 1, ended_s=100.0)
        epoch.batches = [  # 2 s of waiting, of which 1 s in the queue, and 8 s of the step, of which 3 s
            Batch(10.0 * n, 10.0 * n + 2, 0, None, n, 0.0, 0.0, 0.0, "training", 4.0 * n, 4.0 * n + 1)
            for n in range(10)
        ]
        record = Record()
        record.loaders = [SeenLoader(0, "DataLoader", LoaderTraits(num_workers=1), [epoch])]
        made = [BatchTiming(10.0 * n, 10.0 * n + 4, 3.0, 0.0, 0.0, 1.0) for n in range(10)]
        record.times = lambda loader: {0: {0: made}}
        accounts = find_accounts(record)
        assert accounts.step_queued == pytest.approx(3 / 8)
        assert accounts.making_queued == pytest.approx(1 / 4)

    def test_is_not_spoken_of_where_the_kernel_does_not_count(self, monkeypatch):
        for module in (record, worker):
            monkeypatch.setattr(module, "run_queue_s", lambda: 0.0)
        found = watched_while(DataLoader(TensorDataset(torch.zeros(120, 4)), 2)).report().resources
        assert (found.step_queued, found.making_queued) == (None, None)
        assert "waiting for a core" not in found.facts()


def more_threads(worker):
    torch.set_num_threads(3)


def test_workers_tell_their_threads():
    data = TensorDataset(torch.zeros(40, 4))
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    assert watched_while(DataLoader(data, 2, **options)).report().resources.worker_threads["torch"] == 1
    found = watched_while(DataLoader(data, 2, **options, worker_init_fn=more_threads)).report().resources
    assert (found.worker_threads["torch"], found.num_workers) == (3, 2)
