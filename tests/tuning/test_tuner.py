"""tune: what it finds where the answer is known, and what it leaves alone."""

import time

import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchvision.transforms import v2

import labkit as lk
from labkit.tuning import candidates as field, decoder_choice, race
from labkit.tuning.candidates import DEFAULT, Candidate, Source, expected_s, worth_measuring
from labkit.tuning.io_wait import Making
from labkit.tuning.race import STEP_ALONE
from labkit.tuning.tuner import _Alone

pytestmark = pytest.mark.alone


class Naps(Dataset):
    """Samples that are waited for, as from a slow storage."""

    def __init__(self, seconds: float, count: int = 40):
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((3, 4, 4), index % 255, dtype=torch.uint8)


SERIAL = lk.LoaderConfig(batch_size=2, num_workers=0)


@pytest.fixture(scope="module")
def photos(first_photos):
    store = lk.FolderStore(first_photos(12))
    return lk.ImageDataset(store, transform=lk.make_augment("light", "v2", part="geometry"))


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(field, "usable_cores", lambda: 2)


class TestTune:
    @pytest.fixture(autouse=True)
    def few_workers(self, monkeypatch):
        monkeypatch.setattr(field, "_MAX_WORKERS", 4)

    def test_waiting_is_shared_by_workers(self):
        tuned = lk.tune(Naps(0.02, count=7), config=SERIAL, budget_s=2)
        config, frame = tuned
        assert config.num_workers >= 2
        assert config.batch_size == 2
        assert lk.summarize(frame, DEFAULT).drop(index=DEFAULT)["speedup"].max() > 1.5
        loader = tuned.loader()
        seen = torch.cat([batch[:, 0, 0, 0] for batch in loader])
        assert sorted(seen.tolist()) == list(range(7))
        loader.close()

    def test_a_default_that_keeps_up_is_kept_and_nothing_else_tried(self):
        n_images = set()
        tuned = lk.tune(
            Naps(0.0), lambda batch: time.sleep(0.05) or n_images.add(len(batch)), config=SERIAL, budget_s=2
        )
        assert tuned.config == SERIAL.resolved()
        assert set(tuned.frame["variant"]) == {DEFAULT, STEP_ALONE}
        assert "keeps up" in repr(tuned)
        assert n_images == {2}

    def test_threads_do_the_same_work(self, photos):
        tuned = lk.tune(photos, config=lk.LoaderConfig(batch_size=4, num_workers=0), budget_s=4)
        assert "BatchLoader" in set(tuned.frame["variant"])
        images, labels = next(iter(tuned.source.loader(Candidate(tuned.config, threads=True))))
        assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 224, 224), torch.uint8, torch.int64)

    @pytest.mark.parametrize(
        ("arguments", "error", "says"),
        [
            ((Naps(0), 3), TypeError, "step must be a function of one batch or None, got a int"),
            ((Naps(0, count=0),), ValueError, "holds no sample"),
        ],
    )
    def test_wrong_arguments(self, arguments, error, says):
        with pytest.raises(error, match=says):
            lk.tune(*arguments)

    def test_a_stream_has_no_index(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter([1])

        with pytest.raises(TypeError, match="not a map-style"):
            lk.tune(Stream())

    @pytest.mark.parametrize("budget_s", [0, -1.0, float("nan")])
    def test_a_budget_is_positive(self, budget_s):
        with pytest.raises(ValueError, match="budget_s must be a number > 0"):
            lk.tune(Naps(0), budget_s=budget_s)

    def test_an_error_of_the_step_is_told(self):
        def step(batch):
            raise ArithmeticError("loss is nan")

        with pytest.raises(ArithmeticError, match="nan"):
            lk.tune(Naps(0), step, config=SERIAL)


def _runs(**rates):
    """A frame of made-up rates, one a round."""
    rows = [
        {"experiment": "", "variant": label.replace("_", " "), "round": number, "is_warmup": False,
         "images_per_s": rate, "steady_s": 1 / rate}
        for label, each in rates.items() for number, rate in enumerate(each)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(
        baseline="default", env_id="here", order=0, n_images=1, cpu_s=0.0, peak_mem_mb=0.0, startup_s=0.0, storage=""
    )


class TestRace:
    @staticmethod
    def run(try_default_first=True, **seconds):
        def naps(each):
            return lambda: (time.sleep(each) or 1 for _ in range(4))

        variants = {label.replace("_", " "): naps(each) for label, each in seconds.items()}
        deadline = time.perf_counter() + 4
        return race.race(
            variants, default="default", deadline=deadline, progress=False, try_default_first=try_default_first
        )

    def test_the_winner_is_found(self):
        runs = self.run(default=0.03, fast=0.01)
        assert lk.summarize(runs, "default").loc["fast", "verdict"] == "faster"
        assert not runs.duplicated(["variant", "round"]).any()

    def test_nobody_runs_where_the_default_keeps_up(self):
        assert set(self.run(default=0.02, fast=0.01, step_alone=0.02)["variant"]) == {"default", "step alone"}

    def test_all_run_at_once_where_it_cannot(self):
        runs = self.run(default=0.02, fast=0.01, step_alone=0.02, try_default_first=False)
        assert set(runs.loc[runs["round"] == 0, "variant"]) == {"default", "fast", "step alone"}

    @pytest.mark.parametrize(
        ("rates", "kept", "decided"),
        [
            ({"default": [10, 10, 10], "b": [20, 21, 20]}, {"default", "b"}, True),
            ({"default": [10, 10, 10], "b": [5, 6, 5]}, {"default"}, True),
            ({"default": [10, 10, 10], "b": [20, 21, 20], "c": [20, 20, 21]}, {"default", "b", "c"}, False),
            ({"default": [10, 10, 10], "b": [20, 21, 20], "c": [15, 15, 15]}, {"default", "b"}, True),
            ({"default": [10, 10, 10], "b": [20, 21, 20], "c": [15, 15, 20]}, {"default", "b", "c"}, False),
            ({"default": [10, 11, 10], "b": [10, 10, 11]}, {"default", "b"}, False),
            # As fast as the step: nobody can be faster, so that the rest need not go on.
            (
                {"default": [10, 10, 10], "b": [20, 21, 20], "c": [21, 21, 21], "step_alone": [21, 21, 21]},
                {"default", "c", "step alone"}, True,
            ),
        ],
    )  # fmt: skip
    def test_who_goes_on(self, rates, kept, decided):
        runs = _runs(**rates)
        found = race.next_heat(runs, list(runs["variant"].unique()), "default")
        assert (set(found[0]), found[1]) == (kept, decided)


class TestModel:
    def test_one_process_makes_then_trains(self):
        assert expected_s(0, Making(0.3, 0.0), 0.1, 0.1, cores=2) == pytest.approx(0.4)

    def test_workers_share_the_making_but_not_more_than_the_cores(self):
        assert expected_s(2, Making(0.3, 0.0), 0.0, 0.0, cores=2) == pytest.approx(0.15)
        assert expected_s(8, Making(0.3, 0.0), 0.0, 0.0, cores=2) == pytest.approx(0.15)

    def test_waiting_needs_no_core(self):
        assert expected_s(8, Making(0.4, 1.0), 0.0, 0.0, cores=2) == pytest.approx(0.05)

    def test_a_step_on_the_cpu_takes_cores_from_the_workers(self):
        assert expected_s(2, Making(0.1, 0.0), 0.1, 0.2, cores=2) == pytest.approx(0.15)

    def test_nothing_is_faster_than_the_step(self):
        assert expected_s(64, Making(0.1, 1.0), 0.5, 0.0, cores=2) == 0.5

    @pytest.mark.parametrize(("step_s", "may"), [(0.1, True), (0.07, False)])
    def test_whether_the_default_may_keep_up(self, step_s, may):
        assert _Alone(Making(0.1, 1.0), step_s, 0.0, []).may_keep_up(lk.LoaderConfig(num_workers=1)) == may

    @pytest.mark.usefixtures("two_cores")
    def test_what_is_worth_measuring(self):
        assert worth_measuring(Making(0.3, 0.0), 0.0, 0.0) == [2]
        assert worth_measuring(Making(0.01, 0.0), 1.0, 0.0) == [1, 2, 0]  # all alike: the fewest that keep up first
        assert worth_measuring(Making(0.8, 1.0), 0.0, 0.0) == [16]

    @pytest.mark.usefixtures("two_cores")
    def test_the_default_is_always_among_them_and_nobody_twice(self):
        found = field.candidates(lk.LoaderConfig(num_workers=2), Making(0.3, 0.0), 0, 0, decoder=None, threads=False)
        assert list(found) == [DEFAULT, "2 workers, 4 ahead"]
        assert found[DEFAULT].config == lk.LoaderConfig(num_workers=2)

    @pytest.mark.usefixtures("two_cores")
    def test_no_setting_of_workers_goes_where_there_are_none(self, recwarn):
        config = lk.LoaderConfig(prefetch_factor=4, persistent_workers=True, start_method="spawn")
        field.with_workers(config, 0).resolved()
        assert not recwarn.list


class TestThreads:
    @pytest.mark.parametrize(
        "transform",
        [
            None,
            v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.RandomGrayscale()]),
            v2.Compose([v2.RandomResizedCrop((32, 64)), v2.RandomHorizontalFlip()]),
            v2.Compose([v2.RandomResizedCrop(32, antialias=False), v2.RandomHorizontalFlip()]),
            v2.Compose(
                [v2.RandomResizedCrop(32, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomHorizontalFlip(0.5)]
            ),
        ],
    )
    def test_other_work_is_not_done_by_threads(self, photos, transform):
        assert not Source(lk.ImageDataset(photos.store, transform=transform)).has_threads()

    def test_nor_is_what_comes_after_it(self, photos):
        assert Source(photos).has_threads()
        assert not Source(photos, batch_transform=lambda batch: batch).has_threads()
        assert not Source(photos, collate_fn=list).has_threads()
        assert not Source(lk.PILDataset(photos.store, transform=photos.transform)).has_threads()


class TestDecoder:
    def test_a_slow_one_is_left(self, photos, monkeypatch):
        def slow_pil(data, decoder):
            time.sleep(0.02 * (decoder == "pil"))
            return torch.zeros(3, 4, 4, dtype=torch.uint8)

        monkeypatch.setattr(decoder_choice, "decode", slow_pil)
        name, frame = decoder_choice.fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=2)
        assert name not in (None, "pil", "pil_draft")
        assert set(frame["variant"]) == set(lk.DECODERS) - {"pil_draft"} - set(lk.missing_decoders())

    def test_one_that_cannot_read_the_files_is_left_out(self, photos, monkeypatch):
        def only_pil(data, decoder):
            if decoder != "pil":
                raise lk.DecodeError("no")
            return torch.zeros(3, 4, 4, dtype=torch.uint8)

        monkeypatch.setattr(decoder_choice, "decode", only_pil)
        assert decoder_choice.fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=1)[0] is None

    def test_other_data_sets_have_none_to_choose(self, photos):
        for dataset in (Naps(0), lk.PILDataset(photos.store)):
            assert decoder_choice.fastest_decoder(dataset, limit_s=1) == (None, None)

    def test_the_data_set_keeps_its_own(self, photos):
        other = field.with_decoder(photos, "pil")
        assert (photos.decoder, other.decoder) == ("turbojpeg", "pil")
        assert torch.equal(lk.decode(photos.store.read(photos.keys[0]), "pil"), _undone(other)[0][0])


def _undone(dataset):
    dataset.transform = None
    return dataset
