"""The tour's page: one file that opens from the disk, without a network, while the tour runs and after it."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from labkit.app.notebooks import Executed
from labkit.course.ladder import FRAME, draw_figure, is_ladder, tell_rungs
from labkit.course.results import recorded_results, stored_results
from labkit.course.starting import start_from
from labkit.measure.frames import load_frame
from labkit.util.files import write_atomic
from labkit.util.machine import NOTEBOOK_FOLDER, environment, scale, told_of_own_photos
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
th, td { text-align: left; padding: .4rem .75rem .4rem 0; border-bottom: 1px solid #ccc; vertical-align: top; }
.question { color: #555; }
.failed { color: #a00; overflow-wrap: anywhere; }
.status { padding: .5rem 1rem; border-left: .25rem solid #0173b2; background: #eef5fa; }
@media (max-width: 45rem) { /* a phone: the cells of a row below each other */
  thead { display: none; }
  td { display: block; border: 0; padding: .1rem 0; }
  tr { display: block; border-bottom: 1px solid #ccc; padding: .6rem 0; }
}
</style>
</head>
<body>
<h1>labkit tour</h1>
{% if status %}
<p class="status" role="status">{{ status }}{% if is_running %} This page
reloads itself until the tour has ended.{% endif %}</p>
{% endif %}
<p>Measured on this machine at <code>{{ scale }}</code> scale{% if photos %} ({{ photos }}){% endif %}.
Speed-ups are means of paired rounds; brackets show the
95&nbsp;% interval.</p>
<h2>The ladder</h2>
<p>One training, from the loader of a first tutorial to the fast path. Each rung keeps what the rungs before it changed,
and all were timed in one run. The numbers are the training's median rate, its ratio to the first rung's, and the share
of the time in which its step waits for a batch.
{% if not own_ladder %}This is the stored run; yours replaces it when notebook 11 has ended.{% endif %}</p>
{% for picture, story in ladders %}
<p class="wide"><img alt="Images per second of every rung, and the limits"
src="data:image/png;base64,{{ picture }}"></p>
<p>{{ story }}</p>
{% endfor %}
<h2>What the notebooks found</h2>
{% if rows %}
<p>Each row is a notebook, and links to the run. The runs behind the figures are in <a href="frames/">frames/</a>, as
CSV.</p>
<table>
<thead><tr><th>notebook</th><th>answer</th></tr></thead>
{% for name, found, run in rows %}
<tr><td>{% if name in pages %}<a href="{{ name }}.html">{{ name }}</a>{% else %}{{ name }}{% endif %}
{% if run %}<br><span class="question">{{ run.notebook.question }}</span>{% endif %}</td>
<td>{% if run and run.error %}<span class="failed">failed: {{ run.error }}</span>{% endif %}
{% if found %}<strong>{{ found.sentences[0]|plain }}</strong> {{ found.sentences[1:]|join(" ")|plain }}
{% if found.not_here %}
<em>This run does not confirm all of this: {{ found.not_here|join(" ")|plain }}</em>{% endif %}{% endif %}
</td></tr>
{% endfor %}
</table>
{% else %}
<p>No notebook has ended yet.</p>
{% endif %}
<h2>Where do I start?</h2>
{{ start|safe }}
<p><code>python -m labkit claims</code> compares what others have published with these figures.</p>
<h2>The machine</h2>
<table>
{% for name, value in machine.items() %}<tr><th>{{ name }}</th><td>{{ value if value != "" else "none" }}</td></tr>
{% endfor %}</table>
</body>
</html>
"""


def write_index(folder: Path, runs: Sequence[Executed], *, status: str = "", is_running: bool = False) -> Path:
    """Write `index.html` about the frames in `folder/frames` and the notebooks just run; return its path.

    Args:
        status: A sentence for the top of the page.
        is_running: The page reloads itself, since more is to come.

    Raises:
        ValueError: a file there is not a frame; names it.
    """
    frames = [load_frame(path) for path in sorted((folder / "frames").glob("*.csv"))]
    own = [frame for frame in frames if is_ladder(frame)]
    results, ran = recorded_results(folder / "results"), {run.notebook.name: run for run in runs}
    pages = {path.stem for path in folder.glob("*.html")}  # of earlier runs, too
    jinja = jinja2.Environment(autoescape=True)
    jinja.filters["plain"] = lambda text: text.replace("**", "").replace("`", "")
    html = jinja.from_string(_PAGE).render(
        pages=pages, status=status, is_running=is_running, scale=scale().name,
        rows=[(name, results.get(name), ran.get(name)) for name in sorted(results | ran)],
        start=start_from(stored_results() | results).to_html(pages=pages),
        ladders=[
            (png_base64(draw_figure(frame), dpi=120), tell_rungs(frame))
            for frame in own or [load_frame(NOTEBOOK_FOLDER / FRAME)]
        ],
        own_ladder=bool(own), photos=told_of_own_photos(), machine=environment(),
    )  # fmt: skip
    write_atomic(folder / "index.html", html.encode())
    return folder / "index.html"
