"""Stored notebooks: all from one run of one commit, or none. For maintainers, in a clone with git."""

import base64
import re
import subprocess
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import nbformat
from nbformat.v4 import new_output
from PIL import Image

from labkit.app.notebooks import Executed
from labkit.course import ladder, starting
from labkit.errors import ArgumentError
from labkit.measure.frames import MEASURE_VERSION, load_frame, save_frame
from labkit.util.files import ScratchFolder, write_all_atomic
from labkit.util.machine import NOTEBOOK_FOLDER, env_id, installed_versions, name_run
from labkit.util.pictures import encode_image

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

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        raise ArgumentError(f"storing needs git and a clone, and {folder} is in none: {why.strip()}") from error
    return f"{commit}-dirty" if changes else commit


def refusal(run: Executed) -> str:
    """Why a run that has ended cannot be stored: what it wrote to stderr, but for instability; or empty."""
    noise = [text for cell in run.node.cells if (text := _INSTABILITY.sub("", _stderr(cell)).strip())]
    return f"wrote to stderr, and so cannot be stored: {noise[0][:200]}" if noise else ""


def unstable_variants(run: Executed) -> list[str]:
    """What the notebook's instability warnings say: it may tell more about the machine than about the code."""
    return [reason for cell in run.node.cells for reason in _INSTABILITY.findall(_stderr(cell))]


def store_all(runs: Iterable[Executed], about: dict[str, Any], frames: Path) -> None:
    """Write notebooks back in place, with the ladder's frame and figure next to them, and the runs behind
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
    with ScratchFolder(gettempdir()) as scratch:
        for run in runs:
            folder = run.notebook.path.parent
            if run.notebook.name == starting.NOTEBOOK:
                _show_gains(run, recorded)
                behind = starting.runs_behind(recorded)  # for readers who have no runs of their own
                if behind is not None:
                    files[folder / starting.FRAME] = save_frame(behind, scratch / starting.FRAME).read_bytes()
            if run.notebook.name == ladder.NOTEBOOK:  # the README's figure shows what it measured
                ladder.store_figure(frames / ladder.FRAME, scratch)
                files |= {folder / name: (scratch / name).read_bytes() for name in (ladder.FRAME, ladder.FIGURE)}
            files[run.notebook.path] = _stored_bytes(run, about)
    write_all_atomic(files)


def _stored_bytes(run: Executed, about: dict[str, Any]) -> bytes:
    """The executed notebook as a file, without metadata that editors and kernels add.

    A cell's instability warnings move into its printed output: as warnings, they name a temporary file.
    """
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    own = {**about, "seconds": round(run.seconds)}
    run.node.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}, "labkit": own})
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


def _show_gains(run: Executed, recorded: list[Any]) -> None:
    """The table was shown before anything had run: show it again, with the gains of the whole run."""
    table = starting.start_from(recorded)
    data = {"text/markdown": table.to_markdown(), "text/plain": str(table)}
    for cell in run.node.cells:
        if cell.cell_type == "code" and cell.source.endswith("where_to_start()"):
            cell.outputs = [new_output("execute_result", data=data, execution_count=cell.execution_count)]


def _stderr(cell: Any) -> str:
    """What a cell wrote to stderr, which may come in parts."""
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stderr")
