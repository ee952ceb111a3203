"""The numbered notebooks: found, described, run in fresh kernels, and copied for readers who installed a wheel.

Copies are kept up to date, and never written over a reader's edits.
"""

import asyncio
import atexit
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, TypeVarTuple

from labkit.app.recording import EXTENSION_ARGUMENTS
from labkit.errors import ArgumentError, MissingFileError, OperationError, StorageError
from labkit.util.files import ScratchFolder, file_lock, read_record, write_atomic, write_record
from labkit.util.machine import NOTEBOOK_FOLDER
from labkit.util.redact import redact

if TYPE_CHECKING:
    pass


if TYPE_CHECKING:
    from nbformat import NotebookNode

_INTERRUPT_TIMEOUT_S = 10.0
_Ts = TypeVarTuple("_Ts")


@dataclass(frozen=True)
class Notebook:
    """One notebook: its file, and the question and duration from its first cell.

    `seconds` are those of its stored run: how long the cells ran, while `minutes` are a reader's.
    """

    path: Path
    question: str
    minutes: str
    seconds: float | None = None

    @property
    def name(self) -> str:
        return self.path.stem


def find_notebooks(only: str = "", folder: Path = NOTEBOOK_FOLDER) -> list[Notebook]:
    """Notebooks in order; `only` keeps those whose names start with one of its comma-separated parts.

    Raises:
        FileNotFoundError: there are no notebooks, or `only` matches none; the message lists them.
        ValueError: a file is not a notebook; names it.
    """
    paths = _numbered(folder)
    if not paths:
        raise MissingFileError(f"no notebooks in {folder}: install labkit again, from a clone or from a wheel")
    parts = tuple(part.strip() for part in only.split(",") if part.strip()) or ("",)
    chosen = [path for path in paths if path.stem.startswith(parts)]
    if not chosen:
        raise MissingFileError(f"no notebook begins with {only!r}: there are {', '.join(path.stem for path in paths)}")
    return [_describe(path) for path in chosen]


def _numbered(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.ipynb") if re.match(r"\d\d[a-z]?_", path.name))  # 11_, 11b_, 12_


def _describe(path: Path) -> Notebook:
    try:  # with json: nbformat takes seconds to load, and `labkit list` should answer at once
        node = json.loads(path.read_bytes())
        text = "".join(node["cells"][0]["source"])
        seconds = node.get("metadata", {}).get("labkit", {}).get("seconds")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ArgumentError(
            f"{path} is not a notebook ({type(error).__name__}: {error}): repair or remove it"
        ) from error
    parts = dict(re.findall(r"\*\*(Question|Minutes)\.\*\* (\S.*)", text))
    minutes = parts.get("Minutes", "?").split()[0].rstrip(".")
    return Notebook(path, parts.get("Question", ""), minutes, seconds)


@dataclass
class Executed:
    """The result of running a notebook: the executed copy, its wall time, the error, if any, and a note for readers.

    `frames` are the files that it recorded.
    """

    notebook: Notebook
    node: "NotebookNode"
    seconds: float
    error: str = ""
    note: str = ""
    frames: list[Path] = field(default_factory=list)


def execute(
    notebook: Notebook,
    *,
    environment: Mapping[str, str] = os.environ,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
    timeout_s: int = 1200,
) -> Executed:
    """Run a notebook from top to bottom in a fresh kernel, in the notebook's folder; it stops at a cell that fails.

    The kernel has a TMPDIR of its own, removed at the end: killed processes of Python and Jupyter leave files there.

    Args:
        environment: Variables of the kernel.
        on_cell: Called before each cell with its index and the number of cells.
        timeout_s: Time limit for one cell, in seconds.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    node = nbformat.read(notebook.path, as_version=4)
    client = NotebookClient(
        node, timeout=timeout_s, kernel_name="python3", record_timing=False,
        extra_arguments=["--log-level=ERROR", *EXTENSION_ARGUMENTS], store_widget_state=False,
        resources={"metadata": {"path": str(notebook.path.parent)}},
        on_cell_start=lambda cell, cell_index: on_cell(cell_index, len(node.cells)),
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
    _drop_widgets(node)
    _drop_credentials(node)
    return Executed(notebook, node, seconds, error)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that refuses nbclient's signal handlers: they end only the kernel, and the tour would go on."""

    def add_signal_handler(self, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        raise OperationError("the caller handles signals")  # nbclient expects this error, as outside the main thread


def _run_kernel(client: Any, temporary: Path, environment: Mapping[str, str]) -> None:
    """Run nbclient's notebook. Ctrl-C interrupts the cell, which may clean up, ends the kernel, and is raised."""
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:  # it cancels unfinished tasks at the end
            loop = runner.get_loop()
            client.create_kernel_manager().connection_file = str(temporary / "kernel.json")
            task = loop.create_task(client.async_execute(env={**environment, "TMPDIR": str(temporary)}))
            try:
                loop.run_until_complete(task)
            except KeyboardInterrupt:
                loop.set_exception_handler(lambda *about: None)  # a cancelled task would report a dead kernel
                with suppress(Exception):  # the cell's own error, the interrupt; or there is no kernel yet
                    loop.run_until_complete(_interrupt(client, task))
                client.shutdown_kernel = "immediate"  # if the interrupt did not end the cell
                raise
    finally:
        if client.km is None:  # the kernel has ended: after a Ctrl-C, nbclient would end it again at exit, and fail
            atexit.unregister(client._cleanup_kernel)


async def _interrupt(client: Any, task: asyncio.Task) -> None:
    await client.km.interrupt_kernel()
    await asyncio.wait_for(task, _INTERRUPT_TIMEOUT_S)


def _drop_widgets(node: "NotebookNode") -> None:
    """Remove widgets: without a kernel, they are empty boxes that hide the picture in the same output."""
    for output in outputs_of(node):
        output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)


def _drop_credentials(node: "NotebookNode") -> None:
    """Redact addresses in tracebacks and texts: other libraries print them, and reports are shared."""
    for output in outputs_of(node):
        if output.output_type == "error":
            output.evalue, output.traceback = redact(output.evalue), [redact(line) for line in output.traceback]
        elif output.output_type == "stream":
            output.text = redact(output.text)


def outputs_of(node: "NotebookNode") -> "list[NotebookNode]":
    """The outputs of all cells, in order."""
    return [output for cell in node.cells for output in cell.get("outputs", [])]


COPIES = Path("labkit-notebooks")
SCRIPTS = "data_scripts"  # beside the notebooks, which name it

_RECORD = ".labkit-copies.json"  # name of a copy -> SHA-256 of what labkit wrote there


def update_copies(say: Callable[[str], None], notebooks: Path = NOTEBOOK_FOLDER) -> Path:
    """Copy the wheel's notebooks and scripts to `./labkit-notebooks`, or to the current folder if that is what it is.

    Missing copies are made, and those that the reader has not edited are replaced by newer versions. An edited copy
    stays; its newer version is put beside it as `new-NAME`, until the reader removes that.

    Args:
        say: Called with a line for each edited copy that has a newer version, and one if anything was copied.
        notebooks: The wheel's folder of notebooks, which has the scripts' beside it.

    Returns:
        The folder of the copies, absolute.

    Raises:
        OSError: the folder cannot be written to; the message names it and the remedy.
    """
    folder = (Path() if Path(_RECORD).is_file() else COPIES).absolute()
    try:
        with file_lock(folder / f"{_RECORD}.lock"):
            copies = _Copies(folder)
            copies.update(_sources(notebooks), say)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot hold the notebooks' copies ({error}): run labkit in another folder"
        ) from error
    if copies.n_written:
        say(f"{folder}: {copies.n_written} files copied")
    return folder


def _sources(notebooks: Path) -> dict[str, Path]:
    """Name of each copy -> the wheel's file."""
    found = {path.name: path for path in sorted(notebooks.iterdir()) if path.is_file()}
    scripts = sorted(notebooks.with_name(SCRIPTS).glob("*.py"))  # pip puts a __pycache__ beside them
    return found | {f"{SCRIPTS}/{path.name}": path for path in scripts}


class _Copies:
    """The copies in a folder, and the record of what labkit wrote there."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.n_written = 0
        self.recorded: dict[str, str] = {}
        with suppress(ValueError):  # without its record, every copy that differs counts as edited
            self.recorded = read_record(folder / _RECORD) or {}

    def update(self, sources: dict[str, Path], say: Callable[[str], None]) -> None:
        for name, source in sources.items():
            if (newer := self._update_one(name, source)) is not None:
                say(f"{self.folder / name} has your edits and stays as it is; the newer version is {newer}")
        for name in self.recorded.keys() - sources.keys() - {_beside(name) for name in sources}:
            self._remove_unedited(name)  # the wheel no longer has it
        write_record(self.folder / _RECORD, self.recorded, indent=1)

    def _update_one(self, name: str, source: Path) -> Path | None:
        """The newer version's path if the reader's edits keep it from its place, and the reader has not removed it."""
        data, beside = source.read_bytes(), _beside(name)
        if self._replace_unedited(name, data):
            self._remove_unedited(beside)
            return None
        if self.recorded.get(name) == _digest(data):  # edited, and from this version
            return None
        if self.recorded.get(beside) == _digest(data) and not (self.folder / beside).exists():
            return None
        return self.folder / beside if self._replace_unedited(beside, data) else source

    def _replace_unedited(self, name: str, data: bytes) -> bool:
        """Whether the copy holds `data` now; one that the reader has edited stays."""
        path, wanted = self.folder / name, _digest(data)
        found = _digest(path.read_bytes()) if path.exists() else None
        if found not in (None, wanted, self.recorded.get(name)):
            return False
        if found != wanted:
            write_atomic(path, data)
            self.n_written += 1
        self.recorded[name] = wanted
        return True

    def _remove_unedited(self, name: str) -> None:
        path = self.folder / name
        if path.is_file() and _digest(path.read_bytes()) == self.recorded.get(name):
            path.unlink()
        self.recorded.pop(name, None)


def _beside(name: str) -> str:
    """The name of a newer version: not one of a numbered notebook, so that a tour does not run it."""
    return str(Path(name).with_name(f"new-{Path(name).name}").as_posix())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
