"""lk.plan: where each input comes from, what is wrong or missing, what the page says, and what helps."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import labkit as lk
from labkit import course
from labkit.errors import GilError
from labkit.planning.fixes import EFFORTS
from labkit.planning.formulas import Estimate, LoaderCosts
from labkit.planning.plan import DEFAULTS
from labkit.planning.published import STORAGES, cores_of, find_training, pcie, published_inputs
from labkit.watching.advice import Costs
from tests.memory_store import MemoryStore

OWN = {"cores_per_node": 8, "cpu_ms_per_image": 2}

# --- inputs: assumed, published, measured, entered


def sources(plan):
    return {name: (each.value, each.kind) for name, each in plan.setup.inputs.items()}


def test_what_is_entered_comes_before_what_is_published():
    found = sources(lk.plan(gpu="h100", n_gpus=8, n_nodes=2, cpu_ms_per_image=2))
    assert found["images_per_s_per_gpu"] == (pytest.approx((1786 * 7150) ** 0.5), "published")
    assert found["cores_per_node"] == (48, "published")
    assert found["disk_gb_per_node"] == (15_360, "published")
    assert found["pcie_gb_per_s"] == (pytest.approx(51.2), "theory")
    assert found["kb_per_image"] == (114.66, "published")
    assert found["cpu_ms_per_image"] == (2, "entered")
    entered = {"vcpus_per_node": 4, "cpu_ms_per_image": 2, "latency_ms": 1, "storage": "s3", "kb_per_image": (20, 80)}
    plan = lk.plan(500, gpu="h100", **entered)
    found = sources(plan)
    assert found["images_per_s_per_gpu"] == (500, "entered")
    assert found["cores_per_node"] == (2, "entered")
    assert found["latency_ms"] == (1, "entered")
    assert found["requests_per_s"] == (5500, "published")
    assert plan.value("kb_per_image") == (pytest.approx(40), 20, 80)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "images_per_s_per_gpu is not known: enter demand"),
        ({"demand": 100}, "cores_per_node is not known: enter cores_per_node, or vcpus"),
        ({"demand": 100, "cores_per_node": 4}, r"cpu_ms_per_image is not known.*lk.loader_costs\(FOLDER\)"),
        ({"demand": 0, **OWN}, "images_per_s_per_gpu must be a number > 0, got 0"),
        ({"demand": 1, **OWN, "cores": 4}, "cores is no input of a plan: it takes images_per_s_per_gpu, n_gpus"),
        ({"demand": 1, **OWN, "cpu_ms_per_image": (3, 2)}, "cpu_ms_per_image: an estimate must be"),
        ({"demand": 1, **OWN, "n_gpus": 0}, "n_gpus must be an integer >= 1, got 0"),
        ({"demand": 1, **OWN, "n_images": 1.5}, "n_images must be an integer >= 1, got 1.5"),
        ({"demand": 1, **OWN, "n_gpus": 8, "n_nodes": 3}, "a multiple of n_nodes, got 8 GPUs on 3 nodes"),
        ({"demand": 1, **OWN, "storage": "tape"}, "storage must be one of s3, nvme, memory, got 'tape'"),
        ({"demand": 1, **OWN, "data": "video"}, "data must be one of photos, photos at 256"),
        ({"demand": 1, **OWN, "costs": 3}, "costs must be what lk.loader_costs gives, or its file, got a int"),
        ({"demand": 1, **OWN, "vcpus_per_node": -1}, "vcpus_per_node must be a number > 0, got -1"),
        *(({"gpu": gpu, **OWN}, "must name one of H100 SXM.*got .*enter the images/s") for gpu in ("T4", "100", "-")),
        ({"gpu": "h100", "model": "ViT-B/16", **OWN}, "model must be one of ResNet-50, got 'ViT-B/16'"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(arguments, says):
    with pytest.raises(ValueError, match=says):
        lk.plan(**arguments)


@pytest.mark.parametrize(
    ("gpu", "key"),
    [("h100", "H100 SXM"), ("H100 SXM", "H100 SXM"), ("rtx3090", "RTX 3090"), ("3090", "RTX 3090"),
     ("RTX-3090", "RTX 3090"), ("l40s", "L40S")],
)  # fmt: skip
def test_a_gpu_is_found_by_the_names_that_people_use(gpu, key):
    assert find_training(gpu, "ResNet-50") == f"ResNet-50, {key}"
    assert find_training("3090", "ViT-B/16") == "ViT-B/16, RTX 3090"


def test_whatever_is_published_has_an_address_and_the_rest_says_why():
    for key, training in course.PUBLISHED_TRAINING.items():
        demand = published_inputs(key, 8)["images_per_s_per_gpu"]
        assert training.url.startswith("https://github.com/")
        assert training.url in demand.source
        low, high = demand.interval
        assert demand.kind == "published"
        assert low < demand.value < high
        assert (training.images_per_s == high) == training.is_tuned  # a record is not what to expect
    rates = (rate for storage in STORAGES.values() for rate in storage.values())
    for estimate in (*DEFAULTS.values(), *rates):
        assert estimate.kind in ("published", "assumed", "theory")
        assert (estimate.kind == "assumed") != ("https://" in estimate.source)
    assert pcie().kind == "theory"
    assert "32 GB/s in theory" in pcie().source
    assert pcie(64e9).interval == (38.4, 64)


def test_steps_and_cores_follow_from_what_is_published():
    assert course.PUBLISHED_TRAINING["ResNet-50, V100 16GB"].step_s(60) == 0.05
    assert (cores_of(8).value, *cores_of(8).interval) == (4, 4, 5.2)  # a vCPU is half a core
    assert published_inputs("ResNet-50, H100 SXM", 8)["cores_per_node"].value == 96
    assert "cores_per_node" not in published_inputs("ResNet-50, RTX 3090", 1)


# --- what was seen of a training

COSTS = Costs(step=0.1, copy=0, hand_over=0, fetch=0, prepare=0.1, start=0, together=0.2, making=0.4, waiting=0.25,
              step_cpu=0.08)  # fmt: skip


@pytest.fixture
def diagnosis():
    frame = pd.DataFrame({
        "variant": ["step", "loader", "step", "step"], "images_per_s": [640, 300, 600, 660], "batch_size": 64,
        "env_id": "a-machine",
    })  # fmt: skip
    return SimpleNamespace(frame=frame, costs=COSTS)


def test_a_diagnosis_gives_the_demand_and_what_an_image_costs(diagnosis):
    plan = lk.plan(diagnosis, cores_per_node=4)
    assert plan.value("images_per_s_per_gpu") == (640, 600, 660)
    assert plan.value("step_cores_per_gpu")[0] == pytest.approx(0.8)
    assert plan.value("cpu_ms_per_image")[0] == pytest.approx(0.4 * 0.75 * 1e3 / 64)
    row = plan.frame.set_index("name").loc["images_per_s_per_gpu"]
    assert row["status"] == "measured here"
    assert row["sources"] == ["images_per_s_per_gpu: lk.diagnose, 3 rounds on a-machine: the step alone"]
    diagnosis.frame["images_per_s"] = 0.0
    with pytest.raises(ValueError, match=r"counted no images in its batches: pass count= to lk.diagnose"):
        lk.plan(diagnosis, **OWN)


def test_a_real_diagnosis_is_taken():
    found = lk.diagnose([np.zeros((2, 8, 8, 3))] * 8, lambda batch: sum(range(20_000)), batches=4, rounds=2)
    assert lk.plan(found, cores_per_node=4, cpu_ms_per_image=1).value("images_per_s_per_gpu")[0] > 0


def test_the_report_of_a_watch_gives_them_with_its_batch_size(tmp_path):
    path = tmp_path / "watch.json"
    costs = {name: getattr(COSTS, name) for name in COSTS.__dataclass_fields__}
    path.write_text(json.dumps({"costs_s": costs, "ceiling_is_bound": True}))
    plan = lk.plan(path, batch_size=32, cores_per_node=4)
    assert plan.value("images_per_s_per_gpu")[0] == 320
    assert plan.value("slowdown") == (1, 1, 1)
    assert "which busy cores slow down" in str(plan)
    with pytest.raises(ValueError, match="batch_size is missing: a watch counts batches"):
        lk.plan(path, cores_per_node=4)


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '{"costs_s": {}, "ceiling_is_bound": 1, '])
def test_other_and_missing_files_are_told(tmp_path, text):
    other = tmp_path / "other.json"
    for arguments in ({"demand": other}, {"demand": 1, "costs": other}):
        with pytest.raises(FileNotFoundError):
            lk.plan(**arguments, **OWN, batch_size=2)
    other.write_text(text)
    with pytest.raises(ValueError, match=r"other.json is not a report of `labkit watch --json`"):
        lk.plan(other, batch_size=2, cores_per_node=4)
    for costs in (text, '{"costs": {"video": {}}, "notes": []}', '{"costs": {"photos": {"kb": {"value": -1}}}}'):
        other.write_text(costs)
        with pytest.raises(ValueError, match=r"other.json holds no costs of labkit.loader_costs"):
            lk.plan(1, costs=other, cores_per_node=4)


# --- what an image costs here


@pytest.fixture(scope="module")
def photos(first_photos):
    return lk.FolderStore(first_photos(12))


@pytest.fixture(scope="module")
def costs(photos):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.measure.gil.gil_us_per_image", lambda factory, seconds: sum(1 for _ in factory()) * 30.0)
        return lk.loader_costs(photos, n_images=8, rounds=1)


def test_three_kinds_of_data_are_measured(costs, photos):
    assert list(costs.by_data) == ["photos", "photos at 256", "pixels at 256"]
    for found in costs.by_data.values():
        assert set(found) == {"cpu_ms_per_image", "gil_us_per_image", "kb_per_image"}
        assert {each.kind for each in found.values()} == {"measured here"}
        low, high = found["cpu_ms_per_image"].interval
        assert 0 < low <= found["cpu_ms_per_image"].value <= high
    assert costs.notes == []
    keys = photos.keys()
    mean_kb = sum(len(photos.read(keys[round(number * 11 / 7)])) for number in range(8)) / 8e3
    assert costs.by_data["photos"]["kb_per_image"].value == pytest.approx(mean_kb)
    assert costs.by_data["photos at 256"]["kb_per_image"].value < mean_kb
    assert 180 < costs.by_data["pixels at 256"]["kb_per_image"].value < 400  # 256 x 256 x 3, and the longer side
    us = costs.by_data["photos"]["gil_us_per_image"]
    assert us.value == 30
    assert us.interval[0] < 30 < us.interval[1]


def test_without_py_spy_the_lock_is_not_known(photos, monkeypatch):
    def missing(factory, seconds):
        raise GilError("py-spy is missing")

    monkeypatch.setattr("labkit.measure.gil.gil_us_per_image", missing)
    found = lk.loader_costs(photos, n_images=2, rounds=1)
    assert found.notes == ["time under Python's lock is not known: py-spy is missing"]
    assert "gil_us_per_image" not in found.by_data["photos"]
    notes = lk.plan(0.1, cores_per_node=2, costs=found).notes  # far below what any core decodes
    assert notes == [*found.notes, "Core times are those of the machine that measured them: other cores differ."]


def test_nothing_cannot_be_measured(photos):
    for wrong in ({"n_images": 0}, {"rounds": 0}):
        with pytest.raises(ValueError, match="must be an integer >= 1"):
            lk.loader_costs(photos, **wrong)
    with pytest.raises(ValueError, match="holds no images"):
        lk.loader_costs(MemoryStore({}))


def test_a_plan_takes_the_costs_of_its_data_from_their_file_too(costs, tmp_path):
    path = costs.save_json(tmp_path / "costs.json")
    assert LoaderCosts.load_json(path) == costs
    for data, found in costs.by_data.items():
        plan, from_file = (lk.plan(100, cores_per_node=2, costs=each, data=data) for each in (costs, path))
        assert plan.value("cpu_ms_per_image")[0] == found["cpu_ms_per_image"].value
        assert "lk.loader_costs" in json.dumps(plan.to_dict())
        assert str(plan) == str(from_file)


# --- the page: every line can be traced

# The two plans of the page on planning.
EXAMPLES = {
    "8 x H100": {"gpu": "h100", "n_gpus": 8, "cpu_ms_per_image": (1, 2.4), "gil_us_per_image": 60, "storage": "s3"},
    "RTX 3090": {"gpu": "rtx 3090", "cores_per_node": 4, "cpu_ms_per_image": (1, 2.4)},
}


@pytest.fixture(scope="module", params=EXAMPLES)
def plan(request):
    return lk.plan(**EXAMPLES[request.param])


def test_every_quantity_has_an_interval_and_a_formula_or_sources(plan):
    for _, row in plan.frame.iterrows():
        assert row["sources"], row["name"]
        assert (row["group"] == "input") == (row["formula"] == "") == (row["status"] != "predicted")
    used = {source.partition(":")[0] for sources in plan.frame["sources"] for source in sources}
    assert used == set(plan.frame.loc[plan.frame["group"] == "input", "name"])
    assert (plan.frame["low"] <= plan.frame["value"]).all()
    assert (plan.frame["value"] <= plan.frame["high"]).all()
    ceilings = plan.frame.loc[plan.frame["group"] == "ceiling", "value"]
    assert plan.value("images_per_s")[0] <= ceilings.min() * 1.0000001
    with pytest.raises(KeyError):
        plan.value("luck")


def test_every_line_of_the_page_refers_to_its_sources(plan):
    text = str(plan)
    listed = dict(re.findall(r"^  \[(\d+)\] (.*)$", text, re.M))
    lines = re.findall(r"^  \S.* \[([\d,]+)\]$", text, re.M)
    by_group, order = plan.frame.groupby("group")["sources"], ("result", "ceiling", "need", "input")
    expected = [each for group in order for each in by_group.get_group(group)]
    assert [[listed[ref] for ref in refs.split(",")] for refs in lines] == expected
    assert text.startswith(plan.title)
    assert all(sentence in text for sentence in [*plan.sentences, *plan.notes])
    assert text.count("(predicted)") == 3


def test_its_json_says_the_same(plan, tmp_path):
    found = json.loads(plan.save_json(tmp_path / "plan.json").read_text())
    assert found["bottleneck"] == plan.bottleneck
    for column in ("name", "value"):
        assert [line[column] for line in found["lines"]] == list(plan.frame[column])
    assert found["sentences"] == plan.sentences
    assert [fix["gain"] for fix in found["fixes"]] == [list(fix.gain) for fix in plan.fixes]


def test_sentences_name_the_bottleneck_and_steps_that_lead_to_the_gpus():
    plan = lk.plan(1000, cores_per_node=2, step_cores_per_gpu=1, cpu_ms_per_image=2, slowdown=1, storage="memory")
    assert plan.sentences[0] == (
        "Predicted: 500 [500, 500] images/s of the 1,000 that the GPUs could use, which train 50% [50%, 50%] of the "
        "time. The limit: the cores in 100% of the draws."
    )
    fix = "First: Use nodes of 4 cores (hardware): 2.00 times as fast [2.00, 2.00], then limited by the GPUs."
    assert plan.sentences[1] == fix
    assert "lk.loader_costs measures what it would bring" in " ".join(plan.notes)
    plan = lk.plan(**EXAMPLES["8 x H100"])
    assert plan.steps[-1].next_limit == "the GPUs"
    begins = ["First: Copy the images (147 GB)", "Or: Write shards", "Or: Keep "]
    assert [line[: len(begin)] for line, begin in zip(plan.sentences[1:], begins, strict=True)] == begins
    assert "503 Slow Down" in " ".join(plan.notes)


def test_its_plot_shows_the_ceilings_the_scarcest_first_and_says_that_they_are_predicted():
    far = lk.plan(gpu="h100", n_gpus=8, cpu_ms_per_image=(0.8, 1.0), storage="s3")
    ax = course.plot_plan(far, ax=Figure().add_subplot())
    rows = far.frame.query("group == 'ceiling' and name != 'gpu_ceiling'").sort_values("value")
    assert [label.get_text() for label in ax.get_yticklabels()] == list(rows["quantity"])
    assert [each.lines[0].get_xdata()[0] for each in ax.containers] == pytest.approx(list(rows["value"]))
    colors = [each.lines[0].get_color() == "firebrick" for each in ax.containers]
    assert colors == list(rows["value"] < far.value("demand")[0])
    assert ax.get_yticklabels()[0].get_text() == far.bottleneck
    assert ax.get_title("right") == "predicted"
    title = " ".join(ax.get_title("left").split())
    assert title == f"{far.title}: {far.bottleneck} allow 1,380 images/s of 28,600"
    assert ax.get_legend().get_texts()[0].get_text() == "the GPUs could use 28,600"


def test_neither_the_function_nor_the_command_needs_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import labkit as lk\n"
        "text = repr(lk.plan(gpu='h100', n_gpus=8, cpu_ms_per_image=(1, 2), storage='s3'))\n"
        "assert 'The limit: the requests in flight' in text\n"
        "sys.argv[1:] = 'plan --gpu 3090 --cores 4 --cpu-ms 2'.split()\n"
        "from labkit.app.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ResNet-50, RTX 3090" in done.stdout


# --- what helps against each scarce resource


def scarce(demand=10_000, **inputs):
    machine = {"cores_per_node": 16, "cpu_ms_per_image": 1, "step_cores_per_gpu": 0, "slowdown": 1, "storage": "memory"}
    return lk.plan(demand, **{**machine, **inputs})


def known_costs(**cpu_ms):
    """Known costs by data: `photos`, `small`, `pixels`."""
    kinds = {"photos": ("photos", 100), "small": ("photos at 256", 25), "pixels": ("pixels at 256", 250)}
    return LoaderCosts({
        kinds[each][0]: {
            "cpu_ms_per_image": Estimate(ms, source="a run"), "kb_per_image": Estimate(kinds[each][1], source="a run"),
        }
        for each, ms in cpu_ms.items()
    })  # fmt: skip


# Resource -> a plan that lacks it, and how the actions begin, in their order.
LACKING = {
    "the cores": ({"cores_per_node": 4}, ["Use nodes of 10 cores"]),
    "Python's lock": ({"gil_us_per_image": 250}, ["Load in 3 processes"]),
    "the PCIe bus": ({"bytes_per_value": 4, "pcie_gb_per_s": 4}, ["Send bytes"]),
    "the network": (
        {"storage": "s3", "shard_mb": 500, "requests_in_flight_per_gpu": 1000, "network_gbit_per_node": 4,
         "kb_per_image": 100},
        ["Use nodes with local NVMe disks for the images (128 GB)", "Use a network of 8 Gbit/s"],
    ),
    "the storage's requests per second": (
        {"storage": "s3", "requests_in_flight_per_gpu": 20_000, "batches_ahead": 100, "request_cpu_ms": 0,
         "disk_gb_per_node": 200},
        ["Copy the images", "Write shards", "Spread the keys over 2 prefixes"],
    ),
    "the storage's MB per second": (
        {"storage": "nvme", "storage_mb_per_s": 500, "kb_per_image": 100, "requests_in_flight_per_gpu": 100},
        ["Use storage of 1,000 MB/s"],
    ),
    "the requests in flight": (
        {"storage": "s3", "n_prefixes": 2}, ["Write shards", "Keep ", "Use nodes with local NVMe disks"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("resource", LACKING)
def test_known_fixes_come_first_those_that_bring_most_for_their_effort_and_the_first_heals(resource):
    inputs, begins = LACKING[resource]
    plan = scarce(**inputs)
    assert plan.bottleneck == resource
    assert [fix.action[: len(begin)] for fix, begin in zip(plan.fixes, begins, strict=True)] == begins
    best = max((fix.gain[0] for fix in plan.fixes if fix.effort != "hardware"), default=0)
    ranks = [(fix.effort == "hardware" or fix.gain[0] < 0.75 * best, EFFORTS.index(fix.effort)) for fix in plan.fixes]
    assert ranks == sorted(ranks)
    after = plan.after(plan.fixes[0])
    assert plan.fixes[0].gain[0] == np.median(after.setup.rate / plan.setup.rate) > 1.1
    assert plan.steps[-1].next_limit == "the GPUs"


def test_measured_costs_give_the_gain_and_nothing_is_said_of_unknown_ones():
    plan = scarce(cores_per_node=4, cpu_ms_per_image=None, costs=known_costs(photos=1, small=0.5, pixels=0.1))
    assert [fix.action[:6] for fix in plan.fixes] == ["Decode", "Resize", "Use no"]
    assert plan.fixes[1].gain == pytest.approx((2, 2, 2))
    assert plan.fixes[0].gain == pytest.approx((2.5, 2.5, 2.5))  # then the GPUs limit
    after = plan.after(plan.fixes[0])
    assert after.setup.data == "pixels at 256"
    assert "a run" in " ".join(after.frame.set_index("name").loc["core_ceiling", "sources"])
    assert [fix.effort for fix in scarce(cores_per_node=4).fixes] == ["hardware"]


def test_uncertain_inputs_give_an_interval_and_prepared_data_are_not_prepared_again():
    gain = scarce(cores_per_node=4, cpu_ms_per_image=(0.8, 1.25)).fixes[0].gain
    assert gain == pytest.approx((2.5, 2, 3.125), rel=0.01)
    assert gain[1] < gain[0] < gain[2]
    plan = scarce(cores_per_node=1, cpu_ms_per_image=None, data="pixels at 256", costs=known_costs(pixels=0.5))
    assert [fix.action[:12] for fix in plan.fixes] == ["Use nodes of"]


def test_requests_need_batches_to_put_images_in():
    """140 ms at 10,000 images/s: 1,400 and more images are on their way, and each has a place in a batch."""

    def more_requests(**inputs):
        far = {"storage": "s3", "latency_ms": 140, "request_cpu_ms": 0, "n_prefixes": 2, "batch_size": 100, **inputs}
        fix = next(each for each in scarce(**far).fixes if each.action.startswith("Keep"))
        return fix, fix.setup.inputs["requests_in_flight_per_gpu"].value

    fix, n_requests = more_requests()
    assert 1400 <= n_requests < 1450
    assert fix.setup.inputs["batches_ahead"].value >= n_requests / 100 + 1
    assert "batches in memory" in fix.action
    assert more_requests(batch_size=5000)[0].setup.inputs["batches_ahead"].value == 4  # no fewer than there are
    assert 770 <= more_requests(n_prefixes=1)[1] < 800  # 5,500 a second are answered: more would only wait
    assert 70 <= more_requests(request_cpu_ms=2, request_lock_share=1)[1] < 75  # 500 a second leave the lock


def test_images_are_copied_where_they_fit():
    plans = {gb: scarce(storage="s3", disk_gb_per_node=gb) for gb in (100, 200, None)}
    efforts = {gb: [fix.effort for fix in plan.fixes if "NVMe" in fix.action] for gb, plan in plans.items()}
    assert efforts == {100: ["hardware"], 200: ["a copy, once"], None: ["hardware"]}


def test_nothing_is_fixed_where_the_gpus_limit_but_what_may_be_scarce():
    assert scarce().fixes == scarce().steps == []
    plan = scarce(demand=(5000, 20_000), cores_per_node=12)
    assert plan.bottleneck == "the GPUs"
    assert plan.fixes[0].action.startswith("Use nodes of")
    assert plan.fixes[0].gain[0] == pytest.approx(1)
    assert plan.fixes[0].gain[2] > 1.3


def test_without_batches_ahead_no_request_is_in_flight():
    plan = lk.plan(1000, cpu_ms_per_image=2, cores_per_node=8, kb_per_image=100, storage="s3", batches_ahead=1)
    assert plan.value("in_flight_per_gpu")[0] == 0
    assert plan.value("images_per_s")[0] == 0
    assert plan.bottleneck == "the requests in flight"


def test_a_count_may_be_an_estimate():
    images = Estimate(2e6, 1e6, 3e6)
    plan = lk.plan(1000, cpu_ms_per_image=2, cores_per_node=8, n_images=images)
    assert plan.value("dataset_gb")[0] == pytest.approx(2e6 * plan.value("kb_per_image")[0] / 1e6, rel=0.05)
