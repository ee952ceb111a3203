"""The tour: photos, every notebook in a fresh kernel, and a report to open."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from labkit.app.notebooks import Executed, Notebook, execute, find_notebooks, update_copies
from labkit.app.storing import describe_run, run_until_quiet, store_all
from labkit.app.tour_page import LiveReport, frame_keys
from labkit.data.samples import make_photos
from labkit.errors import StorageError
from labkit.measure.recorder import RESULTS_VARIABLE
from labkit.util.files import write_atomic
from labkit.util.machine import IS_CLONE, env_id, labkit_home, photo_root, scale

console = Console()


def run_tour(*, only: str = "", store_outputs: bool = False, results: Path = Path("results")) -> int:
    """Run the notebooks at the current scale and write `results/<env_id>/`, whose `index.html` can be read meanwhile.

    Args:
        only: Starts of notebook names, comma-separated; empty: all.
        store_outputs: If no notebook fails, write all executed ones back in place, and the ladder's frame and figure
            beside them. The run starts without earlier results, which are moved aside.
        results: Folder of reports; the frames, HTML pages and `index.html` go to a subfolder for this environment.

    Returns:
        Number of notebooks that failed.

    Raises:
        ValueError: these notebooks cannot be stored, or a recorded frame cannot be read; says why.
        OSError: files cannot be written.
    """
    about = describe_run(only) if store_outputs else None
    notebooks = find_notebooks(only)
    if not IS_CLONE:
        notebooks = find_notebooks(only, update_copies(_say))
    folder = results.resolve() / env_id()
    if about:
        _set_aside(folder, about["run"])
    with LiveReport(folder, notebooks) as report:
        _say(f"Open {report.path} at any time: it shows what has been measured so far")
        make_scale_photos()
        _run_all(notebooks, folder, report, store_outputs=store_outputs)
        failed = [run for run in report.runs if run.error]
        if about and not failed:
            store_all(report.runs, about, folder / "frames")
    _summarize(report, stored=bool(about))
    return len(failed)


def _run_all(notebooks: list[Notebook], folder: Path, report: LiveReport, *, store_outputs: bool) -> None:
    """Run notebooks in turn; to be stored, until one fails, since all are stored or none."""
    with _drawing_aside() as aside:
        for number, notebook in enumerate(notebooks, 1):
            run_once = partial(_run, notebook, f"[{number}/{len(notebooks)}] {notebook.name}", folder, report, aside)
            report.end(run_until_quiet(run_once, _say) if store_outputs else run_once())
            if store_outputs and report.runs[-1].error:
                return


class _Aside:
    """Draws pages while the next kernel starts, one after another."""

    def __init__(self, pool: ThreadPoolExecutor):
        self._pool = pool
        self._begun: list[Future] = []

    def begin(self, draw: Callable[..., object], *arguments: object) -> None:
        self._begun.append(self._pool.submit(draw, *arguments))

    def finish(self) -> None:
        """Wait, and raise what a drawing raised: before a cell measures, since drawing takes time from it."""
        while self._begun:
            self._begun.pop(0).result()


@contextmanager
def _drawing_aside() -> Iterator[_Aside]:
    with ThreadPoolExecutor(max_workers=1) as pool:
        aside = _Aside(pool)
        yield aside
        aside.finish()


def _set_aside(folder: Path, run: str) -> None:
    """Move earlier results away: notebooks read recorded frames and guesses, which must be of their own run."""
    if folder.exists():
        earlier = folder.rename(folder.with_name(f"{folder.name}-before-{run}"))
        _say(f"moved earlier results to {earlier}")


def _summarize(report: LiveReport, *, stored: bool) -> None:
    failed = [run for run in report.runs if run.error]
    for run in failed:
        _say(f"failed {run.notebook.name}: {run.error}")
    if stored and failed:
        _say("no notebook was stored: all are, or none")
    elif stored:
        for run in report.runs:
            if run.note:
                _say(f"stored with a note {run.notebook.name}: {run.note}")
    _say(f"{len(report.runs) - len(failed)} of {len(report.runs)} notebooks ran. Open {report.path}")


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
        raise StorageError(
            f"{labkit_home()} cannot be written to ({error}): set LABKIT_HOME to another folder"
        ) from error


def _run(notebook: Notebook, title: str, folder: Path, report: LiveReport, aside: _Aside) -> Executed:
    aside.begin(report.begin, notebook)
    before = frame_keys(folder)
    description, cell = TextColumn("{task.description}"), TextColumn("cell")
    columns = (description, BarColumn(), cell, MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def on_cell(cell: int, n_cells: int) -> None:
            aside.finish()
            progress.update(task, completed=cell + 1, total=n_cells)
            report.on_cell(cell, n_cells)

        run = execute(notebook, environment=_kernel_environment(folder / "frames"), on_cell=on_cell)
    run.frames = [key[0] for key in frame_keys(folder) if key not in before]
    aside.begin(_write_page, run, folder)
    _say(f"{title}: {'failed' if run.error else 'ok'}, {run.seconds:.0f} s")
    return run


def _write_page(run: Executed, folder: Path) -> None:
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_notebook_node(run.node)
    write_atomic(folder / f"{run.notebook.name}.html", page.encode())


def _kernel_environment(frames: Path) -> dict[str, str]:
    """The environment of kernels during the tour: a folder for frames, and no progress bars in outputs."""
    return {
        "TORCH_LOGS": "-torch.utils.cpp_extension",  # with nvcc but no GPU, torch.utils.benchmark logs a warning
        **os.environ,
        RESULTS_VARIABLE: str(frames),
        "LABKIT_SCALE": scale().name,
        "TQDM_DISABLE": "1",
    }
