"""Stored notebooks: all from one run of one commit, or none. For maintainers, in a clone with git."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import nbformat
import pandas as pd
from nbformat.v4 import new_output

from labkit.app.notebooks import Executed
from labkit.course import ladder, starting as start
from labkit.errors import ArgumentError
from labkit.measure.frames import MEASURE_VERSION, load_frame, measured_runs, save_frame
from labkit.measure.statistics import disturbances
from labkit.util.files import ScratchFolder, write_all_atomic
from labkit.util.machine import IS_CLONE, NOTEBOOK_FOLDER, env_id, installed_versions, name_run

if TYPE_CHECKING:
    from nbformat import NotebookNode

MAX_TRIES = 3  # of a notebook that was disturbed

# As Python prints it: the cell's place, the warning, and the line of code.
_INSTABILITY = re.compile(r"^\S.*: InstabilityWarning: (.+)\n(?:  .*\n?)?", re.MULTILINE)


def describe_run(only: str) -> dict[str, Any]:
    """What stored notebooks say about their run, as `metadata["labkit"]`, beside their own `seconds` and `note`.

    Returns:
        `run` (its start, in UTC, and a random part), `commit` (with "-dirty" if the clone had changes), `env_id`,
        `versions` of Python and libraries, and `measure` (`MEASURE_VERSION`).

    Raises:
        ValueError: `only` chooses a part of the notebooks, or there is no clone with git.
    """
    if only:
        raise ArgumentError(f"--store and --only {only} exclude each other: all notebooks are stored, or none")
    return {
        "run": name_run(),
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
    git = shutil.which("git")
    if git is None or not IS_CLONE:
        raise ArgumentError("storing needs a clone with git: " + ("install git" if IS_CLONE else "this is a wheel"))

    def ask(*arguments: str) -> str:
        return subprocess.run([git, "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        commit, changes = ask("rev-parse", "HEAD").strip(), ask("status", "--porcelain")
    except subprocess.CalledProcessError as error:
        raise ArgumentError(
            f"storing needs a clone with git, and {folder} is in none: {error.stderr.strip()}"
        ) from error
    return f"{commit}-dirty" if changes else commit


def run_until_quiet(run_once: Callable[[], Executed], say: Callable[[str], None]) -> Executed:
    """Run a notebook again while it is disturbed, at most `MAX_TRIES` times; a note says if the last run was, too.

    A run that cannot be stored has an `error` that says why, and is not repeated.
    """
    for number in range(1, MAX_TRIES + 1):
        run = run_once()
        run.error = run.error or refusal(run)
        reason = disturbance(run)
        if run.error or not reason:
            return run
        say(f"{run.notebook.name} was disturbed, in try {number} of {MAX_TRIES}: {reason}")
    run.note = f"disturbed in each of {MAX_TRIES} tries, in the last one: {reason}"
    return run


def disturbance(run: Executed) -> str:
    """Why a run may tell more about the machine than about the code; empty if nothing says so."""
    reasons = [reason for cell in run.node.cells for reason in _INSTABILITY.findall(_stderr(cell))]
    if run.frames:
        reasons += disturbances(pd.concat([measured_runs(load_frame(path)) for path in run.frames]))
    return "; ".join(dict.fromkeys(reasons))


def refusal(run: Executed) -> str:
    """Why a run that has ended cannot be stored: what it wrote to stderr, but for instability; or empty."""
    noise = [text for cell in run.node.cells if (text := _INSTABILITY.sub("", _stderr(cell)).strip())]
    return f"wrote to stderr, and so cannot be stored: {noise[0][:200]}" if noise else ""


def store_all(runs: Iterable[Executed], about: dict[str, Any], frames: Path) -> None:
    """Write notebooks back in place, with the ladder's frame and figure beside theirs, and the runs behind
    `where_to_start`: all files, or none.

    Args:
        runs: All notebooks of a run, without errors.
        about: From `describe_run`, at the run's start.
        frames: The folder where the run recorded its frames.

    Raises:
        OSError: a file cannot be written, or the ladder was not recorded.
    """
    if find_commit(NOTEBOOK_FOLDER) != about["commit"]:  # the notebooks may have run different code
        about = {**about, "commit": f"{about['commit'].removesuffix('-dirty')}-dirty"}
    files, recorded = {}, [load_frame(path) for path in sorted(frames.glob("*.csv"))]
    for run in runs:
        if run.notebook.name == start.NOTEBOOK:
            _show_gains(run.node, recorded)
        files[run.notebook.path] = _stored_bytes(run, about)
        if run.notebook.name == ladder.NOTEBOOK:  # the README's figure shows what it measured
            files |= _ladder_files(frames / ladder.FRAME, run.notebook.path.parent)
        if run.notebook.name == start.NOTEBOOK:
            files |= _start_files(recorded, run.notebook.path.parent)
    write_all_atomic(files)


def _stored_bytes(run: Executed, about: dict[str, Any]) -> bytes:
    """The executed notebook as a file, without metadata that editors and kernels add."""
    node = run.node
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    own = {**about, "seconds": round(run.seconds), **({"note": run.note} if run.note else {})}
    node.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}, "labkit": own})
    for cell in node.cells:
        cell.metadata.pop("execution", None)
        _show_instability(cell)
    return f"{nbformat.writes(node)}\n".encode()


def _show_instability(cell: "NotebookNode") -> None:
    """Put a cell's instability warnings into its printed output: as warnings, they name a temporary file."""
    if reasons := _INSTABILITY.findall(_stderr(cell)):
        text = "".join(f"InstabilityWarning: {reason}\n" for reason in reasons)
        others = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.outputs = [new_output("stream", name="stdout", text=text), *others]


def _ladder_files(frame: Path, folder: Path) -> dict[Path, bytes]:
    with ScratchFolder(gettempdir()) as scratch:
        ladder.store_figure(frame, scratch)
        return {folder / name: (scratch / name).read_bytes() for name in (ladder.FRAME, ladder.FIGURE)}


def _start_files(recorded: list[pd.DataFrame], folder: Path) -> dict[Path, bytes]:
    """The runs that `where_to_start` reads, for readers who have none of their own."""
    runs = start.runs_behind(recorded)
    if runs is None:
        return {}
    with ScratchFolder(gettempdir()) as scratch:
        return {folder / start.FRAME: save_frame(runs, scratch / start.FRAME).read_bytes()}


def _show_gains(node: "NotebookNode", recorded: list[pd.DataFrame]) -> None:
    """The table was shown before anything had run: show it anew, with the gains of the whole run."""
    table = start.start_from(recorded)
    data = {"text/html": table.to_html(), "text/plain": str(table)}
    for cell in node.cells:
        if cell.cell_type == "code" and cell.source.endswith("\nlk.where_to_start()"):
            cell.outputs = [new_output("execute_result", data=data, execution_count=cell.execution_count)]


def _stderr(cell: "NotebookNode") -> str:
    """What a cell wrote to stderr, which may come in parts."""
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stderr")
