"""keep_freed_memory(): does a process keep the memory that it frees?"""

import platform
import subprocess
import sys
from contextlib import closing

import pytest

import labkit as lk

# Each pass frees 36 MB at the end of the heap, in blocks of 12 MB: more than twice the largest block freed before.
_PASSES = """
import resource, sys
import numpy
if sys.argv[1] == "prepared":
    from labkit.util.process import keep_freed_memory
    keep_freed_memory()
bytearray(12_000_000)
def one_pass():
    blocks = [bytearray(12_000_000) for _ in range(3)]
one_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    one_pass()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def _faults_per_pass(state: str) -> int:
    done = subprocess.run([sys.executable, "-c", _PASSES, state], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other limits")
def test_a_prepared_process_does_not_fault_on_memory_that_it_has_freed():
    assert _faults_per_pass("new") > 5_000
    assert _faults_per_pass("prepared") < 100


class Faults:
    """A data set of page faults: of freeing 36 MB in blocks of 12 MB, and allocating it again."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        import resource

        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [bytearray(12_000_000) for _ in range(3)]
        del blocks
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other limits")
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_workers_of_make_loader_keep_the_memory_that_they_free(start_method):
    with closing(lk.make_loader(Faults(), lk.LoaderConfig(1, 1, start_method=start_method), shuffle=False)) as loader:
        faults = [int(batch) for batch in loader]
    assert max(faults[1:]) < 100
