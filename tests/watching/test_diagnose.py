"""How a command line names a training; `lk.tune`, which chooses."""

import re
import sys
import time

import pandas as pd
import pytest
import torch
from torch.utils.data import ChainDataset, Dataset
from torchvision.transforms import v2

import labkit as lk
from labkit.data.decode import missing_decoders
from labkit.errors import CannotDiagnose
from labkit.watching import tune as tuning
from labkit.watching.advice import Costs
from labkit.watching.diagnose import made_training, named_function
from labkit.watching.tune import DEFAULT, STEP_ALONE, Candidate, Source, fastest_decoder
from tests.loaders import same

NAME = "training_of_a_test"
SCRIPT = """
import sys
from os.path import join

seen = list(sys.argv)
LOADER, number = [1, 2], 3

def make(): return LOADER, len
def as_list(): return [LOADER, len]
def wants(size): return LOADER, len
def three(): return LOADER, len, 3
def no_step(): return LOADER, 3
def no_loader(): return 3, len
def nothing(): return None
"""
FORM = ": write module:function, such as train:make_training for train.py in this folder"
OWN = f"{NAME} has no function {{}}; it has as_list, make, no_loader, no_step, nothing, three, wants"
GAVE = "{} gave {}: return loader, step, where step(batch) trains"


class TestANamedTraining:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        """A script in the current folder, which is not on the path yet; beside another one of its name."""
        monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *(place for place in sys.path if place)])
        monkeypatch.setattr(sys, "argv", ["labkit"])
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / f"{NAME}.py").write_text("raise SystemExit('the wrong one')")
        (tmp_path / f"{NAME}.py").write_text(SCRIPT)
        (tmp_path / "empty_one.py").write_text("")
        (tmp_path / "lacking.py").write_text("import not_there_at_all")
        monkeypatch.chdir(tmp_path)
        yield str(tmp_path)
        for loaded in (NAME, "empty_one"):
            sys.modules.pop(loaded, None)

    def test_is_the_one_of_the_current_folder_and_finds_its_arguments(self, here):
        assert made_training(f"{NAME}:make", ["--size", "3"]) == ([1, 2], len)
        assert sys.modules[NAME].seen == [NAME, "--size", "3"]
        assert sys.path[0] == here
        assert made_training(f"{NAME}:as_list") == ([1, 2], len)
        assert sys.path.count(here) == 1
        assert named_function("os.path:join") is sys.modules["os.path"].join  # or of a package

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            *((name, f"{name!r}{FORM}") for name in ("make", ":make", "train:", "train.py:make", ".train:make", "")),
            *((f"{name}:make", f"there is no module {name} here (HERE) and none is installed")
              for name in ("not_there", "labkit.no", "not_there.at_all")),
            *((f"{NAME}:{name}", OWN.format(name)) for name in ("other", "number", "make:as_list")),
            ("empty_one:make", "empty_one has no function make; it has none"),
            (f"{NAME}:wants", f"{NAME}:wants: missing a required argument: 'size'; it must work without arguments"),
            *((f"{NAME}:{name}", GAVE.format(f"{NAME}:{name}", kinds)) for name, kinds in {
                "three": "list, builtin_function_or_method, int", "no_step": "list, int",
                "no_loader": "int, builtin_function_or_method", "nothing": "NoneType",
            }.items()),
        ],
    )  # fmt: skip
    def test_that_is_none_is_told(self, here, name, says):
        with pytest.raises(CannotDiagnose, match=f"^{re.escape(says.replace('HERE', here))}"):
            made_training(name)

    def test_keeps_the_error_of_what_it_lacks_itself(self):
        with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
            named_function("lacking:make")


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
CROP, FLIP = v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()


@pytest.fixture(scope="module")
def photos(first_photos):
    store = lk.FolderStore(first_photos(12))
    return lk.ImageDataset(store, transform=lk.make_augment("light", "v2", part="geometry"))


class TestTune:
    @pytest.mark.exhaustive
    @pytest.mark.alone
    def test_lets_workers_share_the_waiting(self, monkeypatch):
        monkeypatch.setattr(tuning, "_MAX_WORKERS", 4)
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
    @pytest.mark.alone
    def test_keeps_a_default_that_keeps_up_and_tries_nothing_else(self):
        n_images = set()
        step = lambda batch: time.sleep(0.25) or n_images.add(len(batch))  # noqa: E731 - no hiccup counts beside it
        tuned = lk.tune(Naps(0.0), step, config=SERIAL, budget_s=2)
        assert tuned.config == SERIAL.resolved()
        assert set(tuned.frame["variant"]) == {DEFAULT, STEP_ALONE}
        assert "keeps up" in repr(tuned)
        assert n_images == {2}

    @pytest.mark.exhaustive
    @pytest.mark.alone
    def test_tries_threads_that_do_the_same_work(self, photos):
        tuned = lk.tune(photos, config=lk.LoaderConfig(batch_size=4, num_workers=0), budget_s=4)
        assert "BatchLoader" in set(tuned.frame["variant"])
        images, labels = next(iter(tuned.source.loader(Candidate(tuned.config, threads=True))))
        assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 224, 224), torch.uint8, torch.int64)

    def test_makes_its_first_batches_as_a_worker_does_and_leaves_generators_as_they_were(self, monkeypatch):
        usual, making, stepping = torch.get_num_threads(), [], []
        monkeypatch.setattr(tuning, "race", lambda *_, **__: pd.DataFrame())
        monkeypatch.setattr(tuning, "_to_tuned", lambda *_: None)

        class Draws(Naps):
            def __getitem__(self, index):
                making.append(torch.get_num_threads())
                return super().__getitem__(index)

        torch.set_num_threads(3)
        before = torch.get_rng_state()
        try:
            step = lambda batch: (stepping.append(torch.get_num_threads()), torch.rand(3))  # noqa: E731
            lk.tune(Draws(0.0), step, config=SERIAL, budget_s=1)
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(usual)
        assert (set(making), set(stepping)) == ({1}, {3})
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("arguments", "error", "says"),
        [
            ({"step": 3}, TypeError, "step must be a function of one batch or None, got a int"),
            ({"dataset": Naps(0, count=0)}, ValueError, "holds no sample"),
            ({"dataset": ChainDataset([])}, TypeError, "not a map-style"),
            *(({"budget_s": wrong}, ValueError, "budget_s must be a number > 0") for wrong in (0, -1.0, float("nan"))),
        ],
    )
    def test_refuses_wrong_arguments(self, arguments, error, says):
        with pytest.raises(error, match=says):
            lk.tune(**{"dataset": Naps(0), "config": SERIAL, **arguments})

    @pytest.mark.parametrize(
        "steps",
        [
            None, [CROP, FLIP, v2.RandomGrayscale()], [v2.RandomResizedCrop((32, 64)), FLIP],
            [v2.RandomResizedCrop(32, antialias=False), FLIP],
            [v2.RandomResizedCrop(32, interpolation=v2.InterpolationMode.BICUBIC), FLIP],
        ],
    )  # fmt: skip
    def test_uses_no_threads_for_other_work(self, photos, steps):
        assert Source(photos).has_threads()
        assert not Source(lk.ImageDataset(photos.store, transform=steps and v2.Compose(steps))).has_threads()
        assert not Source(photos, batch_transform=lambda batch: batch).has_threads()
        assert not Source(photos, collate_fn=list).has_threads()
        assert not Source(lk.PILDataset(photos.store, transform=photos.transform)).has_threads()

    @pytest.mark.parametrize(
        "labels",
        [
            None,
            [7, 3, 7, 0],
            [0.5, -1.0, 2.0, 0.0],
            ["a cat", "a dog", "two dogs", "a cat"],
            [[0, 1], [1, 1], [0, 0], [1, 0]],
        ],
    )
    @pytest.mark.parametrize("classes", [None, []])
    def test_uses_threads_for_the_same_images_labels_and_keys(self, photos, labels, classes):
        keys = [photos.keys[number] for number in (6, 1, 4, 3)]
        options = {"keys": keys, "labels": labels, "return_keys": True}
        if classes is not None and labels != [7, 3, 7, 0] and labels != ["a cat", "a dog", "two dogs", "a cat"]:
            options["classes"] = classes
        chosen = lk.ImageDataset(photos.store, transform=photos.transform, **options)
        source = Source(chosen, shuffle=False)
        assert source.has_threads()
        of_processes, of_threads = (next(iter(source.loader(Candidate(SERIAL, threads=on)))) for on in (False, True))
        assert of_threads[2] == of_processes[2] == keys[: SERIAL.batch_size]
        assert same([of_threads[1]], [of_processes[1]])

    def test_uses_no_threads_for_buckets(self, photos):
        assert not Source(
            lk.ImageDataset(photos.store, transform=photos.transform, buckets=lk.Buckets(((64, 64),)))
        ).has_threads()


class TestTheField:
    @pytest.fixture(autouse=True)
    def two_cores(self, monkeypatch):
        for name in ("usable_cores", "cores_per_rank"):
            monkeypatch.setattr(tuning, name, lambda: 2)

    def test_is_what_the_model_finds_worth_measuring(self, recwarn):
        assert tuning.worth_measuring(costs(making=0.3)) == [2]
        assert tuning.worth_measuring(costs(making=0.01, step=1.0)) == [1, 2, 0]  # all alike: the fewest that keep up
        assert tuning.worth_measuring(costs(making=0.8, waiting=1.0)) == [16]
        found = tuning.candidates(lk.LoaderConfig(num_workers=2), costs(making=0.3), decoder=None, threads=False)
        assert list(found) == [DEFAULT, "2 workers, 4 ahead"]  # the default is always among them, and nobody twice
        assert found[DEFAULT].config == lk.LoaderConfig(num_workers=2)
        config = lk.LoaderConfig(prefetch_factor=4, persistent_workers=True, start_method="spawn")
        tuning.with_workers(config, 0).resolved()
        assert not recwarn.list  # no setting of workers goes where there are none


def costs(**known):
    return Costs(**(dict.fromkeys(Costs.__dataclass_fields__, 0.0) | known))


def runs_of(**rates):
    """A frame of made-up rates, one a round."""
    rows = [
        {"experiment": "", "variant": label.replace("_", " "), "round": number, "is_warmup": False,
         "images_per_s": rate, "steady_s": 1 / rate, "first_batch_s": 0.0, "n_steady_images": 1}
        for label, each in rates.items() for number, rate in enumerate(each)
    ]  # fmt: skip
    own = dict.fromkeys(("order", "cpu_s", "peak_mem_mb", "startup_s"), 0.0)
    return pd.DataFrame(rows).assign(baseline="default", env_id="here", storage="", n_images=1, **own)


class TestARace:
    @pytest.mark.parametrize(
        ("rates", "ran"),
        [
            ({"default": 30, "fast": 100}, [{"default", "fast"}]),
            ({"default": 50, "fast": 100, "step alone": 50}, [{"default", "step alone"}]),
            (
                {"default": 50, "fast": 100, "step alone": 100},
                [{"default", "step alone"}, {"default", "fast", "step alone"}],
            ),
        ],
    )
    def test_has_all_but_where_the_default_keeps_up(self, monkeypatch, rates, ran):
        """`compare` would have measured the given rates."""
        raced = []

        def compare(rates, **options):
            raced.append(set(rates))
            return runs_of(**{label: [0.99 * rate, rate, 1.01 * rate] for label, rate in rates.items()})

        monkeypatch.setattr(tuning, "compare", compare)
        runs = tuning.race(rates, deadline=time.perf_counter() + 60)
        assert raced == ran
        assert set(runs["variant"]) == ran[-1]


class TestTheFastestDecoder:
    @pytest.fixture
    def decoding(self, monkeypatch):
        """`decoding(how)` calls `how(decoder)` instead of decoding."""

        def replace(how):
            image = torch.zeros(3, 4, 4, dtype=torch.uint8)
            monkeypatch.setattr(tuning, "decode", lambda data, decoder: (how(decoder), image)[1])

        return replace

    @pytest.mark.exhaustive
    @pytest.mark.alone
    def test_is_no_slow_one(self, photos, decoding):
        decoding(lambda decoder: time.sleep(0.02 * (decoder == "pil")))
        name, frame = fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"))
        assert name not in (None, "pil", "pil_draft")
        assert set(frame["variant"]) == set(lk.DECODERS) - {"pil_draft"} - set(missing_decoders())

    def test_is_none_that_cannot_read_the_files_and_none_of_other_data_sets(self, photos, decoding):
        def only_pil(decoder):
            if decoder != "pil":
                raise lk.DecodeError("no")

        decoding(only_pil)
        assert fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"))[0] is None
        for dataset in ([0, 1], lk.PILDataset(photos.store)):
            assert fastest_decoder(dataset) == (None, None)

    def test_is_used_in_a_copy_of_the_data_set(self, photos):
        other = Source(photos).loader(Candidate(SERIAL, "pil")).dataset
        other.transform = None
        assert (photos.decoder, other.decoder) == ("turbojpeg", "pil")
        assert torch.equal(lk.decode(photos.store.read(photos.keys[0]), "pil"), other[0][0])
