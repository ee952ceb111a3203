"""tune: what it finds where the answer is known, and what it leaves alone."""

import time

import pytest
import torch
from torch.utils.data import ChainDataset, Dataset
from torchvision.transforms import v2

import labkit as lk
from labkit.watching import tune as field
from labkit.watching.tune import DEFAULT, STEP_ALONE, Candidate, Source

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


class TestTune:
    @pytest.fixture(autouse=True)
    def few_workers(self, monkeypatch):
        monkeypatch.setattr(field, "_MAX_WORKERS", 4)

    @pytest.mark.exhaustive
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

    @pytest.mark.exhaustive
    def test_a_default_that_keeps_up_is_kept_and_nothing_else_tried(self):
        n_images = set()
        tuned = lk.tune(
            Naps(0.0), lambda batch: time.sleep(0.25) or n_images.add(len(batch)), config=SERIAL, budget_s=2
        )  # beside such a step no hiccup of a busy machine counts
        assert tuned.config == SERIAL.resolved()
        assert set(tuned.frame["variant"]) == {DEFAULT, STEP_ALONE}
        assert "keeps up" in repr(tuned)
        assert n_images == {2}

    @pytest.mark.exhaustive
    def test_threads_do_the_same_work(self, photos):
        tuned = lk.tune(photos, config=lk.LoaderConfig(batch_size=4, num_workers=0), budget_s=4)
        assert "BatchLoader" in set(tuned.frame["variant"])
        images, labels = next(iter(tuned.source.loader(Candidate(tuned.config, threads=True))))
        assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 224, 224), torch.uint8, torch.int64)

    @pytest.mark.parametrize(
        ("arguments", "error", "says"),
        [
            ({"step": 3}, TypeError, "step must be a function of one batch or None, got a int"),
            ({"dataset": Naps(0, count=0)}, ValueError, "holds no sample"),
            ({"dataset": ChainDataset([])}, TypeError, "not a map-style"),
            *(({"budget_s": wrong}, ValueError, "budget_s must be a number > 0") for wrong in (0, -1.0, float("nan"))),
            ({"step": lambda batch: 1 / 0}, ZeroDivisionError, "division by zero"),
        ],
    )
    def test_wrong_arguments(self, arguments, error, says):
        with pytest.raises(error, match=says):
            lk.tune(**{"dataset": Naps(0), "config": SERIAL, **arguments})


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
