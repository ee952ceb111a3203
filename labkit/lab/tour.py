"""The tour: photos, every notebook in a fresh kernel, and a report to open."""

import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from labkit.core import env_id, labkit_home, photo_root, scale, write_atomic
from labkit.data.samples import make_photos
from labkit.lab.notebooks import Executed, Notebook, execute, find_notebooks, store
from labkit.lab.report import write_index
from labkit.measure import RESULTS_VARIABLE
from labkit.teach import ladder

console = Console()


def run_tour(*, only: str = "", store_outputs: bool = False, results: Path = Path("results")) -> int:
    """Run the notebooks at the current scale and write `results/<env_id>/`.

    Args:
        only: Beginnings of notebook names, comma-separated; empty: all.
        store_outputs: Write the executed notebooks back in place, and the ladder's frame and figure beside them.
        results: Folder of reports; the frames, HTML pages and `index.html` go to its sub-folder of this environment.

    Returns:
        Number of notebooks that failed.
    """
    notebooks = find_notebooks(only)
    folder = results.resolve() / env_id()
    make_scale_photos()
    with _kernel_environment(folder / "frames"):
        done = [
            _run(notebook, number, len(notebooks), folder, store_outputs)
            for number, notebook in enumerate(notebooks, 1)
        ]
    if store_outputs:
        _store_ladder(done, folder / "frames")
    index = write_index(folder, done)
    failed = [run for run in done if run.error]
    for run in failed:
        console.print(f"failed {run.notebook.name}: {run.error}", highlight=False, markup=False)
    console.print(
        f"{len(done) - len(failed)} of {len(done)} notebooks ran. Open {index}", highlight=False, soft_wrap=True
    )
    return len(failed)


def make_scale_photos() -> None:
    """Make the photo sets of the current scale, as far as they are missing.

    Raises:
        OSError: there is no room for them, or no leave to write; names the folder and the remedy.
    """
    try:
        make_photos(photo_root("imagenet"), scale().n_photos, profile="imagenet")
        make_photos(photo_root("camera"), scale().n_camera, profile="camera")
    except OSError as error:
        raise OSError(f"{labkit_home()} cannot be written to ({error}): name another folder in LABKIT_HOME") from error


def _run(notebook: Notebook, number: int, total: int, folder: Path, store_outputs: bool) -> Executed:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("cell"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"[{number}/{total}] {notebook.name}", total=None)
        run = execute(notebook, on_cell=lambda cell, cells: progress.update(task, completed=cell + 1, total=cells))
    _write_html(run, folder)
    if store_outputs and not run.error:
        try:
            store(run)
        except ValueError as error:
            run.error = str(error)
    console.print(
        f"[{number}/{total}] {notebook.name}: {'failed' if run.error else 'ok'}, {run.seconds:.0f} s",
        highlight=False,
        markup=False,
    )
    return run


def _store_ladder(done: list[Executed], frames: Path) -> None:
    """Draw the README's figure anew, where this very tour has run and stored the notebook that measures it."""
    for run in done:
        if run.notebook.name == ladder.NOTEBOOK and not run.error:
            ladder.store_figure(frames / ladder.FRAME, run.notebook.path.parent)


def _write_html(run: Executed, folder: Path) -> None:
    from nbconvert import HTMLExporter

    body, _ = HTMLExporter().from_notebook_node(run.node)
    write_atomic(folder / f"{run.notebook.name}.html", body.encode())


class _kernel_environment:
    """Variables that the kernels inherit while the tour runs: where frames go, and no progress bars in outputs."""

    def __init__(self, frames: Path):
        # Where nvcc is installed but no GPU is, importing torch.utils.benchmark logs a warning about it: not our news.
        torch_logs = os.environ.get("TORCH_LOGS", "-torch.utils.cpp_extension")
        self.values = {
            RESULTS_VARIABLE: str(frames),
            "LABKIT_SCALE": scale().name,
            "TQDM_DISABLE": "1",
            "TORCH_LOGS": torch_logs,
        }

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.values}
        os.environ.update(self.values)

    def __exit__(self, *exc_info) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
