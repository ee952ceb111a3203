"""The numbered notebooks: found, described, run in fresh kernels, and copied for readers who installed a wheel."""

import asyncio
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, TypeVarTuple

from labkit.app.recording import EXTENSION_ARGUMENTS
from labkit.errors import ArgumentError, MissingFileError, OperationError, StorageError
from labkit.util.files import ScratchFolder, file_lock, read_record, write_atomic, write_record
from labkit.util.machine import NOTEBOOK_FOLDER
from labkit.util.redact import redact

if TYPE_CHECKING:
    from nbformat import NotebookNode

_INTERRUPT_TIMEOUT_S = 10.0
_Ts = TypeVarTuple("_Ts")


@dataclass(frozen=True)
class Notebook:
    """One notebook: its file, and the question and a reader's minutes from its first cell."""

    path: Path
    question: str
    minutes: str

    @property
    def name(self) -> str:
        return self.path.stem


def find_notebooks(only: str = "", folder: Path = NOTEBOOK_FOLDER) -> list[Notebook]:
    """Notebooks in order; `only` keeps those whose names start with one of its comma-separated parts.

    Raises:
        FileNotFoundError: there are no notebooks, or `only` matches none; the message lists them.
        ValueError: a file is not a notebook; names it.
    """
    paths = sorted(path for path in folder.glob("*.ipynb") if re.match(r"\d\d[a-z]?_", path.name))  # 11_, 11b_, 12_
    if not paths:
        raise MissingFileError(f"no notebooks in {folder}: install labkit again, from a clone or from a wheel")
    starts = tuple(part.strip() for part in only.split(",") if part.strip()) or ("",)
    chosen = [path for path in paths if path.stem.startswith(starts)]
    if not chosen:
        raise MissingFileError(f"no notebook begins with {only!r}: there are {', '.join(path.stem for path in paths)}")
    return [_describe(path) for path in chosen]


def _describe(path: Path) -> Notebook:
    try:  # with json: nbformat takes seconds to load, and `labkit list` should answer at once
        text = "".join(json.loads(path.read_bytes())["cells"][0]["source"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ArgumentError(
            f"{path} is not a notebook ({type(error).__name__}: {error}): repair or remove it"
        ) from error
    parts = dict(re.findall(r"\*\*(Question|Minutes)\.\*\* (\S.*)", text))
    return Notebook(path, parts.get("Question", ""), parts.get("Minutes", "?").split()[0].rstrip("."))


@dataclass
class Executed:
    """The result of running a notebook: the executed copy, its wall time, and the error, if any."""

    notebook: Notebook
    node: "NotebookNode"
    seconds: float
    error: str = ""


_CELL_TIMEOUT_S = 1200


def execute(notebook: Notebook, *, environment: Mapping[str, str] = os.environ) -> Executed:
    """Run a notebook from top to bottom in a fresh kernel, in the notebook's folder; it stops at a cell that fails.

    The kernel has a TMPDIR of its own, removed at the end: killed processes of Python and Jupyter leave files there.
    Ctrl-C ends the kernel, and is raised.

    Args:
        environment: Variables of the kernel.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    node = nbformat.read(notebook.path, as_version=4)
    client = NotebookClient(
        node, timeout=_CELL_TIMEOUT_S, kernel_name="python3", record_timing=False,
        extra_arguments=["--log-level=ERROR", *EXTENSION_ARGUMENTS], store_widget_state=False,
        resources={"metadata": {"path": str(notebook.path.parent)}},
    )  # fmt: skip
    start, error = time.perf_counter(), ""
    try:
        with ScratchFolder(gettempdir()) as temporary:
            _run_kernel(client, temporary, environment)
    except CellExecutionError as failure:
        error = redact(f"{failure.ename}: {failure.evalue}")
    except (CellTimeoutError, DeadKernelError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.perf_counter() - start
    _clean_outputs(node)
    return Executed(notebook, node, seconds, error)


def _run_kernel(client: Any, temporary: Path, environment: Mapping[str, str]) -> None:
    """Run nbclient's notebook. Ctrl-C interrupts the cell, which may clean up, ends the kernel, and is raised.

    What the kernel writes to stderr itself, such as why it crashed, is shown once it has ended; after a Ctrl-C it is
    not, since its last words are tracebacks of its own sockets.
    """
    is_interrupted = False
    try:
        with open(temporary / "stderr", "wb") as errors, asyncio.Runner(loop_factory=_Loop) as runner:
            loop = runner.get_loop()  # the runner cancels unfinished tasks at the end
            client.create_kernel_manager().connection_file = str(temporary / "kernel.json")
            variables = {**environment, "TMPDIR": str(temporary)}
            task = loop.create_task(client.async_execute(env=variables, stderr=errors))
            try:
                loop.run_until_complete(task)
            except KeyboardInterrupt:
                is_interrupted = True
                loop.set_exception_handler(lambda *about: None)  # a canceled task would report a dead kernel
                with suppress(Exception):  # the cell's own error, the interrupt; or there is no kernel yet
                    loop.run_until_complete(client.km.interrupt_kernel())
                    loop.run_until_complete(asyncio.wait_for(task, _INTERRUPT_TIMEOUT_S))
                client.shutdown_kernel = "immediate"  # if the interrupt did not end the cell
                raise
    finally:
        if not is_interrupted:
            sys.stderr.write((temporary / "stderr").read_text(errors="replace"))


def _clean_outputs(node: "NotebookNode") -> None:
    """Remove widgets, and the passwords in addresses that other libraries print: reports are shared."""
    for output in [output for cell in node.cells for output in cell.get("outputs", [])]:
        # Without a kernel, a widget is an empty box that hides the picture in the same output.
        output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
        if output.output_type == "error":
            output.evalue, output.traceback = redact(output.evalue), [redact(line) for line in output.traceback]
        elif output.output_type == "stream":
            output.text = redact(output.text)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that refuses nbclient's signal handlers: they end only the kernel, and the tour would go on."""

    def add_signal_handler(self, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        raise OperationError("the caller handles signals")  # nbclient expects this error, as outside the main thread


COPIES = Path("labkit-notebooks")
SCRIPTS = "data_scripts"  # next to the notebooks, which name it

_RECORD = ".labkit-copies.json"  # name of a copy -> digests of what labkit wrote there


def update_copies(say: Callable[[str], None], notebooks: Path = NOTEBOOK_FOLDER) -> Path:
    """Copy the wheel's notebooks, with their pictures and scripts, to `./labkit-notebooks`, or here if this is it.

    Missing copies are made, and those that the reader has not edited are replaced by newer versions. An edited copy
    stays as it is. A notebook is edited if the source of a cell differs: running it is no edit, nor is opening it in
    JupyterLab, which writes down the kernel's version.

    Args:
        say: Called with a line for each edited copy that has a newer version, and one if anything was copied.
        notebooks: The wheel's folder of notebooks, with the folder of scripts next to it.

    Returns:
        The folder of the copies, absolute.

    Raises:
        OSError: the folder cannot be written to; the message names it and the remedy.
    """
    folder = (Path() if Path(_RECORD).is_file() else COPIES).absolute()
    sources = {path.name: path for path in sorted(notebooks.iterdir()) if path.is_file()}
    scripts = sorted(notebooks.with_name(SCRIPTS).glob("*.py"))  # pip puts a __pycache__ next to them
    sources |= {f"{SCRIPTS}/{path.name}": path for path in scripts}
    sources |= {f"figures/{path.name}": path for path in sorted((notebooks / "figures").glob("*.svg"))}
    n_written = 0
    try:
        with file_lock(folder / f"{_RECORD}.lock"):
            recorded: dict[str, Any] = {}
            with suppress(ValueError):  # without its record, every copy that differs counts as edited
                recorded = read_record(folder / _RECORD) or {}
            for name, source in sources.items():
                copy, data = folder / name, source.read_bytes()
                newest, written = _digests(data), recorded.get(name)
                found = _digests(copy.read_bytes()) if copy.exists() else None
                is_own = isinstance(written, list) and found is not None and found[1:] == written[1:]
                if found is None or (is_own and newest not in (found, written)):
                    write_atomic(copy, data)
                    n_written += 1
                elif found[1] != newest[1] and written != newest:
                    say(f"{copy} has your edits and stays as it is: move it away to get the newer version")
                    continue
                recorded[name] = newest
            write_record(folder / _RECORD, recorded, indent=1)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot hold the notebooks' copies ({error}): run labkit in another folder"
        ) from error
    if n_written:
        say(f"{folder}: {n_written} files copied")
    return folder


def _digests(data: bytes) -> list[str]:
    """SHA-256 of a file, and of what a reader edits in it: of a notebook, the sources of its cells."""
    edited = data
    with suppress(ValueError, KeyError, TypeError):  # another file
        cells = json.loads(data)["cells"]
        edited = json.dumps([[cell["cell_type"], "".join(cell["source"])] for cell in cells]).encode()
    return [hashlib.sha256(part).hexdigest() for part in (data, edited)]
