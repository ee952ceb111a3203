"""`where_to_start`: from what a training waits for to the call and the notebook that help, with measured gains."""

import html
import re
from collections.abc import Collection, Mapping

import pandas as pd

from labkit.course.results import HERE, Result, known_results

_ASK = "Ask `python -m labkit watch train.py` first what a step waits for (notebook 12)."

# What the step waits for, as `labkit watch` names it; the change; its notebook; the figure there that is its gain.
_CHANGES = (
    ("read", "`lk.read_shards`: files packed into shards, read in order",
     "08_shard_formats", "shards over files, over HTTP"),
    ("read", "`lk.TarStore`: an index of a tar, for any order",
     "09_marigold_storage", "indexed tar over tarfile"),
    ("decode", "`lk.make_loader`: one worker per core",
     "03_persistent_workers", "one worker per core over none"),
    ("decode", "`lk.tile_jpegs`: smaller JPEGs, made once",
     "11_prepare_once", "JPEG at 256 over the photos as they came"),
    ("decode", "`lk.BatchLoader`: threads that decode only what a crop needs",
     "11_prepare_once", "BatchLoader over DataLoader workers"),
    ("decode", "`lk.PixelStore`: raw pixels, decoded once",
     "11_prepare_once", "raw pixels over JPEG"),
    ("augment", "`lk.make_augment`: strong colors by Albumentations",
     "05_albumentations", "Albumentations over v2, heavy recipe"),
    ("start", "`lk.make_loader`: workers that are kept, most where epochs are short",
     "03_persistent_workers", "kept workers over new ones, short epochs"),
    ("sizes", "`lk.collect_sizes`: sizes of all images before training",
     "10_image_sizes", "dictionary over one search per image"),
)  # fmt: skip


def where_to_start() -> "Start":
    """What to change, by what a step waits for: only what was certainly faster. Times nothing.

    Gains are those that tours have found on this machine, else of the stored run, which is named.

    Returns:
        A table to show or print. Its `.frame` has one row per change whose 95 % interval lies above 1: `waits_for`,
        `do`, `gain` (ratio of rates), `ci_low`, `ci_high`, `compared`, `origin` (whose run), `notebook`.

    Raises:
        ValueError: a file of results is damaged.

    Example:
        >>> print(course.where_to_start())

    Taught in: notebooks/00_measure.ipynb
    """
    return start_from(known_results())


def start_from(results: Mapping[str, Result]) -> "Start":
    """The table of `where_to_start` from results by notebook."""
    rows = []
    for waits_for, do, notebook, figure in _CHANGES:
        found = results.get(notebook)
        gain = found.figures.get(figure) if found else None
        if found and gain and gain.at_least > 1:
            rows.append({
                "waits_for": waits_for, "do": do, "gain": gain.value, "ci_low": gain.low, "ci_high": gain.high,
                "compared": figure, "origin": found.origin, "notebook": notebook,
            })  # fmt: skip
    columns = ["waits_for", "do", "gain", "ci_low", "ci_high", "compared", "origin", "notebook"]
    return Start(pd.DataFrame(rows, columns=columns).astype({"gain": float}))  # also where there are no rows


class Start:
    """The table of `where_to_start`."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame

    def to_html(self, pages: Collection[str]) -> str:
        """The table as HTML; names of notebooks that have a page next to it are links."""
        shown = self._shown()
        shown["notebook"] = [
            f'<a href="{name}.html">{name}</a>' if name in pages else name for name in shown["notebook"]
        ]
        table = shown.to_html(index=False, escape=False, border=0)
        return re.sub("`(.*?)`", r"<code>\1</code>", f"<p>{_ASK}</p>{table}<p>{html.escape(self._origins())}</p>")

    def __str__(self) -> str:
        """The table in Markdown, whose links to notebooks JupyterLab, GitHub and the site follow."""
        shown = self._shown()
        shown["notebook"] = [f"[{name}]({name}.ipynb)" for name in shown["notebook"]]
        rows = [shown.columns, ["---"] * len(shown.columns), *shown.itertuples(index=False)]
        return "\n".join([_ASK, "", *(f"| {' | '.join(row)} |" for row in rows), "", self._origins()])

    __repr__ = _repr_markdown_ = __str__

    def _shown(self) -> pd.DataFrame:
        gains = [
            f"{row.gain:.3g}x" + (f" [{row.ci_low:.3g}, {row.ci_high:.3g}]" if row.ci_low == row.ci_low else "")
            + f", {row.compared}" + ("" if row.origin == HERE else " *")
            for row in self.frame.itertuples()
        ]  # fmt: skip
        return pd.DataFrame({
            "waits for": self.frame["waits_for"], "do": self.frame["do"], "gain": gains,
            "notebook": self.frame["notebook"],
        })  # fmt: skip

    def _origins(self) -> str:
        others = [origin for origin in dict.fromkeys(self.frame["origin"]) if origin != HERE]
        return (
            f"*: {', '.join(others)}; run `python -m labkit tour` for yours." if others else "Measured on this machine."
        )
