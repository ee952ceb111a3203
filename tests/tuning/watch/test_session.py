"""watch: known stalls, every kind of loader, and what it costs."""

import math
import time
import timeit
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import labkit as lk
from labkit.errors import NothingSeen
from labkit.watching import advice
from labkit.watching.findings import SHARES
from labkit.watching.observe import Control
from labkit.watching.program import Replay, Steps
from tests.noted_stalls import NotedStalls, Notes
from tests.tuning.test_stalls import KNOWN

pytestmark = pytest.mark.alone
METHODS = [(DataLoader, "__init__"), (DataLoader, "_get_iterator"), (lk.BatchLoader, "__iter__"), (torch.Tensor, "to")]


def optimizer():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 1e-6)


def train(loader, step_s=0.002, epochs=1):
    model, steps = optimizer()
    for _ in range(epochs):
        for batch in loader:
            x = batch[0] if isinstance(batch, list | tuple) else batch
            steps.zero_grad()
            model(x.flatten(1)[:, :4].float()).mean().backward()
            steps.step()
            time.sleep(step_s)


class _Ended(Exception):
    pass


def _end():
    raise _Ended


# Copies are seen on CUDA only; here they belong to the step.
RUNGS = {name: rung for name, (_, rung) in KNOWN.items()} | {"copy": "none", "fetch and copy": "workers"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("replays", [False, True], ids=["observed", "replayed"])
@pytest.mark.parametrize("name", KNOWN)
def test_known_stalls_in_real_time(name, replays, monkeypatch):
    monkeypatch.setattr(advice, "usable_cores", lambda: 2)
    stalls, _ = KNOWN[name]
    notes = Notes()
    notes._round.value = 0
    loader = NotedStalls(**vars(stalls)).loader(notes)
    _, steps = optimizer()
    with lk.watch() as watched, suppress(_Ended):
        watched.observer.control = (partial(Replay, watched) if replays else Steps)(30, _end, Control())
        for _ in loader:
            with notes("step"):
                steps.step()
                time.sleep(stalls.step + stalls.copy)
    found = watched.report()
    measured = {name: seconds for name, seconds in notes.medians().items() if name != "copy"}
    truth = replace(stalls, copy=0.0, **measured)
    assert sum(found.shares.values()) == pytest.approx(1)
    off = max(abs(found.shares[cause] - truth.shares()[cause]) for cause in SHARES)
    assert off < 0.05, f"found {found.shares}, true {truth.shares()}"
    assert found.recommendation.rung == RUNGS[name]
    if replays:
        assert not found.is_bound
        assert found.ceiling == pytest.approx(1 / truth.shares()["compute"], rel=0.1)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stateful", [False, True])
def test_torch_is_as_it_was(num_workers, stateful):
    kind = DataLoader
    if stateful:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    before = [getattr(owner, name) for owner, name in METHODS]
    loader = kind(TensorDataset(torch.zeros(40, 4)), 2, num_workers=num_workers)
    with lk.watch() as watched:
        train(loader, epochs=2)
    assert [getattr(owner, name) for owner, name in METHODS] == before
    assert loader.worker_init_fn is None
    found = watched.report()
    assert found is watched.report()
    row = found.loaders.iloc[0]
    assert (row["role"], row["n_batches"], row["num_workers"]) == ("training", 40, num_workers)
    assert row["getitem_ms"] >= 0
    assert set(found.spans["lane"]) == ({"host", "worker 0"} if num_workers else {"host"})


def test_several_loaders_a_step_and_a_validation():
    def slow(samples):
        time.sleep(0.004)
        return torch.stack([sample[0] for sample in samples])

    first, second, other = (DataLoader(TensorDataset(torch.zeros(80, 4)), 2, collate_fn=slow) for _ in range(3))
    model, steps = optimizer()
    with lk.watch() as watched:
        for number, (x, y) in enumerate(zip(first, second, strict=True)):
            steps.zero_grad()
            model(x + y).mean().backward()
            steps.step()
            time.sleep(0.008)
            if number == 20:
                list(other)
    found = watched.report()
    assert list(found.loaders["role"]) == ["training", "training, too", "other"]
    assert found.shares["compute"] == pytest.approx(0.5, abs=0.1)  # without the validation
    assert found.shares["fetch"] == pytest.approx(0.5, abs=0.1)


class Numbers(IterableDataset):
    def __iter__(self):
        return (torch.full((4,), float(number)) for number in range(60))


def test_iterable_data_and_batch_loader(tmp_path):
    root = lk.make_photos(tmp_path, 24)
    loader = lk.BatchLoader(lk.FolderStore(root), size=16, batch_size=2, num_threads=1)
    for each, n_batches in ((DataLoader(Numbers(), 2, num_workers=2), 60), (loader, 12)):
        with lk.watch() as watched:
            train(each)
        assert watched.report().loaders.iloc[0]["n_batches"] == n_batches


def test_nothing_to_see_is_said():
    with lk.watch() as watched:
        pass
    with pytest.raises(NothingSeen, match=r"no torch\.utils\.data\.DataLoader"):
        watched.report()
    with lk.watch() as watched:
        next(iter(DataLoader(TensorDataset(torch.zeros(4, 1)))))
    with pytest.raises(NothingSeen, match=r"too few batches were seen \(1\)"):
        watched.report()


def test_an_error_in_the_block_is_the_blocks_own():
    with pytest.raises(ZeroDivisionError), lk.watch() as watched:  # noqa: PT012 - what is raised in between
        train(DataLoader(TensorDataset(torch.zeros(20, 4)), 2))
        1 / 0  # noqa: B018
    [_, few] = watched.report().sentences
    assert few.startswith("Only 6 batches were seen after the first: too few for a ceiling or advice.")


def test_a_ceiling_that_was_not_measured_says_so():
    with lk.watch() as watched:
        train(DataLoader(TensorDataset(torch.zeros(60, 4)), 2))
    found = watched.report()
    assert found.sentences[1].startswith("Were data free, it would be at least ")
    assert "<img" in found._repr_html_()


@pytest.mark.parametrize(
    ("interval", "is_bound", "words", "title"),
    [
        ((1.5, 2.5), True, "at least 1.50x as fast (as it was seen, 2.00x [1.50, 2.50])", "at least 1.50x"),
        ((0.5, 9.0), True, "at least 1.00x as fast (as it was seen, 2.00x [0.50, 9.00])", "at least 1.00x"),
        ((math.nan, math.nan), True, "at least 2.00x as fast", "at least 2.00x"),
        ((1.5, 2.5), False, "2.00x [1.50, 2.50] as fast", "2.00x"),
        ((math.nan, math.nan), False, "2.00x as fast", "2.00x"),
    ],
)
def test_at_least_goes_with_the_lower_end_of_the_interval(interval, is_bound, words, title):
    with lk.watch() as watched:
        train(DataLoader(TensorDataset(torch.zeros(8, 4)), 2))
    low, high = interval
    found = replace(
        watched.report(), ceiling=2.0, ceiling_low=low, ceiling_high=high, is_bound=is_bound, n_batches=30,
        cpu_share=None, gpu_utilization=None,
    )  # fmt: skip
    assert found.sentences[1] == f"Were data free, it would be {words}."
    assert found.plot().get_title("left") == f"ceiling: {title}"


@pytest.mark.exhaustive
def test_the_hooks_cost_little():
    """A print of the cost, and a bound so wide that only a mistake passes it."""
    data = TensorDataset(torch.zeros(10_000, 1))

    def loop():
        for _ in DataLoader(data, 1):
            pass

    plain = min(timeit.repeat(loop, number=1, repeat=3))
    with lk.watch():
        watched = min(timeit.repeat(loop, number=1, repeat=3))
    print(f"{1e6 * (watched - plain) / 10_000:.1f} us a batch")
