"""Requests in flight: as many as were asked for, no more bytes than stated, and the same batches as without."""

import gc
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

import labkit as lk
from labkit.loading.batch_loader import BatchLoader
from labkit.loading.read_ahead import AfterReads, Reader, ReadsAhead, look_ahead
from labkit.loading.resume import Progress
from tests.loading import eventually
from tests.scripted_server import serve_script

_LONGEST_S = 20  # for what comes at once, if it comes


@pytest.fixture(scope="module")
def photos(first_photos):
    return lk.FolderStore(first_photos(24))


def store_of(photos, read):
    """A store of the same photos whose reads are `read(key)`."""
    return SimpleNamespace(keys=photos.keys, read=read)


def batches_of(loader):
    return [(images.clone(), labels) for images, labels in loader]


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(*images) and torch.equal(*labels)
        for images, labels in (zip(*pair, strict=True) for pair in zip(one, other, strict=True))
    )


class TestLookAhead:
    @given(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=12),
        st.integers(0, 20),
        st.integers(1, 4),
    )
    def test_each_batch_with_what_comes(self, batches, count, stride):
        found = list(look_ahead(iter(batches), count, stride))
        assert [indices for indices, _ in found] == batches
        for number, (_, coming) in enumerate(found):
            assert coming == [index for batch in batches[number + stride :: stride] for index in batch][:count]

    def test_no_batch_is_drawn_before_its_time(self):
        drawn = []
        ahead = look_ahead((drawn.append(number) or [number] * 4 for number in range(9)), 6)
        assert next(ahead) == ([0] * 4, [1] * 4 + [2] * 2)
        assert drawn == [0, 1, 2]
        drawn.clear()
        assert next(look_ahead((drawn.append(number) or [number] for number in range(9)), 0)) == ([0], [])
        assert drawn == [0]


class TestSameBatches:
    @pytest.mark.parametrize("reads_in_flight", [1, 3, 8, 100])
    def test_as_without(self, photos, reads_in_flight):
        plain, far = (
            BatchLoader(photos, batch_size=7, size=64, num_threads=2, reads_in_flight=number)
            for number in (None, reads_in_flight)
        )
        for _ in range(2):
            assert equal(batches_of(plain), batches_of(far))

    def test_whatever_read_ends_first(self, photos):
        """The last of a batch's reads ends first."""
        gates = {key: threading.Event() for key in photos.keys()}  # noqa: SIM118
        order = list(gates)

        def read(key):
            before = order.index(key) + 1
            if before % 4 and before < len(order):
                gates[order[before]].wait(_LONGEST_S)
            gates[key].set()
            return photos.read(key)

        options = {"batch_size": 4, "size": 64, "shuffle": False}
        far = BatchLoader(store_of(photos, read), reads_in_flight=8, **options)
        assert equal(batches_of(far), batches_of(BatchLoader(photos, **options)))

    def test_epochs_side_by_side(self, photos):
        far, plain = (BatchLoader(photos, batch_size=5, size=64, reads_in_flight=number) for number in (6, None))
        for one, other in zip(zip(far, far, strict=True), zip(plain, plain, strict=True), strict=True):
            assert equal(one, other)

    def test_skipped_images(self, photos, tmp_path):
        def read(key):
            return b"text" if key in photos.keys()[3:6] else photos.read(key)

        options = {"batch_size": 8, "size": 64, "shuffle": False, "on_error": "skip"}
        plain, far = (BatchLoader(store_of(photos, read), reads_in_flight=n, **options) for n in (None, 5))
        assert equal(batches_of(plain), batches_of(far))
        assert sorted(skip.key for skip in far.skipped) == photos.keys()[3:6]

    @pytest.mark.parametrize("reads_in_flight", [None, 9])
    def test_a_resume_with_reads_ahead(self, photos, reads_in_flight):
        """What was read ahead and not given comes after the resume."""
        options = {"batch_size": 4, "size": 64}
        whole = batches_of(BatchLoader(photos, **options))
        stopped = BatchLoader(photos, reads_in_flight=9, **options)
        begun = iter(stopped)
        next(begun)
        next(begun)
        resumed = BatchLoader(photos, reads_in_flight=reads_in_flight, **options)
        resumed.load_state_dict(stopped.state_dict())
        assert equal(batches_of(resumed), whole[2:])

    def test_in_processes(self, photos):
        plain = BatchLoader(photos, batch_size=5, size=64)
        far = BatchLoader(photos, batch_size=5, size=64, num_processes=2, num_threads=2, reads_in_flight=7)
        for _ in range(2):
            assert equal(batches_of(plain), batches_of(far))
        next(iter(far))  # what was asked for ahead belongs to no later epoch
        next(iter(plain))
        assert equal(batches_of(plain), batches_of(far))


class TestInFlight:
    @pytest.mark.parametrize("reads_in_flight", [2, 8, 12])
    def test_as_many_as_asked_for_across_batches(self, photos, reads_in_flight):
        """No read ends before so many have begun; a pipe that is empty between two batches would break the barrier."""
        barrier = threading.Barrier(reads_in_flight, timeout=_LONGEST_S)

        def read(key):
            barrier.wait()
            return photos.read(key)

        loader = BatchLoader(
            store_of(photos, read), batch_size=4, size=64, num_threads=1, prefetch_factor=1,
            reads_in_flight=reads_in_flight,
        )  # fmt: skip
        assert sum(len(labels) for _, labels in loader) == 24

    def test_no_more_than_asked_for(self, photos):
        lock, running = threading.Lock(), Counter()

        def read(key):
            with lock:
                running["now"] += 1
                running["most"] = max(running["most"], running["now"])
            try:
                return photos.read(key)
            finally:
                with lock:
                    running["now"] -= 1

        list(BatchLoader(store_of(photos, read), batch_size=8, size=64, reads_in_flight=3))
        assert 1 <= running["most"] <= 3

    def test_a_worker_process_reads_for_its_next_batch(self, photos):
        """What a worker is given: its batch, and its share of requests ahead for that after next, which is its own."""
        asked = []

        def read(key):
            asked.append(photos.keys().index(key))
            return photos.read(key)

        options = {"batch_size": 4, "size": 64, "shuffle": False, "num_threads": 2}
        loader = BatchLoader(store_of(photos, read), num_processes=2, reads_in_flight=6, **options)
        expected = batches_of(BatchLoader(photos, **options))
        data = loader._processes._loader
        data.sampler.batches = loader._batches_of(Progress(0))
        tasks = list(data.sampler)
        assert [(indices.plain(), coming) for indices, coming in tasks[:2]] == [
            ([0, 1, 2, 3], [8, 9, 10]),
            ([4, 5, 6, 7], [12, 13, 14]),
        ]
        made = [data.dataset[task] for task in tasks[0::2]]  # as the first of two workers
        assert equal(made, expected[0::2])
        assert sorted(asked) == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]

    def test_bytes_in_memory_are_bounded(self, photos):
        """While a batch is used, the reads ahead end, and no more than stated are kept."""

        alive, asked = Counter(), []

        class Counted(bytes):
            def __new__(cls, data):
                counted = super().__new__(cls, data)
                alive[id(counted)] = 1
                return counted

            def __del__(self):
                del alive[id(self)]

        def read(key):
            asked.append(key)
            return Counted(photos.read(key))

        options = {"batch_size": 2, "size": 64, "prefetch_factor": 2, "num_threads": 2}
        loader = iter(BatchLoader(store_of(photos, read), reads_in_flight=5, **options))
        for number in range(4):
            next(loader)
            # The batch that was given, two being made, and the reads ahead of the last that was begun.
            most = 2 * (number + 3) + 5
            assert eventually(lambda most=most: len(asked) == most, _LONGEST_S)
            assert eventually(lambda: len(alive) == 5, _LONGEST_S)  # those of decoded batches are let go
            assert len(asked) == most
        loader.close()
        del loader
        assert eventually(lambda: not alive, _LONGEST_S)

    def test_decoding_threads_do_not_wait_for_a_read(self, photos):
        """With one thread for decoding, and the first image of a batch late, the second batch is decoded meanwhile."""
        late, decoded = threading.Event(), threading.Event()
        keys = photos.keys()

        def read(key):
            if key == keys[0]:
                assert decoded.wait(_LONGEST_S)
            return photos.read(key)

        loader = BatchLoader(
            store_of(photos, read), batch_size=4, size=64, num_threads=1, shuffle=False, reads_in_flight=2
        )
        fill = loader._filler.fill

        def watched(rows, indices, plan, reads):
            assert all(one.done() for one in reads)
            empty = fill(rows, indices, plan, reads)
            if 4 in indices:
                decoded.set()
            return empty

        loader._filler.fill = watched
        assert len(list(loader)) == 6
        assert decoded.is_set()
        assert not late.is_set()

    def test_http_keeps_as_many_connections(self, photos):
        barrier = threading.Barrier(12, timeout=_LONGEST_S)

        def meet(handler):
            barrier.wait()
            handler.answer(handler.whole())

        with serve_script() as server:
            for key in photos.keys():  # noqa: SIM118
                server.files[f"/{key}"] = photos.read(key)
                server.script[f"/{key}"] = [meet]
            store = lk.HttpStore(server.url, keys=photos.keys())
            far = BatchLoader(store, batch_size=6, size=64, reads_in_flight=12)
            assert equal(batches_of(far), batches_of(BatchLoader(photos, batch_size=6, size=64)))
            assert server.connections == 12


class TestErrors:
    def test_a_key_is_named(self, photos):
        def read(key):
            if key == photos.keys()[13]:
                raise OSError("gone")
            return photos.read(key)

        loader = BatchLoader(store_of(photos, read), batch_size=4, size=64, shuffle=False, reads_in_flight=8)
        came = []
        with pytest.raises(OSError, match="gone") as caught:
            came.extend(loader)
        assert caught.value.__notes__ == [f"while loading {photos.keys()[13]}"]
        assert len(came) == 3

    @pytest.mark.parametrize("wrong", [0, 2.5, True])
    def test_a_wrong_number(self, photos, wrong):
        with pytest.raises(ValueError, match="reads_in_flight must be an integer >= 1"):
            BatchLoader(photos, reads_in_flight=wrong)

    def test_a_pixel_store_has_nothing_to_fetch(self, photos, tmp_path):
        pixels = lk.PixelStore.build(photos, tmp_path / "a.pixels", short_side=32, engine="threads", progress=False)
        with pytest.raises(ValueError, match="reads_in_flight=4 is for encoded images"):
            BatchLoader(pixels, reads_in_flight=4)

    def test_break_gives_up_what_has_not_begun(self, photos):
        asked, go_on = [], threading.Event()

        def read(key):
            asked.append(key)
            if len(asked) > 2:
                go_on.wait(_LONGEST_S)
            return photos.read(key)

        loader = BatchLoader(
            store_of(photos, read), batch_size=2, size=64, num_threads=1, prefetch_factor=1, reads_in_flight=3
        )
        for _ in loader:
            break  # returns, though three reads are on their way
        assert eventually(lambda: len(asked) == 5, _LONGEST_S)
        n_asked = len(asked)
        go_on.set()
        assert sum(len(labels) for _, labels in loader) == 24
        assert len(asked) == n_asked + 24

    def test_no_thread_is_left(self, photos):
        others = threading.enumerate()
        loader = BatchLoader(photos, batch_size=4, size=64, reads_in_flight=3)
        next(iter(loader))
        new = [thread for thread in threading.enumerate() if thread not in others]
        ours = [thread for thread in new if thread.name.startswith(("labkit-batches", "labkit-reads"))]
        assert len(ours) >= 2
        del loader
        gc.collect()
        for thread in ours:
            thread.join(_LONGEST_S)
        assert not any(thread.is_alive() for thread in ours)


class TestReadsAhead:
    def test_each_is_asked_for_once_and_others_are_given_up(self):
        asked = []

        def read(key):
            asked.append(key)
            return key.encode()

        ahead = ReadsAhead(Reader(SimpleNamespace(read=read), [str(number) for number in range(20)], 1))
        assert [one.result() for one in ahead.take([0, 1], [2, 3])] == [b"0", b"1"]
        assert [one.result() for one in ahead.take([2, 3], [4])] == [b"2", b"3"]
        assert asked[:4] == ["0", "1", "2", "3"]
        assert [one.result() for one in ahead.take([9, 4], [])] == [b"9", b"4"]

    def test_processes_share_the_requests(self):
        assert [Reader(SimpleNamespace(), [], 8).share(number).reads_in_flight for number in (1, 3, 9)] == [8, 3, 1]


class TestAfterReads:
    def test_it_runs_when_the_last_read_ends(self):
        reads = [Future(), Future()]
        with ThreadPoolExecutor(1) as pool:
            task = AfterReads(pool, reads, lambda done: [one.result() for one in done])
            reads[1].set_result("b")
            assert not task.running() | task.done()
            reads[0].set_result("a")
            assert task.result(_LONGEST_S) == ["a", "b"]

    def test_an_error_of_the_task(self):
        read = Future()
        read.set_exception(KeyError("a"))
        with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
            AfterReads(pool, [read], lambda done: done[0].result()).result(_LONGEST_S)

    def test_cancelled_before_its_reads(self):
        reads = [Future(), Future()]
        reads[0].set_running_or_notify_cancel()
        with ThreadPoolExecutor(1) as pool:
            task = AfterReads(pool, reads, lambda done: pytest.fail("it was cancelled"))
            assert task.cancel()
            assert [one.cancelled() for one in reads] == [False, True]
            reads[0].set_result("a")
        assert task.cancelled()

    def test_a_pool_that_has_ended(self):
        pool, read = ThreadPoolExecutor(1), Future()
        task = AfterReads(pool, [read], lambda done: None)
        pool.shutdown()
        read.set_result("a")
        with pytest.raises(RuntimeError, match="shutdown"):
            task.result(_LONGEST_S)
