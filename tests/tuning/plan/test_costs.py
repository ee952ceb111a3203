"""What an image costs here: what is measured, kept in a file, and given to a plan."""

import json

import pytest

import labkit as lk
from labkit.errors import GilError
from labkit.planning.formulas import LoaderCosts
from tests.memory_store import MemoryStore


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return lk.FolderStore(lk.make_photos(tmp_path_factory.mktemp("photos"), 12))


@pytest.fixture(scope="module")
def costs(photos):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.measure.gil.gil_us_per_image", lambda factory, seconds: sum(1 for _ in factory()) * 30.0)
        return lk.loader_costs(photos, n_images=8, rounds=1)


class TestMeasuring:
    def test_three_kinds_of_data(self, costs):
        assert list(costs.by_data) == ["photos", "photos at 256", "pixels at 256"]
        for found in costs.by_data.values():
            assert set(found) == {"cpu_ms_per_image", "gil_us_per_image", "kb_per_image"}
            assert {each.kind for each in found.values()} == {"measured here"}
            low, high = found["cpu_ms_per_image"].interval
            assert 0 < low <= found["cpu_ms_per_image"].value <= high
        assert costs.notes == []

    def test_bytes_of_an_image(self, costs, photos):
        keys = photos.keys()
        chosen = [round(number * 11 / 7) for number in range(8)]
        mean_kb = sum(len(photos.read(keys[number])) for number in chosen) / 8e3
        assert costs.by_data["photos"]["kb_per_image"].value == pytest.approx(mean_kb)
        assert costs.by_data["photos at 256"]["kb_per_image"].value < mean_kb
        assert 180 < costs.by_data["pixels at 256"]["kb_per_image"].value < 400  # 256 x 256 x 3, and the longer side

    def test_the_lock_has_the_uncertainty_of_its_samples(self, costs):
        us = costs.by_data["photos"]["gil_us_per_image"]
        assert us.value == 30
        assert us.interval[0] < 30 < us.interval[1]

    def test_without_py_spy(self, photos, monkeypatch):
        def missing(factory, seconds):
            raise GilError("py-spy is missing")

        monkeypatch.setattr("labkit.measure.gil.gil_us_per_image", missing)
        found = lk.loader_costs(photos, n_images=2, rounds=1)
        assert found.notes == ["time under Python's lock is not known: py-spy is missing"]
        assert "gil_us_per_image" not in found.by_data["photos"]
        plan = lk.plan(100, cores_per_node=2, costs=found)
        assert plan.notes == [
            *found.notes,
            "Core times are those of the machine that measured them: other cores differ.",
        ]

    @pytest.mark.parametrize("wrong", [{"n_images": 0}, {"rounds": 0}])
    def test_wrong_numbers(self, photos, wrong):
        with pytest.raises(ValueError, match="must be an integer >= 1"):
            lk.loader_costs(photos, **wrong)

    def test_an_empty_store(self):
        with pytest.raises(ValueError, match="holds no images"):
            lk.loader_costs(MemoryStore({}))


class TestKeeping:
    def test_a_file(self, costs, tmp_path):
        path = costs.save_json(tmp_path / "costs.json")
        assert LoaderCosts.load_json(path) == costs
        one, other = (lk.plan(100, cores_per_node=2, costs=each) for each in (costs, path))
        assert str(one) == str(other)

    @pytest.mark.parametrize(
        "text",
        ["{}", "[]", "no", '{"costs": {"video": {}}, "notes": []}', '{"costs": {"photos": {"kb": {"value": -1}}}}'],
    )
    def test_another_file(self, tmp_path, text):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other.json holds no costs of labkit.loader_costs"):
            LoaderCosts.load_json(tmp_path / "other.json")

    def test_a_plan_takes_those_of_its_data(self, costs):
        for data, found in costs.by_data.items():
            plan = lk.plan(100, cores_per_node=2, costs=costs, data=data)
            assert plan.value("cpu_ms_per_image")[0] == found["cpu_ms_per_image"].value
            assert "lk.loader_costs" in json.dumps(plan.to_dict())
