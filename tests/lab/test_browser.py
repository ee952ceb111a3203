"""The lab in a browser: notebooks run in JupyterLab, a prediction moves its mark, the report opens from the disk."""

import base64
import io
import json
import re

import matplotlib
import nbformat
import numpy as np
import pytest
from PIL import Image

import labkit as lk
from labkit.lab import report
from labkit.lab.notebooks import Executed, Notebook
from tests.lab_server import FLAGS, find_chromium, jupyterlab
from tests.paths import REPO

NAMES = ["00_measure.ipynb", "02_read_image.ipynb"]
NOTEBOOKS = REPO / "notebooks"
GUESS = (222, 143, 5)  # color of a prediction's mark


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[test]'")
    with sync_api.sync_playwright() as playwright:
        path = find_chromium(playwright)
        if path is None:
            pytest.skip("no Chromium: apt-get install chromium, or name one in the variable CHROMIUM")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def _page(browser, **options):
    """A page, and the list of errors that its console will show."""
    page = browser.new_context(**options).new_page()
    errors = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    return page, errors


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium, results):
    """Number -> a notebook that ran as a whole in JupyterLab at ci scale; both at once."""
    root, home = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("home")
    variables = {"LABKIT_SCALE": "ci", "LABKIT_HOME": home, "LABKIT_RESULTS": results / "frames"}
    variables["MPLCONFIGDIR"] = matplotlib.get_cachedir()  # else every kernel of a new home looks for all fonts
    variables["TORCH_LOGS"] = "-torch.utils.cpp_extension"  # as in a tour: no news of a GPU that is not there
    for name in NAMES:
        nbformat.write(_without_outputs(NOTEBOOKS / name), root / name)
    with jupyterlab(root, home, **variables) as address:
        opened = {name[:2]: Opened(chromium, address(name)) for name in NAMES}
        for notebook in opened.values():
            notebook.start_all()
        for notebook in opened.values():
            notebook.wait_until_done()
        yield opened
        for notebook in opened.values():
            notebook.page.context.close()


def _without_outputs(path):
    """A stored plot is not one that was drawn here."""
    node = nbformat.read(path, as_version=4)
    for cell in node.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return node


class Opened:
    """A notebook in JupyterLab, used as a reader does."""

    def __init__(self, browser, address):
        self.page, self.errors = _page(browser, viewport={"width": 1300, "height": 1000})
        self.page.goto(address)
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.ready")
        assert self.page.evaluate("() => jupyterapp.shell.currentWidget.context.path") in address

    def start_all(self):
        self.page.evaluate(
            "() => { jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.ranAll = true }) }"
        )

    def wait_until_done(self):
        self.page.wait_for_function("() => window.ranAll", timeout=240_000)

    def cells(self):
        """Code cells as JupyterLab holds them: source, execution count, outputs."""
        return self.page.evaluate(
            "() => jupyterapp.shell.currentWidget.content.model.toJSON().cells.filter(c => c.cell_type == 'code')"
        )

    def cell(self, beginning):
        """The one code cell on the page whose source begins so."""
        cell = self.page.locator(".jp-CodeCell").filter(
            has_text=re.compile(rf"\[\s*(\d+|\*| )?\s*\]:\s*{re.escape(beginning)}")
        )
        assert cell.count() == 1
        return cell

    def run(self, beginning, source=None):
        """Click into a cell, type, and run it."""
        editor = self.cell(beginning).locator(".cm-content")
        editor.click()
        if source:
            self.page.keyboard.press("Control+A")
            self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_function(IDLE, timeout=60_000)

    def picture(self, beginning):
        """The plot under a cell, as it is shown."""
        source = self.cell(beginning).locator(".jp-OutputArea-output img").get_attribute("src")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).convert("RGB")).astype(int)


IDLE = "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.textContent.includes('*'))"


def _complains(output):
    """On a busy machine two short rounds may scatter, and the notebook rightly says so."""
    return output.get("name") == "stderr" and "InstabilityWarning" not in "".join(output["text"])


@pytest.mark.parametrize("number", ["00", "02"])
def test_a_notebook_runs_whole_and_shows_its_plots(lab, number):
    cells = [cell for cell in lab[number].cells() if cell["source"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error" or _complains(output)] == []
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    sizes = lab[number].page.eval_on_selector_all(
        ".jp-OutputArea-output img", "all => all.map(image => [image.naturalWidth, image.naturalHeight])"
    )
    assert len(sizes) == len(drawn) >= 4
    assert all(width > 100 and height > 100 for width, height in sizes)
    assert lab[number].errors == []


def test_the_magics_are_shown(lab):
    cells = lab["00"].cells()
    timed = [cell for cell in cells if cell["source"].startswith("%%variant")]
    assert len(timed) == 2
    assert all("images/s over 5 runs" in str(cell["outputs"]) for cell in timed)
    assert [cell for cell in cells if "%timeit -o" in cell["source"] and cell["execution_count"]]


def _mark_of_guess(picture):
    """Column of the prediction's mark: the upper of the two triangles, since the other explains it."""
    rows, columns = np.nonzero((np.abs(picture - GUESS) <= 2).all(axis=2))
    return columns[rows < rows.min() + 14].mean()


# Two rounds scatter so much that an axis may reach from a hundredth to a hundred: then no mark moves far.
EVEN = 'runs["images_per_s"] = runs.variant.map({"no workers": 100.0, "2 workers": 90.0})'


def test_a_changed_prediction_moves_its_mark(lab, results):
    plot, notebook = "lk.plot_speedup(runs)", lab["00"]
    notebook.run("lk.predict(", f'lk.predict("2 workers", 1.5)\n{EVEN}')
    notebook.run(plot)
    before = notebook.picture(plot)
    notebook.run("lk.predict(", 'lk.predict("2 workers", 0.25)')
    assert np.array_equal(notebook.picture(plot), before)  # nothing was drawn yet
    notebook.run(plot)
    assert _mark_of_guess(notebook.picture(plot)) < _mark_of_guess(before) - 100
    notebook.run("lk.score(")
    assert "2 workers (00 two workers): 0.25x guessed" in notebook.cell("lk.score(").inner_text()
    (kept,) = (results / "predictions").glob("00*.json")
    assert json.loads(kept.read_text())[0]["guess"] == 0.25
    assert notebook.errors == []


@pytest.fixture
def index(frame_of, tmp_path):
    """A small report: two experiments, the ladder with a limit, a notebook that ran and one that failed."""
    runs = {
        "02 decoders, imagenet": {"pil": [100, 101, 99], "torchvision": [170, 172, 171], "turbojpeg": [180, 183, 181]},
        "08 a long name of an experiment, over HTTP with 50 ms": {"files": [10, 11, 10], "shards of 1000": [9, 12, 10]},
        "11 ladder": {"PIL, one process": [90, 91, 92], "raw pixels": [900, 910, 920], "decode limit": [950, 960, 970]},
    }
    for number, (experiment, rates) in enumerate(runs.items()):
        frame = frame_of(rates, next(iter(rates)), experiment=experiment)
        lk.save_frame(frame, tmp_path / "frames" / f"{number}.csv")
    notebooks = [Notebook(tmp_path / f"{name}.ipynb", name, "Which?", "3") for name in ("02_read_image", "08_shards")]
    too_long = "ValueError: " + "a_word_that_is_far_too_long_for_a_phone/" * 4
    done = [Executed(notebooks[0], None, 12.0), Executed(notebooks[1], None, 3.0, too_long)]
    return report.write_index(tmp_path, done)


@pytest.fixture
def opened_index(chromium, index):
    """Opens the report from the disk without a network; gives the page, its errors and what it asked for in vain."""

    def open_(width):
        page, errors = _page(chromium, viewport={"width": width, "height": 800}, offline=True)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: errors.append(f"failed: {request.url[:80]}"))
        page.goto(index.as_uri())
        page.wait_for_load_state("networkidle")
        return page, errors, asked

    return open_


def test_the_report_opens_from_the_disk(opened_index, index):
    page, errors, asked = opened_index(1200)
    assert errors == []
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    shown = page.eval_on_selector_all("img", "all => all.map(image => image.complete && image.naturalWidth > 300)")
    assert shown == [True, True]
    assert re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", index.read_text()) == []


def test_the_report_is_readable_on_a_phone(opened_index):
    page, errors, _ = opened_index(390)
    assert errors == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.evaluate("() => parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    sizes = page.eval_on_selector_all("img", "all => all.map(image => image.clientWidth / image.naturalWidth)")
    assert min(sizes) > 0.6  # a plot's letters stay readable: it is scrolled in its own box, not shrunk
    for text in ("faster", "inconclusive", "turbojpeg"):  # the verdict and the best variant in words
        assert page.get_by_role("cell", name=text, exact=True).count()
