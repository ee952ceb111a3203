"""The memory of a training: by what the kernel's files say, by workers that take a known amount, and in words."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from labkit.watching.advice import Costs, advise
from labkit.watching.linux import Memory, ProcessMemory, parse_smaps, room_bytes
from labkit.watching.loaders import LoaderTraits
from labkit.watching.resources import Resources
from tests.watching.trained import watched_while

SMAPS = """55d0b000-7ffd4000 ---p 00000000 00:00 0    [rollup]
Rss:              300000 kB
Pss:              150000 kB
Shared_Clean:      90000 kB
Shared_Dirty:      10000 kB
Private_Clean:      5000 kB
Private_Dirty:    195000 kB
Anonymous:        210000 kB
"""
MEMINFO = "MemTotal: 64000 kB\nMemFree: 2000 kB\nMemAvailable: 50000 kB\n"
GB = 10**9


def test_private_memory_is_told_from_shared():
    assert parse_smaps(SMAPS) == ProcessMemory(200_000 * 1024, 100_000 * 1024, 210_000 * 1024)
    assert parse_smaps("") is None


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/job\n", {}, 50_000 * 1024),
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "7"}, 50_000 * 1024),
        ("0::/job\n", {"job/memory.max": "30000", "job/memory.current": "10000"}, 20_000),
        # files in the cache are free, and a parent's limit counts, too
        ("0::/a/b\n", {"a/memory.max": "30000", "a/memory.current": "29000",
                       "a/memory.stat": "anon 1\nactive_file 3000\ninactive_file 4000\n"}, 8000),
        ("5:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9000",
                             "memory/job/memory.usage_in_bytes": "4000"}, 5000),
        ("5:memory:/job\n", {"memory/job/memory.limit_in_bytes": str(2**63 - 4096),
                             "memory/job/memory.usage_in_bytes": "4000"}, 50_000 * 1024),
    ],
)  # fmt: skip
def test_there_is_room_up_to_the_lowest_limit(tmp_path, membership, limits, expected):
    for name, text in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    assert room_bytes(tmp_path / "cgroup", tmp_path / "membership", MEMINFO) == expected


KNOWN = Memory(2 * GB, 8, int(1.4 * GB), GB, None, 20 * GB)


@pytest.mark.parametrize(
    ("memory", "options", "words"),
    [
        (Memory(), {}, ""),
        (Memory(2 * GB, room_bytes=3 * GB), {}, "2.0 GB of RAM in the training process; 3.0 GB free"),
        (KNOWN, {}, "2.0 GB of RAM in the training process, 1.4 GB in each of 8 workers; room for 14 more workers"),
        (KNOWN, {"n_sharing": 2}, "8 workers; room for 7 more workers in each of 2 processes"),
        (KNOWN, {"tells_room": False}, "1.4 GB in each of 8 workers"),
        (Memory(2 * GB, 1, 3 * GB, GB, None, GB), {}, "3.0 GB in the worker; room for no more workers"),
        (
            Memory(2 * GB, 8, GB, GB, 25e6, 10 * GB), {},
            "room for 10 more workers; a worker grows by 25 MB a minute, so that nothing is left after 50 min",
        ),
        (Memory(2 * GB, 8, 10**7, GB, 0.0, 10 * GB), {}, "10 MB in each of 8 workers; plenty of RAM is left"),
        (Memory(2 * GB, 8, GB, GB, 5e6, 10 * GB), {}, "room for 10 more workers"),
    ],
)  # fmt: skip
def test_its_words_have_the_budget(memory, options, words):
    assert memory.describe(**options).endswith(words)


class TakesMemory(Dataset):
    """Each worker takes 100 MB for itself."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.own = torch.ones(25_000_000)
        return torch.zeros(4)


def test_a_report_has_the_private_memory_of_workers_that_live():
    loader = DataLoader(TakesMemory(), 2, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    found = watched_while(loader).report()
    memory = found.resources.memory
    assert memory.n_workers == 2
    assert 100e6 < memory.worker_private_bytes < 400e6
    assert memory.own_bytes > 50e6
    room = memory.describe().partition(";")[0]  # what is left is not said where cores are what is scarce
    assert room in " ".join(str(found).split())
    del loader


def test_no_more_workers_are_advised_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr("labkit.util.ranks.usable_cores", lambda: 4)
    known = {"step": 0.01, "prepare": 0.09, "together": 0.1, "making": 0.09}
    costs = Costs(**dict.fromkeys(("copy", "hand_over", "fetch", "start", "waiting", "step_cpu"), 0.0), **known)
    for most, action in ((None, "Use 4 persistent"), (2, "Use 2 persistent"), (1, "Do less for each sample")):
        [advice] = advise(costs, LoaderTraits(num_workers=1, n_batches=1000), most_workers=most)
        assert advice.action.startswith(action)


def test_a_machine_that_is_short_of_memory_is_advised_no_more_workers():
    known = Memory(2 * GB, 2, GB, GB, None, 20 * GB)
    short, usual = (Resources(num_workers=2, memory=known, pressure={"memory": share}) for share in (0.2, 0.0))
    shares = dict.fromkeys(("compute", "fetch", "prepare"), 0.3)
    assert (short.most_workers(shares, 0.0), usual.most_workers(shares, 0.0)) == (2, 22)
    assert "room for" not in " ".join(short.sentences(shares, 0.0))
    assert "room for 20 more" in " ".join(usual.sentences(shares, 0.0))
