"""The tour's page: one file that opens from the disk, without a network, while the tour runs and after it.

It shows what has been measured so far, and how long the rest takes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import TracebackType

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from labkit.app.notebooks import Executed, Notebook
from labkit.course.ladder import draw_figure, is_ladder, is_limit
from labkit.course.ledger import judged, ratios
from labkit.course.starting import Start, start_from
from labkit.measure.frames import load_frame
from labkit.measure.plots import WIDTH_IN, ladder_rungs, plot_ladder
from labkit.util.files import write_atomic
from labkit.util.machine import environment, scale
from labkit.util.pictures import png_base64
from labkit.util.redact import redact

_RELOAD_S = 15  # a reload takes time from what is being measured

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
{% if is_running %}<meta http-equiv="refresh" content="{{ reload_s }}">
{% endif %}
<title>labkit tour</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem; }
img { max-width: 100%; height: auto; }
.wide img { min-width: 40rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ccc; vertical-align: top; }
td.half { width: 50%; overflow-wrap: anywhere; }
details ul { padding-left: 1rem; }
.status { padding: .5rem 1rem; border-left: .25rem solid #0173b2; background: #eef5fa; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
</style>
</head>
<body>
<h1>labkit tour</h1>
{% if status %}
<p class="status" role="status">{{ status }}{% if is_running %} This page
reloads itself until the tour has ended.{% endif %}</p>
{% endif %}
<p>Measured on this machine at <code>{{ scale }}</code> scale.
Speed-ups are means of paired rounds against each experiment's own baseline; brackets show the 95&nbsp;% interval.</p>
<h2>Where do I start?</h2>
<div class="wide">{{ start|safe }}</div>
{% if ladders %}
<h2>The ladder</h2>
<p>From the loader of the first tutorial to the fast path, all rungs timed in one run, so they can be compared with
each other. Each number is the median rate, and the speed-up over the first rung.</p>
{% for picture in ladders %}
<p class="wide"><img alt="Images per second of every rung, and the limits"
src="data:image/png;base64,{{ picture }}"></p>
{% endfor %}
{% endif %}
<h2>The steps</h2>
{% if image %}
<p>Each experiment's fastest variant relative to that experiment's baseline. The runs differ, so these speed-ups
cannot be multiplied.</p>
<p class="wide"><img alt="Measured speed-up of each experiment's fastest variant"
src="data:image/png;base64,{{ image }}"></p>
{% endif %}
{% if rungs %}
<p>The picture shows the steps of the walk; the table adds what-ifs and details. Brackets show the 95 % interval;
a verdict needs a 99 % interval that does not contain 1.</p>
<div class="wide"><table>
<tr><th>experiment</th><th>fastest variant</th><th>baseline</th><th>speed-up</th><th>verdict</th><th>runs</th></tr>
{% for rung in rungs %}
<tr><td>{{ rung.experiment }}</td><td>{{ rung.variant }}</td><td>{{ rung.baseline }}</td>
<td>{{ "%.2f"|format(rung.speedup) }}x [{{ "%.2f"|format(rung.ci_low) }}, {{ "%.2f"|format(rung.ci_high) }}]</td>
<td>{{ rung.verdict }}</td><td><a href="frames/{{ rung.file }}">CSV</a></td></tr>
{% endfor %}
</table></div>
{% else %}
<p>No experiment has been recorded yet.</p>
{% endif %}
<h2>The claims</h2>
{% if is_running %}
<p>They are judged when the tour has ended.</p>
{% elif claims is string %}
<p>{{ claims }}</p>
{% else %}
<p>Claims of five write-ups, checked against runs on this machine. The ratio is the one behind the verdict;
notebook 14 explains how verdicts are reached.</p>
<table>
<tr><th>claim, with their figure</th><th>verdict</th></tr>
{% for row in claims %}
<tr><td class="half"><code>{{ row.id }}</code><br>{{ row.claim }}<br>Theirs: {{ row.figure }}.</td>
<td class="half"><strong>{{ row.verdict }}</strong>{% if row.condition %}: {{ row.condition }}{% endif %}
{% if row.ratios %}<br>{{ row.ratios }}{% endif %}{% if row.scale %} ({{ row.scale }} scale){% endif %}
<details><summary>why</summary><ul>
{% for line in row.because.splitlines() %}<li>{{ line }}</li>
{% endfor %}</ul></details></td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Notebooks of this run</h2>
<div class="wide"><table>
<tr><th>notebook</th><th>question</th><th>seconds</th><th>result</th></tr>
{% for run in runs %}
<tr><td><a href="{{ run.notebook.name }}.html">{{ run.notebook.name }}</a></td><td>{{ run.notebook.question }}</td>
<td class="number">{{ "%.0f"|format(run.seconds) }}</td><td>{{ run.error or "ran" }}</td></tr>
{% endfor %}
</table></div>
<h2>The machine</h2>
<div class="wide"><table>
{% for name, value in machine.items() %}<tr><th>{{ name }}</th><td>{{ value if value != "" else "none" }}</td></tr>
{% endfor %}</table></div>
</body>
</html>
"""


def write_index(folder: Path, runs: Sequence[Executed], *, status: str = "", is_running: bool = False) -> Path:
    """Write `index.html` about the frames in `folder/frames` and the notebooks just run; return its path.

    Args:
        status: A sentence for the top of the page.
        is_running: The page reloads itself and leaves out the claims, since more is to come.
    """
    recorded = [_read_recorded(*key) for key in frame_keys(folder)]
    rungs = [each.rungs.assign(file=each.file) for each in recorded if len(each.rungs)]
    page = jinja2.Environment(autoescape=True).from_string(_PAGE)
    html = page.render(
        status=status, is_running=is_running, start=_start(recorded).to_html(),
        reload_s=_RELOAD_S, scale=scale().name, runs=runs, machine=environment(),
        ladders=[each.ladder for each in recorded if each.ladder], image=_draw_steps(recorded),
        rungs=list(pd.concat(rungs).sort_values("experiment").itertuples()) if rungs else [],
        claims=[] if is_running else _judge_claims([each.runs for each in recorded]),
    )  # fmt: skip
    write_atomic(folder / "index.html", html.encode())
    return folder / "index.html"


def frame_keys(folder: Path) -> list[tuple[Path, int, int]]:
    """Paths of the frames in `folder/frames`, each with two numbers that change when the frame is recorded anew."""
    found = [(path, path.stat()) for path in sorted((folder / "frames").glob("*.csv"))]
    return [(path, about.st_ino, about.st_mtime_ns) for path, about in found]


@dataclass(frozen=True)
class _Recorded:
    """A frame, and what the page shows of it. A limit is not a loader, and so is not in `rungs`."""

    file: str
    runs: pd.DataFrame
    rungs: pd.DataFrame
    ladder: str  # a base64 PNG, or empty


@cache  # the page is written anew with each frame
def _read_recorded(path: Path, inode: int, modified_ns: int) -> _Recorded:
    runs = load_frame(path)
    loaders = runs[~is_limit(runs["variant"])]
    ladder = png_base64(draw_figure(runs), dpi=120) if is_ladder(runs) else ""
    return _Recorded(path.name, runs, ladder_rungs(loaders), ladder)


def _start(recorded: list[_Recorded]) -> Start:
    """The table of `where_to_start` for these frames; without them, if they are of another machine."""
    try:
        return start_from(each.runs for each in recorded)
    except ValueError:
        return start_from([])


def _judge_claims(frames: list[pd.DataFrame]) -> list | str:
    """Rows of the ledger, or the reason why the frames allow no verdicts."""
    try:
        table = judged(frames)
    except ValueError as error:
        return f"No verdicts: {error}"
    return list(table.assign(ratios=[ratios(row) for row in table.itertuples()]).itertuples())


def _draw_steps(recorded: list[_Recorded]) -> str:
    steps = [each for each in recorded if each.runs["rung"].astype(bool).all() and len(each.rungs)]
    if not steps:
        return ""
    rungs = pd.concat([each.rungs for each in steps]).sort_values("experiment")
    figure = Figure(figsize=(WIDTH_IN, 1.6 + 0.6 * len(rungs)), layout="constrained")
    plot_ladder(pd.concat([each.runs for each in steps]), ax=figure.add_subplot(), rungs=rungs)
    return png_base64(figure, dpi=120)


_USUAL_S = 60.0  # for a notebook that was not stored


class LiveReport:
    """Writes `index.html` as a tour begins, with each frame of its first notebook, with each notebook, and at the end.

    The page is drawn between cells, and so takes no time from what a cell measures, only from the tour's.

    Args:
        folder: The results of this environment.
        notebooks: Those of the tour, in order.
        clock: Gives seconds.

    Attributes:
        path: The page.
        runs: The notebooks that have ended.
    """

    def __init__(self, folder: Path, notebooks: Sequence[Notebook], clock: Callable[[], float] = time.monotonic):
        self.path = folder / "index.html"
        self.runs: list[Executed] = []
        self._folder, self._notebooks, self._clock = folder, notebooks, clock
        self._doing = "making the photos"
        self._share = 0.0  # of the running notebook's cells
        self._began_s: float | None = None  # when the first notebook did
        self._shown: list[tuple[Path, int, int]] = []

    def __enter__(self) -> "LiveReport":
        self._write()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        write_index(self._folder, self.runs, status=self._describe_end(error) if error else "")

    def begin(self, notebook: Notebook) -> None:
        """Show that a notebook is running."""
        self._doing = f"running {notebook.name}, notebook {len(self.runs) + 1} of {len(self._notebooks)}"
        self._began_s = self._clock() if self._began_s is None else self._began_s
        self._share = 0.0
        self._write()

    def on_cell(self, cell: int, n_cells: int) -> None:
        """Show the first notebook's frames; called before each cell, with its index and the number of cells."""
        self._share = cell / n_cells
        if not self.runs and frame_keys(self._folder) != self._shown:
            self._write()

    def end(self, run: Executed) -> None:
        """Note that the running notebook has ended."""
        self.runs.append(run)

    def _write(self) -> None:
        self._shown = frame_keys(self._folder)
        status = f"At {_now()}: {self._doing}. {self._describe_rest()}"
        write_index(self._folder, self.runs, status=status, is_running=True)

    def _describe_rest(self) -> str:
        seconds = 0.0 if self._began_s is None else self._clock() - self._began_s
        minutes = minutes_left(self._notebooks, len(self.runs), self._share, seconds)
        n_minutes = max(1, round(minutes))
        return f"The rest takes about {n_minutes} minute{'s' if n_minutes > 1 else ''}."

    def _describe_end(self, error: BaseException) -> str:
        why = f" ({type(error).__name__}: {redact(str(error))})"
        how = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed{why}"
        return f"At {_now()}, the tour {how} while {self._doing}. What follows was measured before."


def minutes_left(notebooks: Sequence[Notebook], n_ended: int, share: float, seconds: float) -> float:
    """Minutes that the rest of a tour takes, as the stored run took them and at the pace of what has run here.

    Args:
        notebooks: Those of the tour, in order.
        n_ended: How many have ended.
        share: How much of the next one has run, 0 to 1.
        seconds: Since the first one began. While that runs, the stored run's pace is taken: a few cells tell little.
    """
    stored_s = [notebook.seconds or _USUAL_S for notebook in notebooks]
    done_s = sum(stored_s[:n_ended]) + share * sum(stored_s[n_ended : n_ended + 1])
    pace = seconds / done_s if n_ended else 1.0
    return pace * (sum(stored_s) - done_s) / 60


def _now() -> str:
    return f"{datetime.now():%H:%M}"
