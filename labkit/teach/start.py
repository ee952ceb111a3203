"""where_to_start(): from "my GPU waits" to the notebook and the call that help, with the gains that were measured."""

import html
import os
from collections.abc import Callable, Iterable, Iterator
from math import nan
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.core import NOTEBOOK_FOLDER
from labkit.measure import format_ratio, load_frame
from labkit.teach import start_picture
from labkit.teach.claims import Frames, Reading, read_folder
from labkit.teach.ladder import FRAME as LADDER_FRAME
from labkit.teach.start_tree import (
    ASK,
    NOT_WAITING,
    PARTS,
    QUESTION,
    SECOND_QUESTION,
    SPLIT,
    TAUGHT,
    WATCH,
    Choice,
    Gain,
    Part,
    gains,
)

NOTEBOOK = "00_measure"
FRAME = "00_start.csv"  # beside the notebooks: the runs of the stored tour that the tree reads
HERE = "this machine"
_REFERENCE = "reference run on a GPU"

Link = Callable[[str], str]


def where_to_start(results: str | os.PathLike | None = None, *, runs: Iterable[pd.DataFrame] = ()) -> "Start":
    """The decision tree: is my step waiting for data, for which part, and what do I change? Times nothing.

    Each change has the notebook that teaches it, the call in `lk.`, and its gain: from the runs that tours have
    recorded on this machine, else from the stored run, which is named. In a notebook it is a picture and a list.

    Args:
        results: Folder of a tour's results. Default: where a running tour collects frames, else `results` here or
            beside the notebooks' folder, if it exists.
        runs: Frames measured just now; they replace recorded runs of the same experiment.

    Returns:
        `.frame`, one row per change: `part`, `sign` (how `labkit watch` names it), `call`, `notebook` (the first that
        teaches it), `notebooks`, `does`, `compared`, `gain` (ratio of rates; nan if it was not measured or is no
        speed-up), `ci_low` and `ci_high` (95 %), `n_runs`, `origin` (whose runs), `doubt`, `step` (of the write-ups'
        checklist). `.plot()` draws it, `print` gives it as a list, `.judge(steps)` compares an order of steps.

    Raises:
        FileNotFoundError: `results` holds no frames of this machine.
        ValueError: a file in it is not a frame, or runs come from another machine.

    Taught in: notebooks/00_measure.ipynb
    """
    return start_from([*read_folder(results), *runs])


def start_from(runs: Iterable[pd.DataFrame]) -> "Start":
    """The tree of `where_to_start`, from these runs of this machine, and else from the stored ones."""
    own, stored = Frames(runs), _stored_frames()
    parts = (NOT_WAITING, *PARTS)
    return Start(pd.DataFrame([_row(part, choice, own, stored) for part in parts for choice in part.choices]))


def runs_behind(frames: Iterable[pd.DataFrame]) -> pd.DataFrame | None:
    """The rows of frames that the tree reads, to store as `FRAME`; None if there are none."""
    found = [frame[gain.behind(frame)] for frame in frames for gain in gains()]
    found = [rows for rows in found if len(rows)]
    return pd.concat(found, ignore_index=True).drop_duplicates() if found else None


class Start:
    """The decision tree with its gains; see `where_to_start`."""

    def __init__(self, frame: pd.DataFrame):
        self.frame = frame

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the tree; it can be read at a width of 600 pixels.

        Args:
            ax: Axes to draw on; default: a new figure of the tree's own height.
        """
        return start_picture.draw_tree(self._branches(), ax=ax)

    def figure(self) -> Figure:
        """The picture as a figure of its own, which pyplot does not show."""
        figure = Figure(figsize=start_picture.size_of(self._branches()))
        self.plot(ax=figure.add_axes((0, 0, 1, 1)))
        return figure

    def __str__(self) -> str:
        return "\n".join(self._lines(str))

    def __repr__(self) -> str:
        return str(self)

    def to_markdown(self, link: Link = lambda name: f"[{name}]({name}.ipynb)") -> str:
        """The tree as a nested list; `link` makes a link of a notebook's name."""
        return "\n".join(self._lines(link, code="`{}`".format))

    def to_html(self, link: Link = html.escape) -> str:
        """The tree as nested lists in HTML; `link` gives a notebook's name as HTML."""
        items = [
            f"<li>{html.escape(_head(part))}<ul>" + "".join(
                f"<li><code>{html.escape(row.call)}</code>, {', '.join(map(link, row.notebooks))}: "
                f"{html.escape(_does(row))}</li>" for row in rows
            ) + "</ul></li>" for part, rows in self._branches()
        ]  # fmt: skip
        ask = ", ".join(html.escape(one) for one in ASK)
        head = f"{QUESTION} Ask <code>{ask}</code> ({link(TAUGHT)}). {SECOND_QUESTION} {SPLIT}"
        return f"<p>{head}</p><ul>{''.join(items)}</ul>"

    def judge(self, steps: pd.DataFrame) -> pd.DataFrame:
        """Judge an order of steps by the tree: how long it goes on before it helps a step that waits for one part.

        Args:
            steps: The table of `checklist`: `step`, `place`, `measured`.

        Returns:
            One row per part that a step can wait for: `first_step` of the order that is about it, and its `place`
            (NA: none is), `measured` gain of that step, and the tree's largest measured gain for the part,
            `best_gain`, by `best_call`. `attrs["sentence"]` says in words what follows.
        """
        rows = []
        for part in PARTS[:-1]:
            own = self.frame[self.frame["part"] == part.name]
            theirs = steps[steps["step"].isin(own["step"])].sort_values("place")
            best = own.dropna(subset="gain").nlargest(1, "gain")
            rows.append({
                "part": part.name, "first_step": _first(theirs["step"], ""), "place": _first(theirs["place"], pd.NA),
                "measured": _first(theirs["measured"], nan), "best_call": _first(best["call"], ""),
                "best_gain": _first(best["gain"], nan),
            })  # fmt: skip
        table = pd.DataFrame(rows).astype({"place": "Int64"}).set_index("part")
        table.attrs["sentence"] = _judgement(table)
        return table

    def _branches(self) -> Iterator[tuple[Part, list[Any]]]:
        """The parts in order, each with its rows."""
        for part in (NOT_WAITING, *PARTS):
            yield part, list(self.frame[self.frame["part"] == part.name].itertuples())

    def _lines(self, link: Link, code: Link = str) -> Iterator[str]:
        yield f"{QUESTION} Ask {code(WATCH)}, {ASK[1]} ({link(TAUGHT)}). {SECOND_QUESTION} {SPLIT}"
        yield ""
        for part, rows in self._branches():
            yield f"- {_head(part)}"
            for row in rows:
                taught = ", ".join(map(link, row.notebooks))
                yield f"  - {code(row.call)}, {taught}: {_does(row)}"

    def _ipython_display_(self) -> None:
        """The picture, and below it the list, whose notebooks are links."""
        from IPython.display import Image, Markdown, display

        from labkit.core import png_bytes

        display(Image(png_bytes(self.figure(), dpi=start_picture.DPI), alt=QUESTION), Markdown(self.to_markdown()))


def describe_gain(row: Any) -> str:
    """A row's gain in words: what was compared, the ratio, its interval, and whose runs they are; or empty."""
    if not row.compared:
        return ""
    if pd.isna(row.gain):
        return f"{row.compared}: {row.origin}"
    interval = f" [{format_ratio(row.ci_low)}, {format_ratio(row.ci_high)}]" if pd.notna(row.ci_low) else ""
    doubt = f", in doubt: {row.doubt}" if row.doubt else ""
    return f"{row.compared}: {format_ratio(row.gain)}x{interval}, {row.origin}{doubt}"


def _does(row: Any) -> str:
    return "; ".join(filter(None, [row.does, describe_gain(row)]))


def _head(part: Part) -> str:
    return f"{part.name[0].upper()}{part.name[1:]} ({part.sign})"


def _first(values: pd.Series, default: Any) -> Any:
    return values.iloc[0] if len(values) else default


def _judgement(table: pd.DataFrame) -> str:
    """In which place an order of steps first turns to the part that a training waits for, and what it leaves out."""
    places = table["place"].dropna().sort_values()
    meant = "; ".join(f"step {place} for {part}" for part, place in places.items())
    missing = ", ".join(part for part, place in table["place"].items() if pd.isna(place))
    left_out = f" No step is for a training which waits for {missing}." if missing else ""
    first = f"The first step that is meant for each wait: {meant}."
    return f"{first}{left_out} The tree asks first, and starts there."


def _row(part: Part, choice: Choice, own: Frames, stored: Frames) -> dict[str, Any]:
    found, origin = _read(choice.gain, own, stored) if choice.gain else (Reading(), "")
    if choice.gain and found is None:
        number = choice.gain.experiment.partition(" ")[0]  # the notebook that measures it
        origin = "needs a GPU" if choice.gain.needs_gpu else f"not measured yet: labkit tour --only {number}"
    reading = found or Reading()
    return {
        "part": part.name, "sign": part.sign, "call": choice.call, "notebook": choice.notebooks[0],
        "notebooks": choice.notebooks, "does": choice.does, "compared": choice.gain.compared if choice.gain else "",
        "gain": reading.ratio, "ci_low": reading.low, "ci_high": reading.high, "n_runs": reading.n_runs,
        "origin": origin, "doubt": reading.doubt, "step": choice.step,
    }  # fmt: skip


def _read(gain: Gain, own: Frames, stored: Frames) -> tuple[Reading | None, str]:
    """The first reading of these: this machine's, the stored tour's, a reference run's; and whose it is."""
    for frames, origin in ((own, HERE), (stored, f"stored run on {stored.machine}")):
        reading = gain.read(frames)
        if reading and (reading.device == "cuda" or not gain.needs_gpu):
            return reading, origin
    return (gain.read_reference(Frames([])) if gain.needs_gpu else None), _REFERENCE


def _stored_frames() -> Frames:
    """What the repository and the wheel hold: the tour's runs behind the tree, and the ladder, which are of one run."""
    paths = [NOTEBOOK_FOLDER / name for name in (LADDER_FRAME, FRAME)]
    return Frames([load_frame(path) for path in paths if path.is_file()], of_any_machine=True)
