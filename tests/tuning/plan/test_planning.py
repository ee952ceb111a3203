"""plan(): where each input comes from, what is missing or wrong, what a diagnosis and a watch give, and no torch."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import labkit as lk
from labkit import course
from labkit.watching.advice import Costs

OWN = {"cores_per_node": 8, "cpu_ms_per_image": 2}


def sources(plan):
    return {name: (each.value, each.kind) for name, each in plan.setup.inputs.items()}


class TestInputs:
    def test_published_ones(self):
        found = sources(lk.plan(gpu="h100", n_gpus=8, n_nodes=2, cpu_ms_per_image=2))
        assert found["images_per_s_per_gpu"] == (7150, "published")
        assert found["cores_per_node"] == (48, "published")
        assert found["pcie_gb_per_s"] == (pytest.approx(51.2), "theory")
        assert found["kb_per_image"] == (114.66, "published")
        assert found["cpu_ms_per_image"] == (2, "entered")

    def test_entered_ones_come_before_all_others(self):
        plan = lk.plan(
            500, gpu="h100", vcpus_per_node=4, cpu_ms_per_image=2, latency_ms=1, storage="s3", kb_per_image=(20, 80)
        )
        found = sources(plan)
        assert found["images_per_s_per_gpu"] == (500, "entered")
        assert found["cores_per_node"] == (2, "entered")
        assert found["latency_ms"] == (1, "entered")
        assert found["requests_per_s"] == (5500, "published")
        assert plan.value("kb_per_image") == (pytest.approx(40), 20, 80)

    @pytest.mark.parametrize(("dtype", "n_bytes"), [("uint8", 1), ("bfloat16", 2), ("float32", 4)])
    def test_values_on_the_bus(self, dtype, n_bytes):
        assert lk.plan(100, dtype=dtype, **OWN).value("batch_kb_per_image")[0] == pytest.approx(150.528 * n_bytes)

    def test_a_storage_of_ones_own(self):
        plan = lk.plan(100, storage=course.Storage("NFS", {"latency_ms": (1, 4), "mb_per_s_per_request": 200}), **OWN)
        assert plan.setup.storage == "NFS"
        assert plan.value("latency_ms") == (2, 1, 4)
        assert "bandwidth_ceiling" not in set(plan.frame["name"])


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({}, r"the demand of a GPU is not known \(images_per_s_per_gpu\): enter demand"),
            ({"demand": 100}, r"the cores of a node is not known \(cores_per_node\): enter cores_per_node, or vcpus"),
            ({"demand": 100, "cores_per_node": 4}, r"core time of an image is not known .*lk.loader_costs\(FOLDER\)"),
            ({"demand": 0, **OWN}, "images_per_s_per_gpu must be a number > 0, got 0"),
            ({"demand": 1, **OWN, "cores": 4}, "cores is no input of a plan: it takes images_per_s_per_gpu, n_gpus"),
            ({"demand": 1, **OWN, "cpu_ms_per_image": (3, 2)}, "cpu_ms_per_image: an estimate must be"),
            ({"demand": 1, **OWN, "n_gpus": 0}, "n_gpus must be an integer >= 1, got 0"),
            ({"demand": 1, **OWN, "n_images": 1.5}, "n_images must be an integer >= 1, got 1.5"),
            ({"demand": 1, **OWN, "n_gpus": 8, "n_nodes": 3}, "a multiple of n_nodes, got 8 GPUs on 3 nodes"),
            ({"demand": 1, **OWN, "storage": "tape"}, "storage must be one of s3, nvme, memory, got 'tape'"),
            ({"demand": 1, **OWN, "storage": course.Storage("x", {"speed": 1})}, "speed is no input of a plan"),
            ({"demand": 1, **OWN, "dtype": "int4"}, "dtype must be one of uint8, float16"),
            ({"demand": 1, **OWN, "data": "video"}, "data must be one of photos, photos at 256"),
            ({"demand": 1, **OWN, "costs": 3}, "costs must be what lk.loader_costs gives, or its file, got a int"),
            ({"demand": 1, **OWN, "vcpus_per_node": -1}, "vcpus_per_node must be a number > 0, got -1"),
            ({"gpu": "T4", **OWN}, "gpu must name one of"),
        ],
    )
    def test_each_says_what_to_do(self, arguments, says):
        with pytest.raises(ValueError, match=says):
            lk.plan(**arguments)

    def test_missing_files(self, tmp_path):
        for arguments in ({"demand": tmp_path / "no.json"}, {"demand": 1, "costs": tmp_path / "no.json"}):
            with pytest.raises(FileNotFoundError):
                lk.plan(**arguments, **OWN, batch_size=2)


COSTS = Costs(step=0.1, copy=0, hand_over=0, fetch=0, prepare=0.1, start=0, together=0.2, making=0.4, waiting=0.25,
              step_cpu=0.08)  # fmt: skip


class TestSeen:
    def diagnosis(self):
        frame = pd.DataFrame({
            "variant": ["step", "loader", "step", "step"], "images_per_s": [640, 300, 600, 660], "batch_size": 64,
            "env_id": "a-machine",
        })  # fmt: skip
        return SimpleNamespace(frame=frame, costs=COSTS)

    def watch_json(self, path, **others):
        costs = {name: getattr(COSTS, name) for name in COSTS.__dataclass_fields__}
        path.write_text(json.dumps({"costs_s": costs, "ceiling_is_bound": True, **others}))
        return path

    def test_a_diagnosis(self):
        plan = lk.plan(self.diagnosis(), cores_per_node=4)
        assert plan.value("images_per_s_per_gpu") == (640, 600, 660)
        assert plan.value("step_cores_per_gpu")[0] == pytest.approx(0.8)
        assert plan.value("cpu_ms_per_image")[0] == pytest.approx(0.4 * 0.75 * 1e3 / 64)
        row = plan.frame.set_index("name").loc["images_per_s_per_gpu"]
        assert row["status"] == "measured here"
        assert row["sources"] == ["images_per_s_per_gpu: lk.diagnose, 3 rounds on a-machine: the step alone"]

    def test_a_watch(self, tmp_path):
        plan = lk.plan(self.watch_json(tmp_path / "watch.json"), batch_size=32, cores_per_node=4)
        assert plan.value("images_per_s_per_gpu")[0] == 320
        assert plan.value("slowdown") == (1, 1, 1)
        assert "which busy cores slow down" in str(plan)

    def test_a_watch_needs_its_batch_size(self, tmp_path):
        with pytest.raises(ValueError, match="batch_size is missing: a watch counts batches"):
            lk.plan(self.watch_json(tmp_path / "watch.json"), cores_per_node=4)

    @pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '{"costs_s": {}, "ceiling_is_bound": 1, '])
    def test_another_file(self, tmp_path, text):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other.json is not a report of `labkit watch --json`"):
            lk.plan(tmp_path / "other.json", batch_size=2, cores_per_node=4)

    def test_a_real_diagnosis(self):
        found = lk.diagnose([np.zeros((2, 8, 8, 3))] * 8, lambda batch: sum(range(20_000)), batches=4, rounds=2)
        plan = lk.plan(found, cores_per_node=4, cpu_ms_per_image=1)
        assert plan.value("images_per_s_per_gpu")[0] > 0

    def test_a_diagnosis_that_counted_nothing(self):
        found = self.diagnosis()
        found.frame["images_per_s"] = 0.0
        with pytest.raises(ValueError, match=r"counted no images in its batches: pass count= to lk.diagnose"):
            lk.plan(found, **OWN)


def test_no_torch():
    """Neither the function nor the command imports torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import labkit as lk\n"
        "text = repr(lk.plan(gpu='h100', n_gpus=8, cpu_ms_per_image=(1, 2), storage='s3'))\n"
        "assert 'Bottleneck: the requests in flight' in text\n"
        "sys.argv[1:] = 'plan --gpu 3090 --cores 4 --cpu-ms 2'.split()\n"
        "from labkit.app.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ResNet-50, RTX 3090" in done.stdout
