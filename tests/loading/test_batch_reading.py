"""Who reads and decodes the batches of BatchLoader: its threads, and requests in flight; and that all end."""

import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch

import labkit as lk
from tests.loaders import MeetingStore, eventually, new_threads, same, store_that_reads
from tests.scripted_server import serve_script

LONGEST_S = 20  # for what comes at once, if it comes


def loader_of(store, **options):
    return lk.BatchLoader(store, **{"size": 32, "batch_size": 4, "num_threads": 2, **options})


class TestThreads:
    @pytest.mark.parametrize("reads_in_flight", [None, 3])
    def test_end_with_a_loop_that_is_left(self, pictures, reads_in_flight):
        before = threading.enumerate()
        loader = loader_of(pictures, reads_in_flight=reads_in_flight)
        next(iter(loader))
        assert new_threads(before)
        del loader
        assert eventually(lambda: not new_threads(before), LONGEST_S)

    @pytest.mark.parametrize(("reads_in_flight", "n_threads"), [(None, 2), (3, 3)])
    def test_are_no_more_than_asked_for_and_stay_for_all_epochs(self, pictures, reads_in_flight, n_threads):
        """OpenCV keeps memory for each thread that has ended."""
        seen = set()

        def read(key):
            seen.add(threading.get_ident())
            return pictures.read(key)

        loader = loader_of(store_that_reads(pictures, read), reads_in_flight=reads_in_flight)
        for _ in range(4):
            list(loader)
        next(iter(loader))
        assert 1 <= len(seen) <= n_threads

    def test_are_a_forked_process_own(self, first_photos):
        """In a process of its own: a fork of pytest's would copy the locks that pytest's own threads hold."""
        script = """
import os, sys, zlib
import labkit as lk

loader = lk.BatchLoader(sys.argv[1], batch_size=2, size=16, num_threads=2)
list(loader)
digest = lambda: [zlib.crc32(images.numpy().tobytes()) for images, _ in loader]
expected = digest()
loader.set_epoch(1)
if child := os.fork():
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, len(expected))
else:
    os._exit(0 if digest() == expected else 1)
"""
        command = [sys.executable, "-c", script, first_photos(6)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout == "0 3\n"

    def test_run_torch_in_one_thread_and_leave_its_threads_elsewhere(self, pictures):
        within, after, before = set(), [], torch.get_num_threads()
        torch.set_num_threads(3)
        both, met = threading.Barrier(2), threading.local()  # neither thread is still to begin when torch is asked

        def read(key):
            if not hasattr(met, "at"):
                met.at = both.wait(timeout=LONGEST_S)
            within.add(torch.get_num_threads())
            return pictures.read(key)

        try:
            list(loader_of(store_that_reads(pictures, read)))
            thread = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert (within, after, torch.get_num_threads()) == ({1}, [3], 3)
        finally:
            torch.set_num_threads(before)

    def test_are_as_many_as_this_rank_has_cores(self, pictures, monkeypatch):
        assert lk.BatchLoader(pictures).num_threads == lk.usable_cores()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(lk.usable_cores()))
        assert lk.BatchLoader(pictures).num_threads == 1


class TestReadsInFlight:
    def test_give_the_same_batches_whatever_ends_first(self, pictures):
        """The last of a batch's reads ends first."""
        order = list(pictures.keys())
        gates = {key: threading.Event() for key in order}

        def read(key):
            before = order.index(key) + 1
            if before % 4 and before < len(order):
                gates[order[before]].wait(LONGEST_S)
            gates[key].set()
            return pictures.read(key)

        far = loader_of(store_that_reads(pictures, read), shuffle=False, reads_in_flight=8)
        assert same(list(far), list(loader_of(pictures, shuffle=False)))

    @pytest.mark.parametrize("reads_in_flight", [None, 9])
    def test_resume_with_what_was_read_ahead_and_not_given(self, pictures, reads_in_flight):
        options = {"batch_size": 2}
        whole = list(loader_of(pictures, **options))
        stopped = loader_of(pictures, reads_in_flight=9, **options)
        begun = iter(stopped)
        next(begun), next(begun)
        resumed = loader_of(pictures, reads_in_flight=reads_in_flight, **options)
        resumed.load_state_dict(stopped.state_dict())
        assert same(list(resumed), whole[2:])

    def test_ask_for_each_image_once_and_keep_nothing_of_a_loop_that_was_left(self, pictures):
        asked = []

        def read(key):
            asked.append(key)
            return pictures.read(key)

        options = {"batch_size": 2}
        far = loader_of(store_that_reads(pictures, read), reads_in_flight=6, **options)
        plain = loader_of(pictures, **options)
        for n_epochs in (1, 2):
            assert same(list(far), list(plain))
            assert Counter(asked) == dict.fromkeys(pictures.keys(), n_epochs)
        next(iter(far)), next(iter(plain))  # what was asked for ahead belongs to no later epoch
        assert same(list(far), list(plain))

    @pytest.mark.parametrize("reads_in_flight", [2, 12])
    def test_are_as_many_as_asked_for_across_batches(self, pictures, tmp_path, reads_in_flight):
        """A pipe that is empty between two batches would break their meeting."""
        store = MeetingStore(pictures, reads_in_flight, 12 // reads_in_flight, tmp_path / "notes")
        loader = loader_of(store, num_threads=1, prefetch_factor=1, reads_in_flight=reads_in_flight)
        assert sum(len(labels) for _, labels in loader) == 12

    def test_keep_no_more_bytes_than_stated(self, pictures):
        """While a batch is used, the reads ahead end, and those of decoded batches are let go."""
        asked, alive = [], set()

        class Read(bytes):
            def __del__(self):
                alive.discard(id(self))

        def read(key):
            data = Read(pictures.read(key))
            alive.add(id(data))
            asked.append(key)
            return data

        loader = iter(loader_of(store_that_reads(pictures, read), batch_size=1, prefetch_factor=2, reads_in_flight=4))
        for number in range(4):
            next(loader)
            # The batch that was given, two being made, and the reads ahead of the last that was begun.
            most = number + 3 + 4
            assert eventually(lambda most=most: len(asked) == most, LONGEST_S)
            assert eventually(lambda: len(alive) == 4, LONGEST_S)
            assert len(asked) == most
        loader.close()
        del loader
        assert eventually(lambda: not alive, LONGEST_S)

    def test_over_http_have_as_many_connections(self, pictures):
        barrier = threading.Barrier(12, timeout=LONGEST_S)

        def meet(handler):
            barrier.wait()
            handler.answer(handler.whole())

        with serve_script() as server:
            for key in pictures.keys():  # noqa: SIM118
                server.files[f"/{key}"] = pictures.read(key)
                server.script[f"/{key}"] = [meet]
            far = loader_of(lk.HttpStore(server.url, keys=pictures.keys()), batch_size=6, reads_in_flight=12)
            assert same(list(far), list(loader_of(pictures, batch_size=6)))
            assert server.connections == 12

    @pytest.mark.parametrize("reads_in_flight", [None, 8])
    def test_that_fail_name_their_key_after_the_batches_before(self, pictures, reads_in_flight):
        keys = pictures.keys()

        def read(key):
            if key == keys[9]:
                raise OSError("gone")
            return pictures.read(key)

        came = []
        with pytest.raises(OSError, match="gone") as caught:
            came.extend(loader_of(store_that_reads(pictures, read), shuffle=False, reads_in_flight=reads_in_flight))
        assert caught.value.__notes__ == [f"while loading {keys[9]}"]
        assert len(came) == 2

    def test_that_have_not_begun_are_given_up_by_a_break(self, pictures):
        asked, go_on, first_batch = [], threading.Event(), list(pictures.keys())[:2]

        def read(key):
            asked.append(key)
            if key not in first_batch:
                go_on.wait(LONGEST_S)
            return pictures.read(key)

        options = {"batch_size": 2, "num_threads": 1, "prefetch_factor": 1, "reads_in_flight": 3, "shuffle": False}
        loader = loader_of(store_that_reads(pictures, read), **options)
        for _ in loader:
            break  # returns, though three reads are on their way
        assert eventually(lambda: len(asked) == 5, LONGEST_S)
        go_on.set()
        assert sum(len(labels) for _, labels in loader) == 12
        assert len(asked) == 5 + 12


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["", ", reads_in_flight=4"])
def test_a_pass_that_a_script_leaves_open_ends_in_silence(first_photos, tmp_path, options):
    """At the end of the interpreter, when the names of modules are gone."""
    script = tmp_path / "script.py"
    script.write_text(
        "import labkit as lk\n"
        "if __name__ == '__main__':\n"
        f"    batches = iter(lk.BatchLoader({str(first_photos(6))!r}, size=32, batch_size=2{options}))\n"
        "    print(len(next(batches)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
