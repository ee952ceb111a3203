"""A plan: every line can be traced, and the page, the sentences and the files say the same."""

import json
import re

import pytest

import labkit as lk

# The two plans of the page on planning.
EXAMPLES = {
    "8 x H100": {"gpu": "h100", "n_gpus": 8, "cpu_ms_per_image": (1, 2.4), "gil_us_per_image": 60, "storage": "s3"},
    "RTX 3090": {"gpu": "rtx 3090", "cores_per_node": 4, "cpu_ms_per_image": (1, 2.4)},
}


@pytest.fixture(scope="module", params=EXAMPLES)
def plan(request):
    return lk.plan(**EXAMPLES[request.param])


class TestFrame:
    def test_every_line_has_a_formula_or_a_kind_and_sources(self, plan):
        for _, row in plan.frame.iterrows():
            assert row["sources"], row["name"]
            assert (row["group"] == "input") == (row["formula"] == "")
            assert (row["group"] == "input") == (row["status"] != "predicted")

    def test_every_input_used_by_a_line_is_there(self, plan):
        names = set(plan.frame["name"])
        used = {source.partition(":")[0] for sources in plan.frame["sources"] for source in sources}
        assert used <= names
        assert used == set(plan.frame.loc[plan.frame["group"] == "input", "name"])

    def test_values_lie_in_their_intervals(self, plan):
        assert (plan.frame["low"] <= plan.frame["value"]).all()
        assert (plan.frame["value"] <= plan.frame["high"]).all()

    def test_the_rate_is_the_smallest_ceiling(self, plan):
        ceilings = plan.frame.loc[plan.frame["group"] == "ceiling", "value"]
        assert plan.value("images_per_s")[0] <= ceilings.min() * 1.0000001

    def test_an_unknown_name(self, plan):
        with pytest.raises(KeyError):
            plan.value("luck")


class TestPage:
    def test_every_line_refers_to_its_sources(self, plan):
        text = str(plan)
        listed = dict(re.findall(r"^  \[(\d+)\] (.*)$", text, re.M))
        lines = re.findall(r"^  \S.* \[([\d,]+)\]$", text, re.M)
        assert len(lines) == len(plan.frame)
        for refs, sources in zip(lines, self.in_order(plan), strict=True):
            assert [listed[ref] for ref in refs.split(",")] == sources

    def in_order(self, plan):
        order = ["result", "ceiling", "need", "input"]
        return [sources for group in order for sources in plan.frame.loc[plan.frame["group"] == group, "sources"]]

    def test_it_begins_with_the_result(self, plan):
        text = str(plan)
        assert text.startswith(plan.title)
        assert all(sentence in text for sentence in [*plan.sentences, *plan.notes])
        assert text.count("(predicted)") == 3


class TestSentences:
    def test_the_bottleneck(self):
        plan = lk.plan(1000, cores_per_node=2, step_cores_per_gpu=1, cpu_ms_per_image=2, slowdown=1, storage="memory")
        assert plan.sentences[0] == (
            "Bottleneck: the cores in 100% of the draws. Predicted are 500 [500, 500] images/s of the 1,000 that the "
            "GPUs ask for: they train 50% [50%, 50%] of the time."
        )
        assert (
            plan.sentences[1]
            == "Cheapest fix: Use nodes of 4 cores (hardware): 2.00x [2.00, 2.00], then limited by the GPUs."
        )
        assert plan.sentences[2].startswith("Perhaps: Resize once")

    def test_the_steps_lead_to_the_gpus(self):
        plan = lk.plan(**EXAMPLES["8 x H100"])
        assert len(plan.steps) >= 2
        assert plan.steps[-1].next_limit == "gpu_ceiling"
        assert plan.sentences[1].startswith("Cheapest fix: ")
        assert plan.sentences[2].startswith("Then: ")


def test_json(plan, tmp_path):
    found = json.loads(plan.save_json(tmp_path / "plan.json").read_text())
    assert found["bottleneck"] == plan.bottleneck
    assert [line["name"] for line in found["lines"]] == list(plan.frame["name"])
    assert [line["value"] for line in found["lines"]] == list(plan.frame["value"])
    assert found["sentences"] == plan.sentences
    assert [fix["gain"] for fix in found["fixes"]] == [list(fix.gain) for fix in plan.fixes]
