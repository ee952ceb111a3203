"""What a diagnosis says, draws and shows; how a command line names a training; `lk.tune`, which chooses."""

import base64
import io
import re
import sys
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import ChainDataset, Dataset
from torchvision.transforms import v2

import labkit as lk
from labkit.data.decode import missing_decoders
from labkit.errors import CannotDiagnose
from labkit.watching import tune as tuning
from labkit.watching.advice import MIN_SHARE, Costs, Recommendation
from labkit.watching.diagnose import made_training, named_function
from labkit.watching.findings import Diagnosis
from labkit.watching.timings import Making
from labkit.watching.tune import DEFAULT, STEP_ALONE, Candidate, Source, fastest_decoder, with_decoder

SHARES = {"compute": 0.3, "fetch": 0.104, "prepare": 0.4, "copy": 0.004, "hand-over": 0.092, "start": 0.1}
WAITS = "Training waits for its data 70% of the time: prepare 40%, fetch 10%, start 10%, hand-over 9%."


class TestADiagnosis:
    @pytest.fixture
    def found(self) -> Diagnosis:
        costs = Costs(
            step=3.0, copy=0.04, hand_over=0.92, fetch=1.04, prepare=4.0, start=1.0, together=10.0, making=None,
            waiting=0.0, step_cpu=0.0,
        )  # fmt: skip
        advice = Recommendation("workers", "Use <2> workers", "they wait", 2.0, "03_persistent_workers")
        return Diagnosis(SHARES, 3.333, 3.1, 3.5, [advice], costs, None, None, pd.DataFrame(), pd.DataFrame())

    def test_says_what_training_waits_for_and_what_free_data_would_bring(self, found):
        free = "Were data free, it would be 3.33x [3.10, 3.50] as fast"
        assert found.sentences == [WAITS, f"{free}.", str(found.recommendation)]
        assert repr(found).splitlines() == found.sentences
        whole = replace(found, gpu_utilization=0.25, cold=1.52).sentences[1]
        assert whole == (
            f"{free}; the GPU was busy 25% of the time that was measured; from a cold page cache the loader takes 1.5x "
            "as long."
        )
        for cold in (0.8, 1.04):  # no slower from a cold cache, but for noise
            assert replace(found, cold=cold).sentences[1] == f"{free}."
        once = replace(found, ceiling_low=np.nan, ceiling_high=np.nan).sentences[1]
        assert once == "Were data free, it would be 3.33x as fast."

    @pytest.mark.parametrize(("lost", "begin"), [(MIN_SHARE, "Training waits"), (0.03, "Training does not wait")])
    def test_calls_little_no_waiting(self, found, lost, begin):
        shares = dict.fromkeys(SHARES, 0.0) | {"compute": 1 - lost, "fetch": lost}
        assert replace(found, shares=shares).sentences[0].startswith(begin)

    def test_draws_its_costs_beside_the_step_alone(self, found):
        given = plt.subplots()[1]
        plt.subplots()  # another one is the current one
        ax = found.plot(ax=given)
        assert ax is given
        rows = {}
        for bar in ax.patches:
            rows.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(bar.get_width())
        assert rows[0] == pytest.approx([3.0, *found.costs.lost_s.values()])
        assert rows[1] == pytest.approx([3.0, 0, 0, 0, 0, 0])
        assert [label.get_text() for label in ax.get_yticklabels()] == ["training", "if data were free"]
        assert (ax.get_xlabel(), ax.get_title("left")) == ("seconds per batch", "ceiling: 3.33x")
        assert ax.get_legend().get_texts()[0].get_text() == "compute"

    def test_shows_a_picture_and_words_and_leaves_no_figure(self, found):
        n_figures = len(plt.get_fignums())
        head, _, rest = found._repr_html_().partition('src="data:image/png;base64,')
        assert len(plt.get_fignums()) == n_figures
        picture, _, words = rest.partition('">')
        assert head == f'<img alt="{WAITS}" '
        assert words == "".join(f"<p>{each}</p>" for each in found.sentences).replace("<2>", "&lt;2&gt;")
        image = Image.open(io.BytesIO(base64.b64decode(picture)))
        assert (image.format, image.size) == ("PNG", (770, 286))


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
            *((name, f"{name!r}{FORM}") for name in ("make", ":make", "train:", "train.py:make", "")),
            (".train:make", "'.train:make': name the module from the current folder, without a leading dot"),
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


class TestTheField:
    @pytest.fixture(autouse=True)
    def two_cores(self, monkeypatch):
        for name in ("usable_cores", "cores_per_rank"):
            monkeypatch.setattr(tuning, name, lambda: 2)

    def test_is_what_the_model_finds_worth_measuring(self, recwarn):
        assert tuning.worth_measuring(Making(0.3, 0.0), 0.0, 0.0) == [2]
        assert tuning.worth_measuring(Making(0.01, 0.0), 1.0, 0.0) == [1, 2, 0]  # all alike: the fewest that keep up
        assert tuning.worth_measuring(Making(0.8, 1.0), 0.0, 0.0) == [16]
        options = {"decoder": None, "threads": False}
        found = tuning.candidates(lk.LoaderConfig(num_workers=2), Making(0.3, 0.0), 0, 0, **options)
        assert list(found) == [DEFAULT, "2 workers, 4 ahead"]  # the default is always among them, and nobody twice
        assert found[DEFAULT].config == lk.LoaderConfig(num_workers=2)
        config = lk.LoaderConfig(prefetch_factor=4, persistent_workers=True, start_method="spawn")
        tuning.with_workers(config, 0).resolved()
        assert not recwarn.list  # no setting of workers goes where there are none

    @pytest.mark.parametrize(("step_s", "may"), [(0.1, True), (0.07, False)])
    def test_begins_with_the_default_where_it_may_keep_up(self, step_s, may):
        alone = tuning._CostsAlone(Making(0.1, 1.0), step_s, 0.0, [])
        assert alone.may_keep_up(lk.LoaderConfig(num_workers=1)) == may


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
    @pytest.fixture
    def rounds(self, monkeypatch):
        """The rounds in which each variant of a race runs; `compare` would have measured the given rates."""

        def compare(rates, **options):
            return runs_of(**{label: [0.99 * rate, rate, 1.01 * rate] for label, rate in rates.items()})

        def race(rates, **options):
            runs = tuning.race(rates, default="default", deadline=time.perf_counter() + 60, **options)
            assert not runs.duplicated(["variant", "round"]).any()
            return runs.groupby("variant")["round"].apply(list).to_dict()

        monkeypatch.setattr(tuning, "compare", compare)
        return race

    @pytest.mark.parametrize(
        ("rates", "options", "ran"),
        [
            ({"default": 30, "fast": 100}, {}, {"default": 3, "fast": 3}),
            # Nobody runs where the default keeps up and is tried first.
            ({"default": 50, "fast": 100, "step alone": 50}, {}, {"default": 3, "step alone": 3}),
            (
                {"default": 50, "fast": 100, "step alone": 50}, {"try_default_first": False},
                {"default": 3, "fast": 3, "step alone": 3},
            ),
        ],
    )  # fmt: skip
    def test_ends_when_the_winner_is_certain(self, rounds, rates, options, ran):
        assert rounds(rates, **options) == {label: list(range(n)) for label, n in ran.items()}

    def test_goes_on_where_the_default_does_not_keep_up(self, rounds):
        ran = rounds({"default": 50, "fast": 100, "step alone": 100})
        assert ran == {"default": [*range(6)], "step alone": [*range(6)], "fast": [3, 4, 5]}

    @pytest.mark.parametrize(
        ("rates", "kept", "decided"),
        [
            ({"b": [20, 21, 20]}, {"b"}, True),
            ({"b": [5, 6, 5]}, set(), True),
            ({"b": [20, 21, 20], "c": [20, 20, 21]}, {"b", "c"}, False),
            ({"b": [20, 21, 20], "c": [15, 15, 15]}, {"b"}, True),
            ({"b": [20, 21, 20], "c": [15, 15, 20]}, {"b", "c"}, False),
            ({"b": [9, 10, 11]}, {"b"}, False),
            # As fast as the step: nobody can be faster, so that the rest need not go on.
            ({"b": [20, 21, 20], "c": [21, 21, 21], "step_alone": [21, 21, 21]}, {"c", "step alone"}, True),
        ],
    )
    def test_drops_who_is_slower_every_time(self, rates, kept, decided):
        runs = runs_of(default=[10, 10, 10], **rates)
        found = tuning.next_heat(runs, list(runs["variant"].unique()), "default")
        assert (set(found[0]), found[1]) == ({"default", *kept}, decided)


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
        name, frame = fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=2)
        assert name not in (None, "pil", "pil_draft")
        assert set(frame["variant"]) == set(lk.DECODERS) - {"pil_draft"} - set(missing_decoders())

    def test_is_none_that_cannot_read_the_files_and_none_of_other_data_sets(self, photos, decoding):
        def only_pil(decoder):
            if decoder != "pil":
                raise lk.DecodeError("no")

        decoding(only_pil)
        assert fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=1)[0] is None
        for dataset in ([0, 1], lk.PILDataset(photos.store)):
            assert fastest_decoder(dataset, limit_s=1) == (None, None)

    def test_is_used_in_a_copy_of_the_data_set(self, photos):
        other = with_decoder(photos, "pil")
        other.transform = None
        assert (photos.decoder, other.decoder) == ("turbojpeg", "pil")
        assert torch.equal(lk.decode(photos.store.read(photos.keys[0]), "pil"), other[0][0])
