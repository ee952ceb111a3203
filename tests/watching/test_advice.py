"""Advice: from what a loader and a step cost to what to change first, and what it should bring."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import labkit as lk
from labkit import course
from labkit.watching import advice
from labkit.watching.advice import Costs, expected_s
from labkit.watching.loaders import LoaderTraits


@pytest.fixture
def cores(monkeypatch):
    return lambda count: monkeypatch.setattr("labkit.util.ranks.usable_cores", lambda: count)


def loader_of(n_samples=120, **options):
    return DataLoader(TensorDataset(torch.zeros(n_samples, 3, 8, 8)), **options)


def costs_of(**changed):
    base = dict.fromkeys(Costs.__dataclass_fields__, 0.0) | {"step": 1.0, "together": 1.0, "making": None}
    return Costs(**(base | changed))


def advise(loader, **costs):
    traits = loader if isinstance(loader, LoaderTraits) else LoaderTraits.of(loader)
    return advice.advise(costs_of(**costs), traits)


def test_a_distant_store_gets_more_requests_before_it_is_decoded_once(photo_set):
    with course.serve_folder(photo_set) as url:
        far, near = (lk.BatchLoader(source, size=8, batch_size=2) for source in (lk.open_store(url), photo_set))
        waits = {"making": 2.0, "prepare": 1.0, "together": 2.0}
        [first, *_], [other, *_] = advise(far, **waits), advise(near, **waits)
    assert first.rung == "storage"
    assert "reads_in_flight=64" in first.action
    assert "to be read and decoded" in first.why
    assert "reads_in_flight" not in other.action


@pytest.mark.parametrize(
    ("num_workers", "making_s", "waiting", "step_s", "step_cpu_s", "best", "worst"),
    [
        (0, 2.0, 0.0, 1.0, 2.0, 3.0, 3.0),  # one after the other
        (2, 2.0, 0.0, 0.0, 0.0, 1.0, 1.3),  # workers share the making
        (8, 2.0, 0.0, 0.0, 0.0, 1.0, 1.3),  # but not more than the cores
        (8, 2.0, 1.0, 0.0, 0.0, 0.25, 0.25),  # waiting needs no core
        (2, 2.0, 0.0, 1.0, 1.0, 1.5, 1.95),  # a step of one thread has no barriers: cores slow one another
        (3, 2.0, 0.0, 2.0, 1.0, 2.0, 2.0),  # unless some of them have nothing to do
        (2, 2.0, 0.0, 1.0, 2.0, 2.0, 3.6),  # 4 s of computing, and 2 s of spinning
        (2, 2.0, 0.75, 1.0, 2.0, 1.25, 1.875),  # workers that mostly wait leave the cores to the step
        (2, 0.2, 0.0, 3.0, 0.0, 3.0, 3.0),  # a GPU's step needs no core, and nothing is faster than it
    ],
)
def test_workers_and_the_step_share_two_cores(num_workers, making_s, waiting, step_s, step_cpu_s, best, worst):
    costs = costs_of(making=making_s, waiting=waiting, step=step_s, step_cpu=step_cpu_s)
    assert expected_s(num_workers, costs, 2) == pytest.approx(best)
    assert expected_s(num_workers, costs, 2, at_worst=True) == pytest.approx(worst)


class TestWorkers:
    def test_are_shared_out_among_the_ranks_of_a_machine(self, cores, monkeypatch):
        cores(8)
        costs = {"prepare": 4.0, "together": 5.0, "making": 4.0}
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        [found] = advise(loader_of(num_workers=1), **costs)
        assert found.settings["num_workers"] == 4
        assert advise(loader_of(num_workers=4), **costs)[0].rung != "workers"

    @pytest.mark.parametrize(
        ("n_cores", "n_workers", "costs", "speedup"),
        [
            (8, 0, {"prepare": 4.0, "together": 5.0, "making": 4.0}, 5.0),  # half a second a batch: the step is slower
            (2, 0, {"prepare": 1.0, "together": 2.0, "making": 1.0, "step_cpu": 2.0}, 2 / 1.5),  # 3 s on 2 cores
            (4, 2, {"fetch": 3.0, "prepare": 2.0, "together": 6.0, "waiting": 0.5}, 6 / 2.5),  # 5 s by 2
            (4, 1, {"prepare": 5.0, "together": 6.0}, 6 / 1.25),  # by one worker 5 s of making
            (4, 0, {"copy": 2.0, "hand_over": 3.0, "prepare": 2.5, "together": 5.0, "making": 1.0}, 1.0),  # all busy
        ],
    )
    def test_bring_what_the_model_says_and_are_asked_for_once(self, cores, n_cores, n_workers, costs, speedup):
        cores(n_cores)
        [found] = [each for each in advise(loader_of(num_workers=n_workers), **costs) if each.rung == "workers"]
        assert found.speedup == pytest.approx(speedup)
        settings = f"num_workers={n_cores}, persistent_workers=True"
        assert found.action == f"Use {n_cores} persistent workers instead of {n_workers}: {settings}"
        assert found.settings == {"num_workers": n_cores, "persistent_workers": True}
        assert found.notebook == "03_persistent_workers"

    @pytest.mark.parametrize(
        ("persistent", "action", "settings"),
        [(False, "Keep the workers", {"persistent_workers": True}), (True, "Begin fewer epochs", {})],
    )
    def test_that_start_in_each_epoch_are_kept(self, persistent, action, settings):
        [found] = advise(loader_of(num_workers=1, persistent_workers=persistent), start=1.0, together=2.0)
        assert found.action.startswith(action)
        assert found.settings == settings


class Wrapped(Dataset):
    """As lk.ImageDataset holds a store and names a decoder, within another data set."""

    def __init__(self, **attributes):
        self.dataset = SimpleNamespace(**attributes)

    def __len__(self):
        return 4


class TestTheWorkItself:
    @pytest.mark.parametrize(
        ("attributes", "rung", "notebook"),
        [
            ({"store": object()}, "storage", "08_shard_formats"), ({}, "storage", "08_shard_formats"),
            ({"decoder": "pil"}, "decoding", "02_read_image"),
            ({"decoder": "turbojpeg"}, "decoding", "11_prepare_once"),
            ({"decoder": len}, "decoding", "11_prepare_once"), ({"decoder": None}, "decoding", "11_prepare_once"),
        ],
    )  # fmt: skip
    def test_is_changed_where_there_are_enough_workers(self, cores, attributes, rung, notebook):
        cores(1)
        cause = {"storage": "fetch", "decoding": "prepare"}[rung]
        [found] = advise(DataLoader(Wrapped(**attributes), num_workers=1), **{cause: 3.0}, together=4.0)
        assert (found.rung, found.notebook, found.speedup) == (rung, notebook, 4.0)
        assert found.why.startswith("75% of the time ")
        assert ("instead of pil" in found.action) == (notebook == "02_read_image")

    def test_is_no_decoding_of_prepared_pixels_nor_a_batch_loader_again(self, first_photos, tmp_path):
        store = lk.FolderStore(first_photos(4))
        pixels = lk.PixelStore.build(store, tmp_path / "pixels", short_side=32, progress=False)
        for loader in DataLoader(Subset(pixels, [0, 1]), num_workers=64), lk.BatchLoader(pixels):
            assert not LoaderTraits.of(loader).decodes
            [found] = advise(loader, prepare=3.0, together=4.0)
            assert (found.rung, found.notebook) == ("transforms", "06_kornia_gpu")
        for cause, instead in (("prepare", "PixelStore"), ("hand_over", "uint8, which the device normalizes")):
            [found] = advise(lk.BatchLoader(store), **{cause: 3.0}, together=4.0)
            assert instead in found.action
            assert "or lk.BatchLoader" not in found.action

    def test_is_no_way_to_make_pairs_that_is_taken_already(self):
        pairs = object.__new__(lk.DepthPairs)  # which would read a whole set
        for pairs.fast in (False, True):
            [found] = advise(SimpleNamespace(dataset=pairs), prepare=3.0, together=4.0)
            assert ("fast=True" in found.action) == (not pairs.fast)

    def test_of_every_other_loss_has_its_advice_the_largest_first(self):
        found = advise([], copy=1.0, hand_over=2.0, start=3.0, together=8.0)
        of_time = " of the time goes into waiting for "
        assert [(each.rung, each.why, each.notebook) for each in found] == [
            ("start", f"38%{of_time}the first batch of an epoch", "03_persistent_workers"),
            ("hand-over", f"25%{of_time}finished batches to arrive from the workers", "06_kornia_gpu"),
            ("copy", f"12%{of_time}batches to be copied to the device", "07_cuda_prefetch"),
        ]
        assert [each.speedup for each in found] == pytest.approx([8 / 5, 8 / 6, 8 / 7])
        for each, words in zip(found, ("Begin fewer epochs", "uint8", "lk.CUDAPrefetcher"), strict=True):
            assert words in each.action
        assert [each.settings for each in found] == [{}, {}, {"pin_memory": True}]
        [pinned] = advise(loader_of(pin_memory=True), copy=1.0, together=2.0)
        assert (pinned.settings, "pin_memory" in pinned.action) == ({}, False)
        assert advise([], fetch=2.0, together=2.0)[0].speedup == 2.0  # not beyond the step


class TestNothing:
    def test_to_gain_is_said(self):
        [none] = advise([], together=1.04, fetch=0.04)
        leave, free = "Leave the loader as it is: it is not the bottleneck", "without waiting for data it would take"
        assert str(none) == f"{leave} ({free} 96% of the time)."
        assert "take 100% of" in advise([], together=0.5)[0].why
        assert advise([], together=2.0, copy=0.1)[0].rung == "copy"  # a twentieth is worth it

    @pytest.mark.parametrize(
        ("n_batches", "starts_workers", "rung"),
        [(8, False, "none"), (8, True, "start"), (99, False, "none"), (100, False, "start"), (None, False, "start")],
    )
    def test_is_to_do_about_the_start_of_a_toys_epoch(self, n_batches, starts_workers, rung):
        traits = LoaderTraits(num_workers=2, starts_workers=starts_workers, n_batches=n_batches)
        [found] = advise(traits, start=1.0, together=2.0)
        assert found.rung == rung
        assert ("50% is the start of an epoch" in found.why) == (rung == "none")
        assert "start" not in advise(traits, start=0.04, together=1.04)[0].why


def test_the_settings_of_a_loader_are_those_of_the_one_that_it_wraps():
    loader = loader_of(9, batch_size=2, num_workers=1, prefetch_factor=3)
    for found in LoaderTraits.of(loader), LoaderTraits.of(SimpleNamespace(loader=loader)):
        assert (found.num_workers, found.starts_workers, found.prefetch_factor) == (1, True, 3)
    assert LoaderTraits.of(loader).n_batches == 5
    assert not LoaderTraits.of(loader_of(9)).starts_workers  # it has none
    assert LoaderTraits.of([1, 2]) == LoaderTraits(n_batches=2)


class TestTheOrder:
    @pytest.mark.parametrize(
        ("in_line_s", "in_order", "speedup"), [(2.0, True, 10 / 8), (0.4, True, None), (2.0, False, None)]
    )
    def test_of_batches_is_given_up_where_later_ones_are_ready(self, cores, in_line_s, in_order, speedup):
        cores(1)
        traits = LoaderTraits.of(loader_of(num_workers=2, in_order=in_order))
        costs = costs_of(prepare=4.0, copy=1.0, together=10.0)
        advised = advice.advise(costs, traits, in_line_s)
        found = {each.rung: each for each in advised}
        assert ("order" in found) == (speedup is not None)
        if speedup:
            assert found["order"].speedup == pytest.approx(speedup)
            assert "20% of the time a later batch was ready" in found["order"].why
            assert found["order"].settings == {"in_order": False}
            assert [each.rung for each in advised] == ["decoding", "order", "copy"]


class TestTheSlowestLine:
    def line(self, **known):
        return advice.SlowLine(**{"what": "convert", "place": "data.py:18", "share": 0.5, "kind": "decoding"} | known)

    def advise(self, line, num_workers=2, **costs):
        return advice.advise(costs_of(**costs), LoaderTraits(num_workers=num_workers), slowest=line)

    @pytest.mark.parametrize(
        ("line", "action", "notebook"),
        [
            ({}, "Spend less on decoding in convert (data.py:18): lk.BatchLoader decodes", "11_prepare_once"),
            (
                {"what": "ColorJitter", "kind": "transform"},
                "Spend less on ColorJitter (data.py:18): crop before it", "06_kornia_gpu",
            ),
            ({"what": "blur", "kind": "transform", "place": ""}, "Spend less on blur: crop", "06_kornia_gpu"),
            ({"what": "read", "kind": ""}, "Spend less on read (data.py:18): where it decodes,", "11_prepare_once"),
        ],
    )  # fmt: skip
    def test_is_named_where_each_sample_is_to_cost_less(self, cores, line, action, notebook):
        cores(2)
        [found] = self.advise(self.line(**line), prepare=3.0, together=4.0)
        assert found.action.startswith(action)
        assert found.notebook == notebook

    @pytest.mark.parametrize(
        ("num_workers", "share", "costs", "speedup"),
        [
            (2, 0.5, {"prepare": 3.0, "together": 4.0}, 2.0),  # workers make a batch in 2 s in place of 4
            (2, 0.5, {"prepare": 1.0, "together": 4.0}, 4 / 3),  # which may be faster than the step
            (2, 1.0, {"prepare": 3.0, "fetch": 0.1, "together": 4.0}, 4 / 0.9),  # it reads, too
            (2, 0.1, {"prepare": 0.5, "start": 3.0, "together": 4.0}, 4 / 3.9),  # the start stays
            (None, 0.5, {"prepare": 3.0, "together": 4.0}, 4 / 2.5),  # one after the other
        ],
    )
    def test_gains_no_more_than_its_own_time(self, cores, num_workers, share, costs, speedup):
        cores(2)
        step = costs["together"] - sum(value for name, value in costs.items() if name != "together")
        every = self.advise(self.line(share=share), num_workers, step=step, **costs)
        [found] = [each for each in every if "convert" in each.action]
        assert found.speedup == pytest.approx(speedup)

    def test_is_not_named_where_it_may_be_what_waits_for_storage(self, cores):
        cores(2)
        found = self.advise(self.line(kind=""), prepare=2.0, fetch=1.0, together=4.0)
        assert not [each for each in found if "data.py" in each.action]

    def test_is_one_of_the_script_or_of_a_known_kind(self):
        row = {"part": "making a batch", "share": 0.5, "what": "f", "path": __file__, "number": 3, "kind": ""}
        assert advice.slowest_line([row]).place.endswith("test_advice.py:3")
        assert advice.slowest_line([row | {"path": torch.__file__}]) is None
        assert advice.slowest_line([row | {"path": torch.__file__, "kind": "decoding"}]).place == ""
        assert advice.slowest_line([row | {"part": "the step"}]) is None
        assert advice.slowest_line([]) is None


def test_another_order_makes_no_worker_faster():
    costs = costs_of(prepare=3.5, step=0.5, together=4.0, making=7.0)
    found = advice.advise(costs, LoaderTraits(num_workers=2, may_reorder=True), in_line_s=3.0)
    [order] = [each for each in found if each.rung == "order"]
    assert order.speedup == pytest.approx(4.0 / 3.5)
    busy = replace(costs, making=8.0)  # its two workers never rest
    traits = LoaderTraits(num_workers=2, may_reorder=True)
    assert "order" not in [each.rung for each in advice.advise(busy, traits, in_line_s=3.0)]
    before_torch_2_6 = advice.advise(costs, LoaderTraits(num_workers=2), in_line_s=3.0)
    assert "order" not in [each.rung for each in before_torch_2_6]


@pytest.mark.parametrize(("version", "is_told"), [("2.5.1+cu124", True), ("2.11.0", False), ("3.0.0a0", False)])
def test_an_older_torch_is_told_that_the_loaders_need_a_newer_one(monkeypatch, version, is_told):
    monkeypatch.setattr(torch, "__version__", version)
    costs = costs_of(prepare=4.0, together=10.0)
    [best, *_] = advice.advise(costs, LoaderTraits(num_workers=2, is_batch_loader=True))
    assert "lk.PixelStore" in best.action
    assert ("needs torch 2.11 or newer" in best.action) == is_told
