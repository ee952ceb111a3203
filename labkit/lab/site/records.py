"""Pages of measured results: the claims, the peers and the recorded runs, from what is stored."""

import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit.core import IS_CLONE, NOTEBOOK_FOLDER, png_bytes
from labkit.lab.site import texts
from labkit.lab.site.addresses import RECORDS, Addresses

CLAIMS = "14_claims"
_FORMATS = {
    "images_per_s": "{:,.0f}", "rate_low": "{:,.0f}", "rate_high": "{:,.0f}", "speedup": "{:.2f}", "ci_low": "{:.2f}",
    "ci_high": "{:.2f}", "cpu_s_per_1000": "{:.2f}", "peak_mem_mb": "{:,.0f}", "startup_s": "{:.1f}",
    "of_limit": "{:.0%}", "gil_us_per_image": "{:.0f}", "batch_size": "{:.0f}",
}  # fmt: skip


def wide_table(frame: pd.DataFrame, label: str, **options: Any) -> str:
    """Markdown with a table that scrolls within its own box, and says what it is."""
    rows = frame.to_html(border=0, classes="table", na_rep="", **options)
    return _raw(f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(label)}">\n{rows}\n</div>')


def peers_page(folder: Path, addresses: Addresses) -> str:
    """The stored comparison, class by class; writes its plots to `folder`."""
    from labkit.peers import CLASSES, PEERS, comparisons, draw_table, peer_table, stored_runs

    parts = [addresses.localized(_PEERS)]
    ordered = sorted(comparisons(stored_runs()), key=lambda found: list(CLASSES).index(found[1]))
    for number, (machine, name, runs) in enumerate(ordered):
        title, table = CLASSES[name].title, peer_table(runs)
        figure = Figure(figsize=(9, 2.0 + 0.3 * len(table)), layout="constrained")
        draw_table(table, runs, ax=figure.add_subplot())
        picture = folder / f"peers-{number}.png"
        picture.write_bytes(png_bytes(figure, dpi=100))
        shown = table.drop(columns=["kind"]).rename_axis("loader").reset_index()
        formats = {column: _formatter(template) for column, template in _FORMATS.items() if column in shown}
        parts += [
            f"## {title}", f"Measured on `{machine}`.",
            texts.picture(picture.name, f"Images per second of each loader, {title}; the table has the figures"),
            wide_table(shown, f"Loaders, {title}", index=False, formatters=formats),
        ]  # fmt: skip
    return "\n\n".join([*parts, "## What their authors publish", *_published(PEERS.values())]) + "\n"


def _formatter(template: str) -> Any:
    return lambda value: "" if pd.isna(value) else template.format(float(value))


def _published(peers: Any) -> list[str]:
    return [f"- **{peer.name}**: {peer.published}" for peer in peers if peer.published]


def claims_page(folder: Path, addresses: Addresses) -> str:
    """The ledger with the verdicts of the stored notebook 14; writes its plot to `folder`."""
    from labkit.teach.claims import LEDGER

    table, picture = _stored_claims()
    parts = [addresses.localized(_CLAIMS)]
    if picture:
        (folder / "claims.png").write_bytes(picture)
        parts.append(
            texts.picture("claims.png", "Claimed and measured ratios of each test; the words below say the same")
        )
    if table:
        parts.append(_raw(f'<div class="wide" role="region" tabindex="0" aria-label="Verdicts">{table}</div>'))
    parts.append("## Each claim and its tests")
    for claim in LEDGER:
        tests = [f"- {test.setting} ({test.kind}): {_notebook_link(test.notebook, addresses)}" for test in claim.tests]
        note = [claim.note] if claim.note else []
        said = f"{claim.text} Their figure: {claim.figure}."
        parts += [f"### {claim.id}", _plain(said), *map(_plain, note), "\n".join(tests)]
    numbers = sorted({test.notebook for claim in LEDGER for test in claim.tests})
    parts += ["## Sources", "What the notebooks that test them refer to:", "\n".join(_sources(numbers, addresses))]
    return "\n\n".join(parts) + "\n"


def _sources(numbers: list[str], addresses: Addresses) -> Iterator[str]:
    """For each notebook a list of its links that lead elsewhere, each once."""
    for number in numbers:
        [path] = NOTEBOOK_FOLDER.glob(f"{number}_*.ipynb")
        cells = json.loads(path.read_bytes())["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        if links := dict.fromkeys(re.findall(r"\[[^\[\]]+\]\(https?://[^()\s]+\)", text)):
            yield f"- {_notebook_link(number, addresses)}: {', '.join(links)}"


def _plain(text: str) -> str:
    """Text whose letters mean nothing to Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#~])", r"\\\1", text)


def _notebook_link(number: str, addresses: Addresses) -> str:
    names = [name for name in addresses.notebooks if name.startswith(f"{number}_")]
    return f"[{number}](/notebooks/{names[0]}.ipynb)" if names else f"notebook {number}"


def _stored_claims() -> tuple[str, bytes]:
    """The table of claims and verdicts in the stored notebook 14, and its plot of all tests; empty if not there."""
    import nbformat

    table, picture = "", b""
    for cell in nbformat.read(NOTEBOOK_FOLDER / f"{CLAIMS}.ipynb", as_version=4).cells:
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            rows = data.get("text/html", "")
            if "<th>claim</th>" in rows and "<th>verdict</th>" in rows:
                table = _tidy(rows)
            if "plot_claims" in cell.source and "image/png" in data:
                picture = base64.b64decode(data["image/png"])
    return table, picture


def _tidy(rows: str) -> str:
    """pandas' table of a notebook, with one row of headings and the theme's style."""
    rows = re.sub(r"<style.*?</style>|<tr>\s*<th>id</th>.*?</tr>", "", rows, flags=re.DOTALL)
    return rows.replace("<th></th>", "<th>id</th>", 1).replace('border="1" class="dataframe"', 'class="table"')


def records_page(folder: Path, addresses: Addresses) -> str:
    """The recorded robustness runs with their tables, copied to `folder`; in a wheel, where they are."""
    source = NOTEBOOK_FOLDER.parent / RECORDS
    if not (IS_CLONE and source.is_dir()):
        place = f"[{RECORDS}]({addresses.repository}/tree/main/{RECORDS})" if addresses.repository else f"`{RECORDS}`"
        return _NO_RECORDS.format(place=place)
    (folder / "records").mkdir()
    parts = []
    for section in re.split(r"^(?=## )", (source / "README.md").read_text(), flags=re.MULTILINE):
        parts.append(addresses.localized(section, RECORDS))  # names of tables become words
        for name in dict.fromkeys(re.findall(r"\]\((\w+\.csv)\)", section)):
            (folder / "records" / name).write_bytes((source / name).read_bytes())
            table = wide_table(pd.read_csv(source / name), f"Table {name}", index=False)
            parts.append(f"<details><summary>The rows of {name}</summary>\n\n{table}\n\n")
            parts.append(f"[Download {name}](/records/{name})\n\n</details>\n\n")
    return "".join(parts)


def _raw(markup: str) -> str:
    return f"````{{raw}} html\n{markup}\n````"


_PEERS = """# Peers

Other loaders beside labkit's, all doing the same work, each class in one run on one machine:
`notebooks/13_peers.csv`, which [13 peers](notebooks/13_peers.ipynb) explains. Rates of two classes, or of two
machines, must not be compared. `python -m labkit peers` measures them on yours.

`images_per_s` is the steady rate, with the 95 % interval of its mean; `speedup` is over the naive PIL loader in paired
rounds; `of_limit` is the share of what decoding alone, or copying alone, reaches on the same cores."""
_CLAIMS = """# Claims

The claims of the write-ups that this lab began with, their figures as they give them, and the verdicts of the stored
run of [14 claims](notebooks/14_claims.ipynb), which explains the rules. `python -m labkit claims` judges them by the
runs of your machine."""
_NO_RECORDS = """# Robustness

What was tried (injected faults, fuzzing, soak runs, verdicts under load, mutants), how often and with what result, is
recorded in the repository, in {place}, and not in a wheel. Build the site in a clone to have the figures here.
"""
