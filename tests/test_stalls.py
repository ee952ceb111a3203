"""diagnose: training loops with known stalls, and every kind of loader and step that it may be handed."""

import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typer.testing import CliRunner

import labkit as lk
from labkit.cli import app
from labkit.measure.advice import Costs, advise
from labkit.measure.diagnosis import SHARES
from labkit.measure.env import usable_cores
from labkit.measure.stalls import diagnose
from labkit.measure.waiting import making_in_one_process
from tests.stalling import Notes, Stalls

KNOWN = {
    "nothing": (Stalls(), "none"),
    "workers that keep up": (Stalls(step=0.06, fetch=0.02, num_workers=2), "none"),
    "fetch": (Stalls(fetch=0.03), "workers"),
    "prepare": (Stalls(prepare=0.03), "workers"),
    "copy": (Stalls(copy=0.03), "copy"),
    "fetch, in workers": (Stalls(fetch=0.16, num_workers=2), "storage"),
    "prepare, in workers": (Stalls(prepare=0.16, num_workers=2), "decoding"),
    "hand-over": (Stalls(hand_over=0.04, fetch=0.01, num_workers=2), "hand-over"),
    "fetch and prepare": (Stalls(fetch=0.02, prepare=0.05), "workers"),
    "fetch and copy": (Stalls(fetch=0.02, copy=0.04), "copy"),
    "prepare and copy": (Stalls(prepare=0.04, copy=0.02), "workers"),
    "fetch and hand-over": (Stalls(fetch=0.24, hand_over=0.03, num_workers=2), "storage"),
    "prepare and hand-over": (Stalls(prepare=0.24, hand_over=0.03, num_workers=2), "decoding"),
    "copy and hand-over": (Stalls(copy=0.02, hand_over=0.05, num_workers=2), "hand-over"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_stalls(name, monkeypatch):
    monkeypatch.setattr("labkit.measure.advice.usable_cores", lambda: 2)
    stalls, rung = KNOWN[name]
    found, expected = stalls.diagnosed(batches=6, rounds=2)
    assert sum(found.shares.values()) == pytest.approx(1)
    off = {cause: abs(found.shares[cause] - expected[cause]) for cause in SHARES}
    # Receiving costs a loaded machine a few milliseconds of its own, which no nap is the reason for.
    assert max(off.values()) < 0.1, f"found {found.shares}, true {expected}"
    assert found.recommendation.rung == rung


def _loader(batch_size=4, **options):
    return DataLoader(TensorDataset(torch.zeros(40, 3, 8, 8)), batch_size, **options)


@pytest.fixture(scope="module")
def slow():
    return Stalls(step=0.01, fetch=0.03).diagnosed(batches=4, rounds=3)[0]


class TestDiagnosis:
    def test_three_sentences(self, slow):
        lines = repr(slow).splitlines()
        assert len(lines) == 3
        assert re.match(r"Training waits for its data 7\d% of the time: fetch \d\d%", lines[0])
        assert re.match(r"Were data free, it would be \d\.\d\dx \[.+, .+\] as fast", lines[1])
        assert "num_workers=" in lines[2]
        assert "Notebook 03_persistent_workers" in lines[2]

    def test_a_picture_in_a_notebook(self, slow):
        shown = slow._repr_html_()
        assert 'src="data:image/png;base64,iVBOR' in shown
        assert shown.count("<p>") == 3

    def test_the_plot_ends_where_a_batch_ends(self, slow):
        ax = slow.plot()
        assert [label.get_text() for label in ax.get_yticklabels()] == ["training", "if data were free"]
        assert max(bar.get_x() + bar.get_width() for bar in ax.patches) == pytest.approx(slow.costs.together)

    def test_the_frame_holds_what_it_is_reckoned_from(self, slow):
        table = slow.frame.pivot(index="round", columns="variant", values="steady_s") / 4
        assert table["loader and step"].median() == pytest.approx(slow.costs.together)
        assert table["step"].median() == pytest.approx(slow.costs.step)
        assert slow.frame["n_images"].eq(16).all()
        assert not slow.frame["rung"].any()

    def test_the_ceiling_is_what_data_cost(self, slow):
        assert slow.ceiling == pytest.approx(slow.costs.together / slow.costs.step)
        assert slow.ceiling_low <= slow.ceiling_high


class TestCold:
    @pytest.fixture
    def photos(self, tmp_path):
        store = lk.FolderStore(lk.make_photos(tmp_path / "photos", 16))
        store.evict()
        if lk.resident_fraction(store.paths()) > 0.1:
            pytest.skip("this file system's pages cannot be evicted")
        return lk.ImageDataset(store, transform=lambda image: image[:, :64, :64])

    def test_the_store_is_evicted(self, photos):
        found = diagnose(DataLoader(photos, 4), _nap, batches=4, rounds=1)
        assert found.cold > 0
        assert "from a cold page cache the loader takes" in repr(found)

    def test_nothing_is_said_where_nothing_was_cold(self, photos):
        found = diagnose(DataLoader(photos, 4), _nap, batches=4, rounds=1, evict=lambda: 10**9)
        assert found.cold is None

    def test_nor_where_nothing_can_be_evicted(self, photos, monkeypatch):
        monkeypatch.setattr(lk.FolderStore, "evict", _refuse)
        assert diagnose(DataLoader(photos, 4), _nap, batches=4, rounds=1).cold is None


def _refuse(store):
    raise OSError("not here")


class TestLoaders:
    def test_a_loader_of_iterables(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.zeros(40, 3, 8, 8))

        assert diagnose(DataLoader(Stream(), 4), _nap, batches=2, rounds=1).shares["compute"] > 0.5

    def test_a_data_set_of_whole_batches(self):
        assert diagnose(_loader(None), _nap, batches=2, rounds=1).shares["compute"] > 0.5

    def test_a_list(self):
        assert diagnose([torch.zeros(4, 3, 8, 8)], _nap, batches=2, rounds=1).recommendation.rung == "none"

    def test_batches_that_nobody_can_count(self):
        found = diagnose(["a", "b"], _nap, batches=2, rounds=1)
        assert found.frame["n_images"].eq(2).all()

    def test_a_generator_is_gone_through_once(self):
        with pytest.raises(ValueError, match="a generator, can be gone through only once"):
            diagnose((torch.zeros(1) for _ in range(5)), _nap)

    def test_an_empty_one(self):
        with pytest.raises(ValueError, match="a list, gives no batch"):
            diagnose([], _nap)

    def test_what_a_step_raises_is_raised(self):
        def step(batch):
            raise ArithmeticError("loss is nan")

        with pytest.raises(ArithmeticError, match="nan"):
            diagnose(_loader(), step)

    @pytest.mark.parametrize("wrong", [{"batches": 0}, {"rounds": 0}])
    def test_arguments(self, wrong):
        with pytest.raises(ValueError, match="at least one of each"):
            diagnose(_loader(), _nap, **wrong)
        with pytest.raises(ValueError, match="step is a int"):
            diagnose(_loader(), 3)

    def test_the_limit_is_kept(self):
        import time

        start = time.perf_counter()
        diagnose([torch.zeros(1, 3, 8, 8)], lambda batch: time.sleep(0.05), batches=1000, rounds=2, limit_s=3)
        assert time.perf_counter() - start < 30

    def test_global_generators_are_given_back(self):
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        making_in_one_process(_loader(shuffle=True), limit_s=1, n_batches=3)
        assert torch.equal(torch.rand(3), expected)

    def test_threads_are_given_back(self):
        before = torch.get_num_threads()
        making_in_one_process(_loader(), limit_s=1, n_batches=3)
        assert torch.get_num_threads() == before

    def test_waiting_is_no_computing(self):
        napping, burning = (Stalls(**{cause: 0.02}).loader(Notes()) for cause in ("fetch", "prepare"))
        assert making_in_one_process(napping, limit_s=2, n_batches=5).waiting > 0.9
        assert making_in_one_process(burning, limit_s=2, n_batches=5).waiting < 0.2


def _nap(batch):
    import time

    time.sleep(0.005)


def _costs(**changed):
    base = {
        "step": 1.0, "copy": 0.0, "hand_over": 0.0, "fetch": 0.0, "prepare": 0.0, "start": 0.0,
        "together": 1.0, "making": None, "waiting": 0.0, "step_cpu": 0.0,
    }  # fmt: skip
    return Costs(**{**base, **changed})


class TestAdvice:
    def test_the_largest_loss_comes_first(self):
        found = advise(_costs(copy=0.5, hand_over=1.0, together=2.5), [])
        assert [advice.rung for advice in found] == ["hand-over", "copy"]

    def test_little_is_not_worth_a_change(self):
        assert [advice.rung for advice in advise(_costs(copy=0.04, together=1.04), [])] == ["none"]

    def test_workers_bring_what_the_cores_allow(self, monkeypatch):
        monkeypatch.setattr("labkit.measure.advice.usable_cores", lambda: 8)
        found = advise(_costs(prepare=4.0, together=5.0, making=4.0), _loader())
        assert [advice.rung for advice in found] == ["workers"]
        assert found[0].speedup == pytest.approx(5.0)  # half a second a batch: the step is slower then
        assert "num_workers=8" in found[0].action

    def test_enough_workers_are_not_asked_for_again(self):
        loader = _loader(num_workers=usable_cores())
        assert advise(_costs(prepare=1.0, together=2.0), loader)[0].rung == "decoding"
        assert advise(_costs(fetch=1.0, together=2.0), loader)[0].rung == "storage"

    def test_no_gain_beyond_the_step(self):
        assert advise(_costs(fetch=1.0, together=2.0), [])[0].speedup == pytest.approx(2.0)

    def test_a_slow_decoder_is_named(self):
        loader = _loader(num_workers=usable_cores())
        loader.dataset.decoder = "pil"
        found = advise(_costs(prepare=1.0, together=2.0), loader)[0]
        assert found.notebook == "02_read_image"
        assert "instead of pil" in found.action


class TestCommand:
    @pytest.fixture(autouse=True)
    def script(self, tmp_path, monkeypatch):
        (tmp_path / "my_training.py").write_text(
            "import time\ndef make_training(): return [[0, 1]], lambda batch: time.sleep(0.01)\ndef wrong(): return 3\n"
        )
        (tmp_path / "half_done.py").write_text("import nowhere_to_be_found\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [*sys.path])
        yield
        sys.modules.pop("my_training", None)

    def run(self, *arguments):
        return CliRunner().invoke(app, ["diagnose", *arguments])

    def test_it_says_what_to_do_and_draws_it(self, tmp_path):
        result = self.run("my_training:make_training", "--batches", "3", "--rounds", "1", "--picture", "stalls.png")
        assert result.exit_code == 0, result.output
        assert re.search(r"^compute +\d+\.\d%  #+$", result.output, re.M)
        assert "Leave the loader as it is" in result.output
        assert (tmp_path / "stalls.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("my_training", "write module:function"),
            ("not_there:make", "there is no module not_there"),
            ("my_training:mak", "it has make_training, wrong"),
            ("my_training:wrong", "gave a int: return loader, step"),
        ],
    )
    def test_one_clear_error(self, name, says):
        result = self.run(name)
        assert result.exit_code == 2
        assert says in result.output
        assert len(result.output.splitlines()) == 1

    def test_what_a_module_lacks_is_its_own_error(self):
        assert isinstance(self.run("half_done:make").exception, ModuleNotFoundError)
