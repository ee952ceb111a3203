"""Stored notebooks and results: all from one run of one commit, or none. For maintainers, in a clone with git."""

import base64
import json
import re
import secrets
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from nbformat.v4 import new_output
from PIL import Image

from labkit.app.notebooks import Executed, Notebook
from labkit.course import ladder, ledger
from labkit.course.results import STORED, Result, describe_machine, recorded_results
from labkit.course.starting import start_from
from labkit.errors import ArgumentError
from labkit.measure.frames import MEASURE_VERSION, load_frame
from labkit.util.files import write_all_atomic
from labkit.util.machine import NOTEBOOK_FOLDER, OWN_PHOTOS_VARIABLE, env_id, installed_versions, own_photos
from labkit.util.pictures import encode_image, png_bytes

# As Python prints it: the cell's place, the warning, and the line of code.
_INSTABILITY = re.compile(r"^\S.*: InstabilityWarning: (.+)\n(?:  .*\n?)?", re.MULTILINE)


def describe_run(only: str) -> dict[str, Any]:
    """What stored notebooks say about their run, as `metadata["labkit"]`, with their own `seconds`.

    Returns:
        `run` (its start, in UTC, and a random part), `commit` (with "-dirty" if the clone had changes), `env_id`,
        `versions` of Python and libraries, and `measure` (`MEASURE_VERSION`).

    Raises:
        ValueError: `only` chooses a part of the notebooks, or there is no clone with git.
    """
    if only:
        raise ArgumentError(f"--store and --only {only} exclude each other: all notebooks are stored, or none")
    if own_photos():
        raise ArgumentError(f"what is stored is of photos that everybody can make: leave {OWN_PHOTOS_VARIABLE} out")
    return {
        "run": f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        "commit": find_commit(NOTEBOOK_FOLDER),
        "env_id": env_id(),
        "versions": installed_versions(),
        "measure": MEASURE_VERSION,
    }


def find_commit(folder: Path) -> str:
    """The commit of the clone that holds `folder`, with "-dirty" if files have changed since, or are new.

    Raises:
        ValueError: there is no git, or no clone.
    """

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        raise ArgumentError(f"storing needs git and a clone, and {folder} is in none: {why.strip()}") from error
    return f"{commit}-dirty" if changes else commit


def refusal(run: Executed, results: Path) -> str:
    """Why a run that has ended cannot be stored, or empty.

    It wrote to stderr more than warnings of instability, or it left no result in the folder `results`, or this run does
    not bear out a sentence of its result.
    """
    if noise := [text for cell in run.node.cells if (text := _INSTABILITY.sub("", _stderr(cell)).strip())]:
        return f"wrote to stderr, and so cannot be stored: {noise[0][:200]}"
    found = recorded_results(results).get(run.notebook.name)
    if found is None:
        return f'has no result: its last cell must end with course.result("{run.notebook.name}", ...)'
    return f"this run does not show what its result says: {' '.join(found.not_here)}" if found.not_here else ""


def unstable_variants(run: Executed) -> list[str]:
    """What the notebook's instability warnings say: it may tell more about the machine than about the code."""
    return [reason for cell in run.node.cells for reason in _INSTABILITY.findall(_stderr(cell))]


def store_all(runs: Iterable[Executed], about: dict[str, Any], frames: Path) -> None:
    """Write notebooks back in place, with their results, README's table, the page of claims, and the ladder's files.

    All files are written, or none. The first cell of each notebook states its result.

    Args:
        runs: All notebooks of a run, without errors.
        about: From `describe_run`, at the run's start.
        frames: The folder where the run recorded its frames; its results are in `results` next to it.

    Raises:
        OSError: a file cannot be written, or the ladder was not recorded.
        ValueError: a notebook has no result, or no place for it.
    """
    if find_commit(NOTEBOOK_FOLDER) != about["commit"]:  # the notebooks may have run different code
        about = {**about, "commit": f"{about['commit'].removesuffix('-dirty')}-dirty"}
    runs, results = list(runs), recorded_results(frames.with_name("results"))
    if missing := [run.notebook.name for run in runs if run.notebook.name not in results]:
        raise ArgumentError(f"no results of {', '.join(missing)}: the last cell must end with course.result(...)")
    records = {run.notebook.name: results[run.notebook.name].to_record() for run in runs}
    record = {**about, "machine": describe_machine(), "notebooks": records}
    files: dict[Path, bytes] = {STORED: f"{json.dumps(record, indent=1, ensure_ascii=False)}\n".encode()}
    for run in runs:
        _show_gains(run, results)
        if run.notebook.name == ladder.NOTEBOOK:  # the README's figure shows what it measured
            frame, folder = frames / ladder.FRAME, run.notebook.path.parent
            figure = ladder.draw_figure(load_frame(frame))
            files |= {folder / ladder.FRAME: frame.read_bytes(), folder / ladder.FIGURE: png_bytes(figure, dpi=120)}
        _state_result(run, results[run.notebook.name])
        files[run.notebook.path] = _stored_bytes(run, about)
    gains = NOTEBOOK_FOLDER / "guide/bottleneck.md"
    files[gains] = with_figures(gains.read_text(), results).encode()
    files[NOTEBOOK_FOLDER / "guide/claims.md"] = ledger.page_of(ledger.judged(results), record["machine"]).encode()
    readme = NOTEBOOK_FOLDER.with_name("README.md")
    table = walk_table((run.notebook, results[run.notebook.name]) for run in runs)
    files[readme] = with_table(readme.read_text(), table).encode()
    write_all_atomic(files)


_RESULT = re.compile(r"^\*\*Result\.\*\* .*$", re.MULTILINE)
_MARKED = re.compile(r"\*\*[\d.]+\*\*(?=<!-- (\w+): (.*?) -->)")
_TABLE = re.compile(r"^\| notebook \|.*\n(?:\|.*\n)+", re.MULTILINE)


def stated(result: Result) -> str:
    """The line that states a result in a notebook's first cell."""
    return f"**Result.** {result}"


def _state_result(run: Executed, result: Result) -> None:
    """Write the result into the first cell, and leave only this run's own at the end."""
    first = run.node.cells[0]
    if not _RESULT.search(first.source):
        raise ArgumentError(f"the first cell of {run.notebook.name} has no paragraph that begins with **Result.**")
    first.source = _RESULT.sub(lambda _: stated(result), first.source, count=1)
    for output in run.node.cells[-1].get("outputs", []):
        for kind, text in output.get("data", {}).items():
            if kind.startswith("text/"):
                output.data[kind] = re.sub(r"\n\n(\*\*)?Stored run\..*", "", text, flags=re.DOTALL)


def walk_table(stored: Iterable[tuple[Notebook, Result]]) -> str:
    """README's table: each notebook, and the first sentence of its result, as far as its first semicolon."""
    rows = [
        f"| [{notebook.name}](notebooks/{notebook.path.name}) "
        f"| {re.split('[.;] ', result.sentences[0])[0].removesuffix('.')}. |"
        for notebook, result in stored
    ]
    return "\n".join(["| notebook | answer here (yours will differ) |", "|---|---|", *rows, ""])


def with_table(readme: str, table: str) -> str:
    """The README's text with its table of notebooks replaced.

    Raises:
        ValueError: it has none.
    """
    if not _TABLE.search(readme):
        raise ArgumentError("README.md has no table that begins with `| notebook |`: restore it")
    return _TABLE.sub(lambda _: table, readme, count=1)


def with_figures(page: str, results: Mapping[str, Result]) -> str:
    """A page whose figures, each with its notebook and its name in a comment behind it, are those of the results.

    Raises:
        ValueError: a notebook has no such figure.
    """

    def value(mark: re.Match[str]) -> str:
        figure = results[mark[1]].figures.get(mark[2]) if mark[1] in results else None
        if figure is None:
            raise ArgumentError(f"a page of the guide shows {mark[2]!r} of {mark[1]}, which has no such figure")
        return f"**{figure.value:.3g}**"

    return _MARKED.sub(value, page)


def _stored_bytes(run: Executed, about: dict[str, Any]) -> bytes:
    """The executed notebook as a file, without metadata that editors add.

    What it says about its kernel is what JupyterLab would write, for which an opened notebook is not a changed one. A
    cell's instability warnings move into its printed output: as warnings, they name a temporary file.
    """
    kernel = {name: get_kernel_dict()[name] for name in ("display_name", "language")} | {"name": "python3"}
    language = run.node.metadata.get("language_info", {"name": "python"})  # as the kernel said
    own = {**about, "seconds": round(run.seconds)}
    run.node.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": language, "labkit": own})
    for cell in run.node.cells:
        cell.metadata.pop("execution", None)
        if reasons := _INSTABILITY.findall(_stderr(cell)):
            text = "".join(f"InstabilityWarning: {reason}\n" for reason in reasons)
            others = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = [new_output("stream", name="stdout", text=text), *others]
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                output["data"]["image/png"] = in_few_colors(png)
    return f"{nbformat.writes(run.node)}\n".encode()


_MAX_COLORS = 64


def in_few_colors(png: str) -> str:
    """A PNG in base64 as one of at most 64 colors: a plot looks the same, and takes a fraction of the bytes.

    A clone holds every stored picture, those of earlier runs too.
    """
    image = Image.open(BytesIO(base64.b64decode(png))).convert("RGB")
    few = encode_image(image.quantize(_MAX_COLORS, dither=Image.Dither.NONE), "PNG", optimize=True)
    smaller = base64.b64encode(few).decode() + "\n"
    return smaller if len(smaller) < len(png) else png


def _show_gains(run: Executed, results: Mapping[str, Result]) -> None:
    """A table of where to start was shown before all notebooks had run: show it again, with the whole run's gains."""
    table = start_from({name: replace(one, origin=f"the stored run on {one.machine}") for name, one in results.items()})
    data = {"text/markdown": str(table), "text/plain": str(table)}
    for cell in run.node.cells:
        if cell.cell_type == "code" and cell.source.endswith("where_to_start()"):
            cell.outputs = [new_output("execute_result", data=data, execution_count=cell.execution_count)]


def _stderr(cell: Any) -> str:
    """What a cell wrote to stderr, which may come in parts."""
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stderr")
