"""The page of a comparison on a reader's own photos: one file to share, which names no path and none of their files."""

import base64
import re
import sys
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import pandas as pd

from labkit.peers.peer import AREA, RATIO, Work
from labkit.peers.photos import OwnPhotos
from labkit.peers.ranking import leaders, left_out, peer_table, shown_tables
from labkit.util.machine import DISTRIBUTION, environment, install_command, labkit_home, package_version

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Image loaders on “{{ facts.folder }}”</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 1rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
.wide img { width: 100%; min-width: 35rem; height: auto; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ccc; vertical-align: top; }
.ranking td, .ranking th { white-space: nowrap; }
.loaders td:first-child { min-width: 8rem; }
.ranking td:first-child { position: sticky; left: 0; background: #fff; }
.ranking td + td, .ranking th + th { text-align: right; font-variant-numeric: tabular-nums; }
.ranking .class { text-align: left; font-style: italic; font-weight: normal; padding-top: 1rem; }
.labkit { font-weight: bold; }
code { overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>Image loaders on “{{ facts.folder }}”</h1>
<p>{{ n_loaders }} ways to load {{ facts.photos.split(";")[0] }}, timed on {{ machine["usable cores"] }} cores of an
{{ machine.cpu }}. Only those are compared that read the same kind of file, decode it at the same size and resample in
the same way.</p>
<ul>
{% for name, found in leaders.items() %}<li>{{ name }}: <strong>{{ found }}</strong></li>
{% endfor %}</ul>
{% if loaders.note.any() %}<p>Rates varied, or other programs disturbed them: see below, and repeat it on an idle
machine.</p>
{% endif %}
<div class="wide"><img alt="Each loader's speed against a DataLoader's" src="data:image/png;base64,{{ picture }}"></div>
<h2>The ranking</h2>
<p>Speed-ups are over <em>{{ baseline }}</em>, torch's <code>DataLoader</code> with worker processes and torchvision v2,
in paired rounds. Brackets are 95&nbsp;% intervals. Then come the core seconds for 1,000 images, the memory of all its
processes, the seconds from a cold start to the first batch, and the share of the rate of decoding all photos and
dropping them. Loaders of pixels that were resized once are not here, since what they were made of matters little to
them: <code>--class raw-uint8</code> ranks those.</p>
<div class="wide"><table class="ranking">
<tr><th>loader</th>{% for title in columns %}<th>{{ title }}</th>{% endfor %}</tr>
{% for title, rows in tables.items() %}
<tr><th class="class" colspan="{{ columns|length + 1 }}">{{ title }}</th></tr>
{% for name, row in rows.iterrows() %}
<tr{% if kinds[name] == "labkit" %} class="labkit"{% endif %}><td>{{ name }}</td>
{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
{% endfor %}
</table></div>
<h2>The work</h2>
<p>All loaders did the same work, proven before timing: every photo once in an epoch, in shuffled order, with its
label; of each a random crop ({{ area }} of the area, aspect ratio {{ ratio }}), resized to {{ size }} x {{ size }} and
flipped half of the time; as uint8 tensors in batches of {{ batch_size }}. Each was first run on 70 pictures whose
colors and brightness show, in any crop, which picture it is, where it was cut, whether it was flipped, and whether
resizing averaged or sampled. A loader that failed this is not in the ranking.</p>
<p>Each loader runs in a process of its own, with as many workers as there are cores ({{ n_workers }}), and reads files
from memory. The {{ n_rounds }} rounds are interleaved and mirrored, and only the steady state of an epoch is timed. How
many photos were drawn follows from about three minutes for timing.</p>
<h2>The photos</h2>
<table>{% for name, fact in facts.items() %}<tr><th>{{ name }}</th><td>{{ fact }}</td></tr>
{% endfor %}</table>
<h2>The loaders</h2>
<div class="wide"><table class="loaders">
<tr><th>loader</th><th>version</th><th>what it does in another way, and what disturbed it</th></tr>
{% for name, row in loaders.iterrows() %}
<tr><td>{{ name }}</td><td>{{ row.version }}</td><td>{{ row.differs }}{% if row.note %}{{ "; " if row.differs }}in
this run {{ row.note }}{% endif %}</td></tr>
{% endfor %}
</table></div>
{% if missing is not none %}
<h2>Not in this ranking</h2>
<p><code>{{ install }}</code> installs what pip can.</p>
<div class="wide"><table>
<tr><th>loader</th><th>why</th></tr>
{% for name, row in missing.iterrows() %}
<tr><td>{{ name }}</td><td>{% if row.state == "missing" %}not installed: <code>{{ row.why }}</code>
{% else %}{{ row.state }}: {{ row.why }}{% endif %}</td></tr>
{% endfor %}
</table></div>
{% endif %}
<h2>The machine</h2>
<table>{% for name, value in machine.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
<p>Measured on {{ day }} by <code>python -m labkit peers --own FOLDER</code>.</p>
</body>
</html>
"""


def own_page(frame: pd.DataFrame, photos: OwnPhotos, picture: bytes) -> str:
    """The page as HTML; `frame` and `photos` as `compare_own` returns them, `picture` the plot as a PNG."""
    table, tables, missing = peer_table(frame), shown_tables(frame), left_out(frame)
    run, labkit = frame.iloc[0], package_version(DISTRIBUTION) or "from a clone"
    loaders = table.loc[table["kind"] != "limit", ["kind", "version", "differs", "note"]].astype(object).fillna("")
    loaders["version"] = loaders["version"].where(loaders["kind"] == "peer", labkit)
    machine = {name.replace("_", " "): value for name, value in environment().items() if value != ""}
    return jinja2.Environment(autoescape=True).from_string(_PAGE).render(
        facts=photos.facts(), tables=tables, columns=next(iter(tables.values())).columns, kinds=table["kind"],
        loaders=loaders, n_loaders=len(loaders), leaders=leaders(frame), baseline=run["baseline"],
        missing=missing.assign(why=missing["why"].map(without_paths)) if len(missing) else None,
        picture=base64.b64encode(picture).decode(), size=Work.size, batch_size=int(run["batch_size"]),
        n_workers=int(run["num_workers"]), n_rounds=int(frame["round"].max()), area=f"{AREA[0]:.0%} to {AREA[1]:.0%}",
        ratio=f"{RATIO[0]:.2f} to {RATIO[1]:.2f}", machine={**machine, "labkit": labkit},
        install=install_command("peers"), day=f"{datetime.now(UTC):%d %B %Y}",
    )  # fmt: skip


def without_paths(text: str) -> str:
    """A loader's message without folders: what stands before the last name of a path is of the reader's machine."""
    with suppress(RuntimeError):  # no HOME, and no entry of the user
        text = text.replace(f"{Path.home()}/", "/")
    for folder in (labkit_home(), tempfile.gettempdir(), sys.prefix):
        text = text.replace(f"{folder}/", "/")
    text = re.sub(r"(['\"])/[^'\"]*\1|file://\S+", "a file", text)
    return re.sub(r"(?<![\w:/])/(?:[^/\s'\":,]+/)+", "", text)
