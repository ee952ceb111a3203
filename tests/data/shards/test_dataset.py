"""`ShardDataset`: epochs of a fixed length that go through all data, and resuming anywhere in one."""

import itertools
import json
import pickle
from collections import Counter

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from labkit import FolderStore, read_shards, write_shards
from tests.data.shards.test_read import PICTURE, at, numbered, numbers
from tests.tars import make_tar


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    return numbered(tmp_path_factory.mktemp("shards") / "set", 40, 7)


def read_epochs(root, monkeypatch, *, world_size=1, num_workers=0, n_epochs=1, first=0, **options) -> list[list[int]]:
    """What all ranks and workers together gave in each epoch."""
    epochs = [[] for _ in range(n_epochs)]
    for rank in range(world_size):
        at(monkeypatch, rank, world_size)
        dataset = read_shards(root, **options)
        for number in range(n_epochs):
            dataset.set_epoch(first + number)
            epochs[number] += read_by_workers(dataset, monkeypatch, num_workers)
    return epochs


def read_by_workers(dataset, monkeypatch, num_workers: int) -> list[int]:
    """As DataLoader's workers would, in this process."""
    came = []
    for worker in range(max(num_workers, 1)):
        monkeypatch.setenv("WORKER", str(worker))
        monkeypatch.setenv("NUM_WORKERS", str(max(num_workers, 1)))
        came += numbers(dataset)
    monkeypatch.delenv("WORKER")
    monkeypatch.delenv("NUM_WORKERS")
    return came


class TestSamplesPerRank:
    @pytest.mark.parametrize("world_size", range(1, 9))
    @pytest.mark.parametrize("num_workers", range(5))
    def test_every_sample_comes_as_often_as_there_were_passes(self, forty, monkeypatch, world_size, num_workers):
        options = {"world_size": world_size, "num_workers": num_workers, "samples_per_rank": 7, "shuffle": 5}
        n_epochs = -(-80 // (7 * world_size))
        came = [number for epoch in read_epochs(forty, monkeypatch, n_epochs=n_epochs, **options) for number in epoch]
        n_passes, rest = divmod(len(came), 40)
        assert len(came) == n_epochs * 7 * world_size
        counted = Counter(came)
        assert {counted[number] for number in range(40)} <= {n_passes, n_passes + bool(rest)}

    def test_forty_short_epochs_of_few_shards_give_all(self, tmp_path, monkeypatch):
        root = numbered(tmp_path / "set", 200, 2)
        epochs = read_epochs(root, monkeypatch, n_epochs=40, samples_per_rank=30)
        assert Counter(itertools.chain.from_iterable(epochs)) == dict.fromkeys(range(200), 6)

    def test_ranks_get_equally_many(self, forty, monkeypatch):
        at(monkeypatch, 1, 3)
        dataset = read_shards(forty, samples_per_rank=25)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert len(numbers(loader)) == 25

    def test_a_share_smaller_than_the_workers(self, forty, monkeypatch):
        assert read_epochs(forty, monkeypatch, samples_per_rank=2, num_workers=4) == [[0, 1]]

    def test_without_a_manifest_samples_are_counted(self, forty):
        urls = sorted(map(str, forty.glob("*.tar")))
        dataset = read_shards(urls, samples_per_rank=30)
        first = numbers(dataset)
        dataset.set_epoch(1)
        assert first + numbers(dataset) == [*range(40), *range(20)]
        assert numbers(read_shards([urls[0], urls[0]], samples_per_rank=12)) == [*range(6), *range(6)]

    def test_shards_without_samples_are_said(self, tmp_path):
        paths = [make_tar(tmp_path / f"{number}.tar", {}) for number in range(2)]
        with pytest.raises(ValueError, match="all 2 shards are empty: there is no sample to read"):
            list(read_shards(paths, samples_per_rank=1))

    def test_what_is_skipped_is_made_up_for(self, tmp_path):
        members = {f"{number}.{suffix}": data for number, suffix, data in [
            (0, "cls", b"0"), (0, "png", PICTURE), (1, "cls", b"1"), (1, "png", PICTURE[:40]), (2, "cls", b"2"),
            (2, "png", PICTURE)]}  # fmt: skip
        dataset = read_shards(make_tar(tmp_path / "x.tar", members), samples_per_rank=3, on_error="skip")
        assert [label for _, label in dataset] == [0, 2, 0]
        assert len(dataset.skipped) == 1

    def test_a_shard_with_fewer_samples_than_its_manifest_says(self, photos_in_shards):
        path = photos_in_shards / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["shards"][0]["n_samples"] += 1
        path.write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=r"shard-000000\.tar has fewer samples than the 6 of its manifest"):
            list(read_shards(photos_in_shards, samples_per_rank=10))


@pytest.fixture
def photos_in_shards(first_photos, tmp_path):
    return write_shards(FolderStore(first_photos(10)), tmp_path / "set", max_count=5, engine="threads", progress=False)


# Of torchdata, about torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

MODES = [
    {},
    {"shuffle": 5, "shuffle_initial": 3},
    {"samples_per_rank": 33},
    {"samples_per_rank": 33, "shuffle": 100},
]


@pytest.mark.parametrize("options", MODES, ids=str)
class TestState:
    @pytest.mark.parametrize("n_taken", [0, 1, 7, 32, 33])
    def test_the_rest_is_that_of_the_undisturbed_epoch(self, forty, options, n_taken):
        dataset = read_shards(forty, **options)
        dataset.set_epoch(2)
        whole = numbers(dataset)
        iterator = iter(dataset)
        taken = numbers(itertools.islice(iterator, n_taken))
        state = json.loads(json.dumps(dataset.state_dict()))
        resumed = read_shards(forty, **options)
        resumed.load_state_dict(state)
        assert taken + numbers(resumed) == whole
        following = read_shards(forty, **options)
        following.set_epoch(3)
        assert numbers(resumed) == numbers(following)
        resumed.set_epoch(2)
        assert numbers(resumed) == whole  # from its beginning

    @pytest.mark.slow
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_stateful_data_loader(self, forty, options, num_workers):
        def loader(state=None):
            dataset = read_shards(forty, **options)
            method = {"multiprocessing_context": "fork"} if num_workers else {}
            made = StatefulDataLoader(dataset, batch_size=4, num_workers=num_workers, **method)
            if state:
                made.load_state_dict(state)
            return made

        whole = [labels_of(batch) for batch in loader()]
        for n_batches in (1, 4, len(whole) - 1):
            begun = loader()
            taken = [labels_of(batch) for batch in itertools.islice(begun, n_batches)]
            state = pickle.loads(pickle.dumps(begun.state_dict()))
            assert taken + [labels_of(batch) for batch in loader(state)] == whole


def labels_of(batch) -> list[int]:
    return [int(image[0, 0, 0]) for image in batch[0]]
