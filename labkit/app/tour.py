"""The tour: photos, every notebook in a fresh kernel, and a report to open."""

import os
from datetime import datetime
from pathlib import Path

from rich.console import Console

from labkit.app.notebooks import Executed, Notebook, execute, find_notebooks, update_copies
from labkit.app.storing import describe_run, refusal, store_all, unstable_variants
from labkit.app.tour_page import write_index
from labkit.data.own_photos import told_of
from labkit.data.samples import make_photos
from labkit.measure.recorder import RESULTS_VARIABLE
from labkit.util.files import check_writable, write_atomic
from labkit.util.machine import IS_CLONE, THOROUGH_VARIABLE, env_id, labkit_home, photo_root, scale
from labkit.util.redact import redact

console = Console()


def run_tour(*, only: str = "", thorough: bool = False, store_outputs: bool = False) -> int:
    """Run the notebooks at the current scale and write `results/<env_id>/`, whose `index.html` can be read meanwhile.

    A tour that fails or is interrupted before its first notebook leaves the earlier page as it was.

    Args:
        only: Starts of notebook names, comma-separated; empty: all.
        thorough: Every comparison spends six budgets; otherwise each notebook's main one spends one.
        store_outputs: If no notebook fails, write all executed ones back in place, with their results, README's table,
            and the ladder's frame and figure. The run is thorough, and starts without earlier results, which are moved
            aside.

    Returns:
        Number of notebooks that failed, or whose result may not be stored.

    Raises:
        ValueError: these notebooks cannot be stored, or a recorded frame cannot be read; says why.
        OSError: files cannot be written.
    """
    check_writable(labkit_home(), "set LABKIT_HOME to another folder")
    folder = Path("results").resolve() / env_id()
    check_writable(folder, "run labkit in another folder, or make room there")
    about = describe_run(only) if store_outputs else None
    notebooks = find_notebooks(only)
    if not IS_CLONE:
        notebooks = find_notebooks(only, update_copies(_say))
    runs, doing = list[Executed](), "starting the first notebook"
    make_scale_photos()  # where that fails, the earlier results stay as they are
    if about and folder.exists():  # notebooks read recorded frames and guesses, which must be of their own run
        earlier = folder.rename(folder.with_name(f"{folder.name}-before-{about['run']}"))
        _say(f"moved earlier results to {earlier}")

    page = write_index(folder, runs, status=_now(doing), is_running=True)
    _say(f"Open {page} at any time: it shows what has been measured so far")
    try:
        for number, notebook in enumerate(notebooks, 1):
            doing = f"running {notebook.name}, notebook {number} of {len(notebooks)}"
            write_index(folder, runs, status=_now(doing), is_running=True)
            run = _run(notebook, f"[{number}/{len(notebooks)}] {notebook.name}", folder, thorough or store_outputs)
            runs.append(run)
            if about:
                run.error = run.error or refusal(run, folder / "results")
                if run.error:  # all are stored or none
                    break
        failed = [run for run in runs if run.error]
        unstable = {run.notebook.name: reasons for run in runs if (reasons := unstable_variants(run))}
        if about and not failed:
            store_all(runs, about, folder / "frames")
    except BaseException as error:
        why = "was interrupted" if isinstance(error, KeyboardInterrupt) else f"failed ({redact(repr(error))})"
        write_index(folder, runs, status=f"{_now(f'the tour {why} while {doing}')} What follows was measured before.")
        raise
    write_index(folder, runs)

    for run in failed:
        _say(f"failed {run.notebook.name}: {run.error}")
    if about and failed:
        _say("no notebook was stored: all are, or none")
    elif about:
        for name, reasons in unstable.items():
            _say(f"stored, though unstable, {name}: {'; '.join(reasons)}")
    _say(f"{len(runs) - len(failed)} of {len(runs)} notebooks ran. Open {page}")
    return len(failed)


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _now(doing: str) -> str:
    return f"At {datetime.now():%H:%M}: {doing}."


def make_scale_photos() -> None:
    """Make whatever is missing of the photo sets for the current scale.

    Raises:
        OSError: the disk is full or not writable; the message names the folder and the remedy.
    """
    counts = {"imagenet": scale().n_photos, "camera": scale().n_camera}
    roots = {profile: make_photos(photo_root(profile), count, profile=profile) for profile, count in counts.items()}
    for line in told_of(roots):
        _say(line)


def _run(notebook: Notebook, title: str, folder: Path, thorough: bool) -> Executed:
    """Run a notebook, and write it as a page."""
    from nbconvert import HTMLExporter

    environment = {
        "TORCH_LOGS": "-torch.utils.cpp_extension",  # with nvcc but no GPU, torch.utils.benchmark logs a warning
        **os.environ,
        RESULTS_VARIABLE: str(folder / "frames"),
        "LABKIT_SCALE": scale().name,
        "TQDM_DISABLE": "1",  # no progress bars in outputs
    }
    if thorough:
        environment[THOROUGH_VARIABLE] = "1"
    with console.status(title):
        run = execute(notebook, environment=environment)
    where = {"metadata": {"path": str(notebook.path.parent)}}  # of its pictures, which the page then holds itself
    page, _ = HTMLExporter(embed_images=True).from_notebook_node(run.node, resources=where)
    write_atomic(folder / f"{notebook.name}.html", page.encode())
    _say(f"{title}: {'failed' if run.error else 'ok'}, {run.seconds:.0f} s")
    return run
