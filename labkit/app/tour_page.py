"""The tour's page: one file that opens from the disk, without a network, while the tour runs and after it."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from labkit.app.notebooks import Executed
from labkit.course.ladder import FRAME, draw_figure, is_ladder
from labkit.course.ledger import claims
from labkit.course.results import recorded_results, stored_results
from labkit.course.starting import start_from
from labkit.measure.frames import load_frame
from labkit.util.files import write_atomic
from labkit.util.machine import NOTEBOOK_FOLDER, environment, scale
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
<p>Measured on this machine at <code>{{ scale }}</code> scale. Speed-ups are means of paired rounds; brackets show the
95&nbsp;% interval.</p>
<h2>The ladder</h2>
<p>From the loader of the first tutorial to the fast path, all rungs timed in one run, so they can be compared with
each other. Each number is the median rate, and the speed-up over the first rung.
{% if not own_ladder %}This is the stored run; yours replaces it when notebook 11b has ended.{% endif %}</p>
{% for picture in ladders %}
<p class="wide"><img alt="Images per second of every rung, and the limits"
src="data:image/png;base64,{{ picture }}"></p>
{% endfor %}
<h2>What the notebooks found</h2>
{% if results %}
<div class="wide"><table>
<tr><th>notebook</th><th>result</th></tr>
{% for name, found in results.items() %}
<tr><td><a href="{{ name }}.html">{{ name }}</a></td>
<td>{% for text in found.sentences %}{{ text|replace("**", "") }} {% endfor %}
{% if found.not_here %}<em>This run does not show: {{ found.not_here|join(" ")|replace("**", "") }}</em>{% endif %}
</td></tr>
{% endfor %}
</table></div>
{% else %}
<p>No notebook has ended yet.</p>
{% endif %}
<h2>Where do I start?</h2>
<div class="wide">{{ start|safe }}</div>
<h2>The claims</h2>
{% if is_running %}
<p>They are judged when the tour has ended.</p>
{% else %}
<p>What others have published, beside what was found here; notebook 14 explains how verdicts are reached.</p>
<table>
<tr><th>claim, with their figure</th><th>verdict</th></tr>
{% for name, row in claims %}
<tr><td class="half"><code>{{ name }}</code><br>{{ row.claim }}<br>Theirs: {{ row.theirs }}.</td>
<td class="half"><strong>{{ row.verdict }}</strong>{% if row.ours %}<br>{{ row.ours }}{% endif %}
{% if row.note %}<br>{{ row.note }}{% endif %}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>Notebooks of this run</h2>
<p>The runs behind them are in <a href="frames/">frames/</a>, as CSV.</p>
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
    frames = [load_frame(path) for path in sorted((folder / "frames").glob("*.csv"))]
    own = [frame for frame in frames if is_ladder(frame)]
    results = recorded_results(folder / "results")
    html = jinja2.Environment(autoescape=True).from_string(_PAGE).render(
        status=status, is_running=is_running, scale=scale().name, runs=runs, results=results,
        start=start_from(stored_results() | results).to_html(pages=[run.notebook.name for run in runs]),
        ladders=[png_base64(draw_figure(frame), dpi=120) for frame in own or [load_frame(NOTEBOOK_FOLDER / FRAME)]],
        own_ladder=bool(own),
        claims=[] if is_running else list(claims(folder if results else None).iterrows()), machine=environment(),
    )  # fmt: skip
    write_atomic(folder / "index.html", html.encode())
    return folder / "index.html"
