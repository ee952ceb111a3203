"""The plan as a form: its numbers are those of lk.plan, and in a browser it shows them, from the disk."""

import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

import labkit as lk
from labkit.lab.site import plan_form, plan_form_html
from labkit.tuning.plan import DATA, GROUPS, INPUTS, PUBLISHED_TRAINING, STORAGES, LoaderCosts, Page
from labkit.tuning.plan.ceilings import LINES
from labkit.tuning.plan.estimate import Estimate
from tests.lab.site.engine import Engine

COSTS = LoaderCosts(
    {
        "photos": {
            "cpu_ms_per_image": Estimate(3, 2.5, 4, "a run", "measured here"), "kb_per_image": Estimate(110),
            "gil_us_per_image": Estimate(90, 60, 120, "a run", "measured here"),
        },
        "photos at 256": {"cpu_ms_per_image": Estimate(1.5, 1, 2, "a run"), "kb_per_image": Estimate(25, source="it")},
        "pixels at 256": {"cpu_ms_per_image": Estimate(0.3, 0.2, 0.4, "it"), "kb_per_image": Estimate(250, 240, 260)},
    },
    ["a note"],
)  # fmt: skip

# Input -> the usual size of it, for random settings.
SIZES = {
    "cores_per_node": 64, "cpu_ms_per_image": 2, "gil_us_per_image": 100, "kb_per_image": 110, "latency_ms": 30,
    "mb_per_s_per_request": 90, "requests_per_s": 5000, "storage_mb_per_s": 3000, "request_mb": 10, "shard_mb": 300,
    "network_gbit_per_node": 50, "pcie_gb_per_s": 25, "step_cores_per_gpu": 1, "slowdown": 1.2, "batches_ahead": 4,
    "process_gb": 0.4, "pixel_kb_per_image": 200, "price_per_gpu_hour": 3, "price_per_1000_requests": 0.0004,
    "requests_in_flight_per_gpu": 50,
}  # fmt: skip
COUNTS = {"n_images": 10**6, "processes_per_gpu": 6, "n_prefixes": 4, "crop_size": 300, "batch_size": 500}
NEEDED = ("cores_per_node", "cpu_ms_per_image")


def drawn(size, draw, is_exact):
    value = float(f"{size * draw.lognormvariate(0, 0.7):.3g}")
    below, above = draw.uniform(1, 2), draw.uniform(1, 2)
    return draw.choice(
        [value] if is_exact else [value, [value / below, value * above], [value / below, value, value * above]]
    )


def random_setting(seed):
    """Arguments of lk.plan, as JSON has them; a third of the settings without any uncertainty."""
    draw = random.Random(seed)
    is_exact = seed % 3 == 0
    given = {"n_nodes": draw.choice([1, 2, 4]), "storage": draw.choice(list(STORAGES)), "data": draw.choice(DATA)}
    given["n_gpus"] = given["n_nodes"] * draw.choice([1, 4, 8])
    given["dtype"] = draw.choice(["uint8", "float32"])
    if draw.random() < 0.5 and not is_exact:
        given["model"], given["gpu"] = draw.choice(list(PUBLISHED_TRAINING)).split(", ")
    if "gpu" not in given or draw.random() < 0.3:
        given["demand"] = drawn(2000, draw, is_exact)
    share = 1 if is_exact else draw.random()
    names = [name for name in SIZES if name in NEEDED or draw.random() < share]
    inputs = {name: drawn(SIZES[name], draw, is_exact) for name in names}
    inputs |= {name: draw.randint(1, most) for name, most in COUNTS.items() if draw.random() < share}
    return given, inputs, not is_exact and draw.random() < 0.3


@pytest.fixture(scope="module")
def engine():
    return Engine(plan_form.plan_script(), defines_py=True)


def planned(engine, given, inputs=None, costs=None):
    loaded = f"labkitPlan.loadCosts({json.dumps(costs)}, 'costs.json')" if costs else "null"
    others = json.dumps({**given, "inputs": inputs or {}})
    return engine.run(f"labkitPlan.planned({{...{others}, costs: {loaded}}})")


def as_json(value):
    return json.loads(json.dumps(value))


def check_same(found, plan, rel):
    """All texts are equal, and numbers within `rel`."""
    expected = as_json(plan.to_dict())
    assert [cure.pop("text") for cure in found["cures"]] == [str(cure) for cure in plan.cures]
    for key in ("title", "storage", "data", "bottleneck", "sentences", "notes"):
        assert found[key] == expected[key]
    assert found["scarcest"] == pytest.approx(expected["scarcest"])
    for key, near in {"lines": rel, "cures": 1e-6}.items():  # cures bring intervals of their own
        assert [_texts(each) for each in found[key]] == [_texts(each) for each in expected[key]]
        numbers = [list(map(_numbers, rows[key])) for rows in (found, expected)]
        assert numbers[0] == ([pytest.approx(each, rel=near) for each in numbers[1]] if near else numbers[1])


def _texts(row):
    return {name: value for name, value in row.items() if not _numbers({name: value})}


def _numbers(row):
    values = {name: value if isinstance(value, list) else [value] for name, value in row.items()}
    return {
        f"{name} {at}": each for name, value in values.items() for at, each in enumerate(value)
        if isinstance(each, int | float) and not isinstance(each, bool)
    }  # fmt: skip


class TestTheSameNumbers:
    @pytest.mark.parametrize("part", range(4))
    def test_200_random_settings(self, engine, part, tmp_path):
        """The draws are NumPy's own, so numbers agree to the rounding of `exp`, and are equal without uncertainty."""
        path = COSTS.save_json(tmp_path / "costs.json")
        for seed in range(part, 200, 4):
            given, inputs, has_costs = random_setting(seed)
            if has_costs:
                inputs = {name: value for name, value in inputs.items() if name not in COSTS.by_data["photos"]}
            found = planned(engine, given, inputs, path.read_text() if has_costs else None)
            plan = lk.plan(**given, **inputs, costs=path if has_costs else None)
            is_exact = all(each.interval == (each.value, each.value) for each in plan.setup.inputs.values())
            check_same(found, plan, rel=0 if is_exact else 1e-6)

    @pytest.mark.parametrize("name", ["kb_per_image", "latency_ms", "n"])
    def test_the_draws_are_numpys(self, engine, name):
        expected = Estimate(2, 1, 8).draw(name)
        made = plan_form.plan_script().replace("return { planned,", "return { Estimate, planned,")
        found = Engine(made, defines_py=True).run(f"[...new labkitPlan.Estimate(2, 1, 8).draw({json.dumps(name)})]")
        assert found == pytest.approx(list(expected), rel=1e-6)

    def test_rows_as_text(self, engine):
        given = {"gpu": "h100", "n_gpus": 8, "storage": "s3", "cpu_ms_per_image": (1, 2.4), "n_images": 1_281_167}
        page = Page.of(lk.plan(**given))
        inputs = {name: given.pop(name) for name in ("cpu_ms_per_image", "n_images")}
        lines = planned(engine, given, inputs)["lines"]
        assert list(dict.fromkeys(source for line in lines for source in line["sources"])) == page.sources
        numbers = {source: at for at, source in enumerate(page.sources, 1)}
        rows = engine.run(f"{json.dumps(lines)}.map((line) => labkitPlan.page_row(line, {json.dumps(numbers)}))")
        for group, heading in GROUPS.items():
            found = [tuple(row) for row, line in zip(rows, lines, strict=True) if line["group"] == group]
            assert found == page.sections[heading]


WRONG = [
    ({}, {}), ({"demand": 100}, {}), ({"demand": 100}, {"cores_per_node": 4}), ({"demand": 0}, {}),
    ({"demand": 1}, {"cores": 4}), ({"demand": 1}, {"cpu_ms_per_image": [3, 2]}), ({"demand": 1, "n_gpus": 0}, {}),
    ({"demand": 1}, {"kb_per_image": [0, 2]}), ({"demand": 1}, {"n_images": 1.5}), ({"demand": 1}, {"slowdown": -2.5}),
    ({"demand": 1, "n_gpus": 8, "n_nodes": 3}, {}), ({"demand": 1, "storage": "tape"}, {}), ({"gpu": "T4"}, {}),
    ({"demand": 1, "dtype": "int4"}, {}), ({"demand": 1, "data": "video"}, {}), ({"vcpus_per_node": 0}, {}),
    ({"gpu": "h100", "model": "GPT"}, {}), ({"demand": 1, "n_nodes": 1.5}, {}), ({"demand": 1}, {"batch_size": 0}),
]  # fmt: skip


class TestMistakes:
    @pytest.mark.parametrize(("given", "inputs"), WRONG)
    def test_the_same_words(self, engine, given, inputs):
        with pytest.raises(ValueError) as expected:
            lk.plan(**given, **{name: tuple(v) if isinstance(v, list) else v for name, v in inputs.items()})
        with pytest.raises(ValueError, match=f"^{re.escape(str(expected.value))}$"):
            planned(engine, given, inputs)

    @pytest.mark.parametrize(
        "text", ["{}", "nothing", '{"costs": {"video": {}}}', '{"costs": {"photos": {"kb_per_image": {}}}}']
    )
    def test_another_file(self, engine, text):
        with pytest.raises(ValueError, match=r"costs.json holds no costs of labkit.loader_costs"):
            planned(engine, {"demand": 1}, {}, text)

    def test_numbers_that_overflow(self, engine):
        with pytest.raises(ValueError, match="too large or too small to compute with"):
            planned(engine, {"demand": 1e300}, {"cores_per_node": 4, "cpu_ms_per_image": 1e300})


class TestThePage:
    def test_every_input_has_a_field(self):
        names = list(plan_form.field_names())
        assert len(set(names)) == len(names)
        others = {"gpu", "demand", "costs", "data", "dtype", "storage", "vcpus_per_node"}
        instead = {"images_per_s_per_gpu", "bytes_per_value"}  # demand and dtype
        assert set(names) == (set(INPUTS) - instead) | others

    def test_it_asks_for_nothing(self):
        html = plan_form_html()
        assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)|@import|url\((?!#)|fetch\(|XMLHttp", html)
        assert html.count("</script") == 1
        assert len(html) < 150_000

    @pytest.mark.exhaustive
    def test_it_is_the_same_each_time(self):
        """Whatever the order of sets."""
        command = [sys.executable, "-c", "from labkit.lab.site import plan_form_html; print(plan_form_html())"]
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=True)
        assert done.stdout == plan_form_html() + "\n"

    def test_every_formula_is_there(self, engine):
        setting = {"demand": 1, "storage": "s3"}, dict(SIZES), None
        names = {line["name"] for line in planned(engine, *setting)["lines"]}
        assert {line.name for line in LINES} <= names

    def test_every_number_is_finite(self, engine):
        lines = planned(engine, *random_setting(7)[:2])["lines"]
        assert np.isfinite([[line["value"], line["low"], line["high"]] for line in lines]).all()


HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A plan</title><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
</head><body><main><h1>A plan</h1>{form}</main></body></html>"""


class Form:
    """The page in a browser, opened from the disk."""

    def __init__(self, open_page, folder, hash="", **options):
        self.path = folder / "plan.html"
        self.path.write_text(HTML.replace("{form}", plan_form_html()))
        self.page, self.errors = open_page(offline=True, **options)
        self.page.goto(f"{self.path.as_uri()}{hash}")

    def enter(self, **fields):
        for name, value in fields.items():
            field = self.page.locator(f"#plan-{name}")
            field.evaluate("(field) => field.closest('details')?.setAttribute('open', '')")
            if field.evaluate("(field) => field.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(value)
        self.page.locator("#plan-n_gpus").press("Enter")

    def rows(self):
        """Heading -> rows as they are shown."""
        return {
            table.locator("caption").inner_text(): [
                tuple(row.locator("th, td").all_inner_texts()) for row in table.locator("tbody tr").all()
            ]
            for table in self.page.locator("#plan-tables table").all()
        }

    def check_shows(self, plan):
        page = Page.of(plan)
        expected = {
            heading: [(*row[:-1], row[-1].replace(",", ", ")) for row in rows]
            for heading, rows in page.sections.items()
        }
        assert self.rows() == expected
        assert self.page.locator("#plan-sentences p").all_inner_texts() == [*page.sentences, *page.notes]
        assert self.page.locator("#plan-cures li").all_inner_texts() == [f"{cure}." for cure in plan.cures]
        assert self.page.locator("#plan-sources li").all_inner_texts() == page.sources
        assert self.page.locator("#plan-title").inner_text() == plan.title
        assert "predicted" in self.page.locator("#plan-results").inner_text()

    def call(self):
        """The plan that the text for Python makes."""
        return eval(self.page.locator("#plan-call").inner_text(), {"lk": lk})  # noqa: S307


class TestInABrowser:
    @pytest.fixture
    def form(self, open_page, tmp_path):
        return Form(open_page, tmp_path)

    def test_the_example(self, form):
        form.check_shows(lk.plan(gpu="h100", n_gpus=8, cpu_ms_per_image=(1, 4), storage="s3"))
        form.check_shows(form.call())
        hint = form.page.locator("#plan-cpu_ms_per_image-hint")
        assert "the example is no measurement" in hint.inner_text()
        form.enter(cpu_ms_per_image="3")
        assert hint.text_content() == ""
        assert form.errors == []

    def test_it_shows_what_is_entered(self, form):
        form.enter(gpu="", demand="900:1200", n_gpus="4", n_nodes="2", cores_per_node="24", cpu_ms_per_image="2:3:5")
        form.enter(
            storage="own, local",
            latency_ms="0.2",
            mb_per_s_per_request="500",
            price_per_gpu_hour="2.5",
            dtype="float32",
        )
        plan = lk.plan(  # in the order of the page, which its sources have
            (900, 1200), n_gpus=4, n_nodes=2, dtype="float32", cpu_ms_per_image=(2, 3, 5), cores_per_node=24,
            storage=lk.Storage("own storage", is_local=True), latency_ms=0.2, mb_per_s_per_request=500,
            price_per_gpu_hour=2.5,
        )  # fmt: skip
        form.check_shows(plan)
        form.check_shows(form.call())
        bars = form.page.locator("#plan-chart svg text").all_text_contents()
        ceilings = plan.frame.query("group == 'ceiling' and name != 'gpu_ceiling'").sort_values("value")
        assert [text.split(":")[0] for text in bars[1:]] == list(ceilings["quantity"])
        assert bars[0].startswith("the GPUs ask for")

    def test_an_address_gives_the_same_plan(self, form, open_page, tmp_path):
        form.enter(storage="nvme", cores_per_node="16", kb_per_image="50:90")
        again = Form(open_page, tmp_path, hash=form.page.evaluate("location.hash"))
        assert again.rows() == form.rows()
        again.check_shows(
            lk.plan(gpu="h100", n_gpus=8, cpu_ms_per_image=(1, 4), cores_per_node=16, kb_per_image=(50, 90))
        )

    def test_measured_costs(self, form, open_page, tmp_path):
        path = COSTS.save_json(tmp_path / "costs.json")
        form.page.locator("#plan-costs").set_input_files(path)
        form.page.locator("#plan-costs-hint", has_text="costs.json").wait_for()
        expected = lk.plan(gpu="h100", n_gpus=8, costs=path, storage="s3")
        form.check_shows(expected)
        assert 'costs="costs.json"' in form.page.locator("#plan-call").inner_text()
        Form(open_page, tmp_path, hash=form.page.evaluate("location.hash")).check_shows(expected)

    @pytest.mark.parametrize(
        ("fields", "wrong", "says"),
        [
            ({"n_gpus": "eight"}, "n_gpus", "n_gpus must be a number, LOW:HIGH or LOW:VALUE:HIGH, got 'eight'"),
            ({"n_gpus": "8", "n_nodes": "3"}, "n_gpus", "n_gpus must be a multiple of n_nodes, got 8 GPUs on 3 nodes"),
            ({"cpu_ms_per_image": ""}, "cpu_ms_per_image", "the core time of an image is not known (cpu_ms_per_image)"),
            ({"gpu": ""}, "demand", "the demand of a GPU is not known (images_per_s_per_gpu)"),
            ({"kb_per_image": "0"}, "kb_per_image", "kb_per_image must be a number > 0, got 0"),
            ({"slowdown": "2:1"}, "slowdown", "slowdown: an estimate must be one number >= 0, or numbers 0 < low"),
            ({"batch_size": "1:2"}, "batch_size", "batch_size must be an integer >= 1"),
        ],
    )
    def test_wrong_input(self, form, fields, wrong, says):
        form.enter(**fields)
        shown = [each for each in form.page.locator(".plan-error").all_inner_texts() if each]
        assert len(shown) == 1
        assert shown[0].startswith(says)
        field = form.page.locator(f"#plan-{wrong}")
        assert field.get_attribute("aria-invalid") == "true"
        assert f"plan-{wrong}-error" in field.get_attribute("aria-describedby")
        assert form.page.locator(f"#plan-{wrong}-error").is_visible()
        assert form.page.locator("#plan-results").is_hidden()
        assert "NaN" not in form.page.locator("body").inner_text()
        form.page.locator("button[type=reset]").click()
        form.page.locator("#plan-results").wait_for()
        form.check_shows(lk.plan(gpu="h100", n_gpus=8, cpu_ms_per_image=(1, 4), storage="s3"))

    def test_another_file_of_costs(self, form, tmp_path):
        (tmp_path / "other.json").write_text("[1]")
        form.page.locator("#plan-costs").set_input_files(tmp_path / "other.json")
        form.page.locator("#plan-costs-error", has_text="other.json holds no costs of labkit.loader_costs").wait_for()

    @pytest.mark.parametrize("width", [390, 1200])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_nothing_is_wider_than_the_page(self, open_page, tmp_path, width, scheme):
        form = Form(open_page, tmp_path, viewport={"width": width, "height": 900}, color_scheme=scheme)
        form.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert form.page.evaluate("document.documentElement.scrollWidth") <= width
        unnamed = "[...document.querySelectorAll('input, select')].filter((each) => !each.labels.length).length"
        assert form.page.evaluate(unnamed) == 0
