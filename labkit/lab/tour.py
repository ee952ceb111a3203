"""The tour: photos, every notebook in a fresh kernel, and a report to open."""

import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from labkit.core import IS_CLONE, env_id, labkit_home, photo_root, scale, write_atomic
from labkit.data.samples import make_photos
from labkit.lab.copies import update_copies
from labkit.lab.notebooks import Executed, Notebook, execute, find_notebooks, store
from labkit.lab.report import write_index
from labkit.measure import RESULTS_VARIABLE
from labkit.teach import ladder

console = Console()


def run_tour(*, only: str = "", store_outputs: bool = False, results: Path = Path("results")) -> int:
    """Run the notebooks at the current scale and write `results/<env_id>/`.

    Args:
        only: Starts of notebook names, comma-separated; empty: all.
        store_outputs: Write the executed notebooks back in place, and the ladder's frame and figure beside them.
        results: Folder of reports; the frames, HTML pages and `index.html` go to a subfolder for this environment.

    Returns:
        Number of notebooks that failed.
    """
    notebooks = find_notebooks(only)
    if not IS_CLONE:
        notebooks = find_notebooks(only, update_copies(_say))
    folder = results.resolve() / env_id()
    make_scale_photos()
    runs = [
        _run(notebook, f"[{number}/{len(notebooks)}] {notebook.name}", folder, store_outputs)
        for number, notebook in enumerate(notebooks, 1)
    ]
    for run in runs if store_outputs else ():
        if run.notebook.name == ladder.NOTEBOOK and not run.error:  # the README's figure shows what it measured
            ladder.store_figure(folder / "frames" / ladder.FRAME, run.notebook.path.parent)
    index = write_index(folder, runs)
    failed = [run for run in runs if run.error]
    for run in failed:
        console.print(f"failed {run.notebook.name}: {run.error}", highlight=False, markup=False)
    _say(f"{len(runs) - len(failed)} of {len(runs)} notebooks ran. Open {index}")
    return len(failed)


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_scale_photos() -> None:
    """Make whatever is missing of the photo sets for the current scale.

    Raises:
        OSError: the disk is full or not writable; the message names the folder and the remedy.
    """
    try:
        make_photos(photo_root("imagenet"), scale().n_photos, profile="imagenet")
        make_photos(photo_root("camera"), scale().n_camera, profile="camera")
    except OSError as error:
        raise OSError(f"{labkit_home()} cannot be written to ({error}): set LABKIT_HOME to another folder") from error


def _run(notebook: Notebook, title: str, folder: Path, store_outputs: bool) -> Executed:
    from nbconvert import HTMLExporter

    description, cell = TextColumn("{task.description}"), TextColumn("cell")
    columns = (description, BarColumn(), cell, MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        run = execute(
            notebook,
            environment=_kernel_environment(folder / "frames"),
            on_cell=lambda cell, cells: progress.update(task, completed=cell + 1, total=cells),
        )
    page, _ = HTMLExporter().from_notebook_node(run.node)
    write_atomic(folder / f"{run.notebook.name}.html", page.encode())
    if store_outputs and not run.error:
        try:
            store(run)
        except ValueError as error:
            run.error = str(error)
    outcome = "failed" if run.error else "ok"
    console.print(f"{title}: {outcome}, {run.seconds:.0f} s", highlight=False, markup=False)
    return run


def _kernel_environment(frames: Path) -> dict[str, str]:
    """The environment of kernels during the tour: a folder for frames, and no progress bars in outputs."""
    return {
        "TORCH_LOGS": "-torch.utils.cpp_extension",  # with nvcc but no GPU, torch.utils.benchmark logs a warning
        **os.environ,
        RESULTS_VARIABLE: str(frames),
        "LABKIT_SCALE": scale().name,
        "TQDM_DISABLE": "1",
    }
