"""The tour's page: one file that opens from the disk, without a network, while the tour runs and after it."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from labkit.app.notebooks import Executed
from labkit.course.ladder import draw_figure, is_ladder, is_limit
from labkit.course.ledger import judged, ratios
from labkit.course.starting import start_from
from labkit.measure.frames import load_frame
from labkit.measure.plots import WIDTH_IN, ladder_rungs, plot_ladder
from labkit.util.files import write_atomic
from labkit.util.machine import environment, scale
from labkit.util.pictures import png_base64

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
{% if is_running %}<meta http-equiv="refresh" content="15">
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

    Raises:
        ValueError: a file there is not a frame; names it.
    """
    frames = {path.name: load_frame(path) for path in sorted((folder / "frames").glob("*.csv"))}
    # A limit is not a loader, and so is on no rung.
    rungs = {name: ladder_rungs(runs[~is_limit(runs["variant"])]) for name, runs in frames.items()}
    shown = [table.assign(file=name) for name, table in rungs.items() if len(table)]
    steps = [name for name, table in rungs.items() if len(table) and frames[name]["rung"].astype(bool).all()]
    try:
        start = start_from(frames.values())
    except ValueError:  # the frames are of another machine
        start = start_from([])
    claims: str | list = []
    if not is_running:
        try:
            table = judged(frames.values())
            claims = list(table.assign(ratios=[ratios(row) for row in table.itertuples()]).itertuples())
        except ValueError as error:
            claims = f"No verdicts: {error}"
    html = jinja2.Environment(autoescape=True).from_string(_PAGE).render(
        status=status, is_running=is_running, scale=scale().name, runs=runs,
        start=start.to_html(pages=[run.notebook.name for run in runs]),
        ladders=[png_base64(draw_figure(frame), dpi=120) for frame in frames.values() if is_ladder(frame)],
        image=_draw_steps([frames[name] for name in steps], [rungs[name] for name in steps]) if steps else "",
        rungs=list(pd.concat(shown).sort_values("experiment").itertuples()) if shown else [],
        claims=claims, machine=environment(),
    )  # fmt: skip
    write_atomic(folder / "index.html", html.encode())
    return folder / "index.html"


def _draw_steps(runs: list[pd.DataFrame], rungs: list[pd.DataFrame]) -> str:
    """Each experiment's fastest variant, as a base64 PNG."""
    table = pd.concat(rungs).sort_values("experiment")
    figure = Figure(figsize=(WIDTH_IN, 1.6 + 0.6 * len(table)), layout="constrained")
    plot_ladder(pd.concat(runs), ax=figure.add_subplot(), rungs=table)
    return png_base64(figure, dpi=120)
