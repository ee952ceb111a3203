"""The command line: `python -m labkit`. Each command imports what it needs, so that `labkit list` answers at once."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from labkit import __version__
from labkit.app.commands import (
    Argument,
    Option,
    Parser,
    call,
    end_unprinted,
    one_line_errors,
    say,
    split_program,
    summary,
)
from labkit.app.site import site
from labkit.errors import ArgumentError, MissingLibraryError, StorageError
from labkit.util.machine import is_labkits, missing_library
from labkit.util.process import print_utf8

COMMANDS: dict[str, Callable[..., Any]] = {}


def _command(name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the command of its name, or of another one."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        COMMANDS[name or function.__name__] = function
        return function

    return add


def main(words: Sequence[str] | None = None) -> None:
    """Run the command of the command line."""
    print_utf8()
    words = [*(sys.argv[1:] if words is None else words)]
    parsed = parse(words)
    with end_unprinted("labkit"), one_line_errors("labkit", MissingLibraryError):
        try:
            call(parsed)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except ModuleNotFoundError as error:
            if not is_labkits(error):
                raise
            name = words[0]
            raise missing_library(f"labkit {name}", _EXTRAS.get(name, "lab"), error) from None


_EXTRAS = {"diagnose": "loaders", "convert": "loaders", "peers": "peers"}  # of those of other commands: lab


def parse(words: Sequence[str]) -> Namespace:
    """Read a command line; what is wrong with it is said in one line, with exit code 2."""
    name, *rest = words = [*words] or ["--help"]
    given: list[str] = []
    if name == "watch":
        words, given = _split_watch(rest)
    elif name == "diagnose" and "--" in rest:
        words, given = words[: words.index("--")], words[words.index("--") + 1 :]
    parsed = command_line().parse_args(words)
    if given:
        parsed.arguments = given
    return parsed


def command_line() -> Parser:
    """The parser of all commands."""
    described = "How image data reaches a GPU in PyTorch, measured one step at a time."
    parser = Parser(prog="labkit", description=described)
    parser.add_argument("--version", action="version", version=f"labkit {__version__}", help="Show labkit's version.")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=summary(function), description=summary(function)).add(function)
    return parser


def _split_watch(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command with its own options and the script, and the arguments of the script."""
    with one_line_errors("labkit watch", ArgumentError):
        try:
            own, program = split_program(watch, rest)
        except ArgumentError as error:
            raise ArgumentError(f"{error}: write those of the script after its name") from None
    return ["watch", *own, *program[:1]], program[1:]


def _set_scale(name: str) -> str:
    from labkit.util.machine import scale

    if name:
        os.environ["LABKIT_SCALE"] = name
    with one_line_errors("labkit", ValueError):
        scale()
    return name


def _set_photos(folder: str) -> str:
    from labkit.util.machine import OWN_PHOTOS_VARIABLE

    if folder:
        os.environ[OWN_PHOTOS_VARIABLE] = os.path.abspath(os.path.expanduser(folder))
    return folder


_PHOTOS_HELP = "A folder of JPEGs of your own, at any depth, for the notebooks (default: LABKIT_PHOTOS, else made)."
_Photos = Annotated[str, Option(help=_PHOTOS_HELP, check=_set_photos)]
_SCALE_HELP = "Size of the experiments: ci, laptop or gpu (default: LABKIT_SCALE, else laptop)."
_Scale = Annotated[str, Option(help=_SCALE_HELP, check=_set_scale)]


@_command()
def tour(
    scale: _Scale = "",
    only: Annotated[str, Option(help="Notebooks to run, by the start of their names: 00,02.")] = "",
    photos: _Photos = "",
    thorough: Annotated[bool, Option(flag="--thorough", help="Narrower intervals, in more time.")] = False,
    store: Annotated[
        bool, Option(flag="--store", help="Write all notebooks and results back, or none; thorough.")
    ] = False,
) -> None:
    """Make the photos, run every notebook in a fresh kernel, and write results/<env_id>/index.html."""
    from labkit.app.tour import run_tour

    with one_line_errors("labkit", OSError, ValueError):
        failed = run_tour(only=only, thorough=thorough, store_outputs=store)
    raise SystemExit(1 if failed else 0)


@_command("list")
def list_notebooks() -> None:
    """List the notebooks in order, each with the question it answers."""
    from labkit.app.notebooks import find_notebooks

    with one_line_errors("labkit", FileNotFoundError, ValueError):
        notebooks = find_notebooks()
    for notebook in notebooks:
        say(f"{notebook.name:<22} {notebook.minutes:>3} min  {notebook.question}")


@_command()
def doctor(scale: _Scale = "") -> None:
    """Show what this machine offers, and what is missing."""
    from labkit.app.doctor import findings

    for subject, finding in findings():
        say(f"{subject:<24} {finding}")


@_command()
def peers(
    classes: Annotated[
        str, Option(flag="--class", help="What is read and delivered, comma-separated, or `all`; --list names them.")
    ] = "",
    own: Annotated[str, Option(metavar="FOLDER", help="Your own photos instead.")] = "",
    only: Annotated[str, Option(help="Names of peers, comma-separated; labkit's own loaders always run.")] = "",
    scale: _Scale = "",
    rounds: Annotated[int, Option(help="Measured rounds (default: set by the scale).")] = 0,
    list_only: Annotated[bool, Option(flag="--list", help="Only list which peers are installed.")] = False,
) -> None:
    """Compare labkit with other loaders; write results/<env_id>/peers-<class>.csv and .png."""
    from labkit.app.recording import record_to_results_folder
    from labkit.errors import HostError
    from labkit.peers.command import list_peers, run_peers
    from labkit.peers.peer import CLASSES, PROFILES
    from labkit.util.arguments import require_choice

    if list_only:
        list_peers()
        return
    record_to_results_folder()
    chosen, names = ([part.strip() for part in text.split(",") if part.strip()] for text in (classes, only))
    if chosen == ["all"]:
        chosen = [name for name in CLASSES if name not in PROFILES]
    with one_line_errors("labkit", OSError, ValueError, HostError):
        if own and chosen:
            raise ArgumentError(f"--own reads your photos, and --class {classes} others: pass one of them")
        for name in [require_choice("--class", name, CLASSES) for name in chosen] or ["imagenet"]:
            run_peers(name, own=own, only=names, rounds=rounds or None)


@_command()
def diagnose(
    training: Annotated[
        str, Argument(metavar="MODULE:FUNCTION", help="A function with no arguments that returns (loader, step).")
    ],
    arguments: Annotated[
        list[str] | None, Argument(metavar="-- ARGUMENTS", help="Arguments for the script's own command line.")
    ] = None,
    batches: Annotated[int, Option(help="Batches per measured part of a round.")] = 20,
    rounds: Annotated[int, Option(help="Number of measured rounds.")] = 3,
    limit: Annotated[float, Option(help="Approximate time limit, in seconds.")] = 100.0,
    verbose: Annotated[bool, Option(flag="--verbose", help="Print all that the report says.")] = False,
) -> None:
    """Show whether a training waits for data, for which part, and what to change first."""
    from labkit.errors import CannotDiagnose
    from labkit.watching.diagnose import diagnose as find_stalls, made_training

    with one_line_errors("labkit", CannotDiagnose):  # an error of the training itself keeps its traceback
        loader, step = made_training(training, arguments or [])
        found = find_stalls(loader, step, batches=batches, rounds=rounds, limit_s=limit)
    for line in [repr(found), *found.details] if verbose else [repr(found)]:
        say(line)


@_command()
def watch(
    script: Annotated[str, Argument(metavar="SCRIPT", help="A training script, or after -m a module's name.")],
    arguments: Annotated[list[str] | None, Argument(metavar="[ARGUMENTS]", help="Its own arguments.")] = None,
    module: Annotated[bool, Option(flag="-m", help="Run a module, as `python -m` does.")] = False,
    steps: Annotated[int, Option(least=0, help="Report after this many batches (default: at the end).")] = 0,
    replay: Annotated[
        bool, Option(flag="--replay", help="Measure the ceiling by repeating batches; no training.")
    ] = False,
    end: Annotated[bool, Option(flag="--end", help="End the script after --steps, before it saves anything.")] = False,
    json: Annotated[str, Option(help="File for the figures.")] = "",
    html: Annotated[str, Option(help="File for a page with the timeline.")] = "",
    stall: Annotated[
        float, Option(least=0, help="Seconds without a batch until it says what the script hangs in; 0: never.")
    ] = 60.0,
    budget: Annotated[
        str, Option(help="Share that may not be exceeded, as waiting=5%: the exit status is then 3.")
    ] = "",
    lines: Annotated[bool, Option(help="Sample which lines the time goes into (default: yes).")] = True,
    verbose: Annotated[bool, Option(flag="--verbose", help="Print all that the report says, and its tables.")] = False,
) -> None:
    """Run an unchanged training script, and show what it waited for."""
    from labkit.util.arguments import REPORT_BEGINNINGS
    from labkit.util.files import check_own_file
    from labkit.watching.diff import parse_budget
    from labkit.watching.program import WatchOptions, run_watched

    program = [*(["-m"] if module else []), script, *(arguments or [])]
    with one_line_errors("labkit", ValueError):
        shares = parse_budget(budget)
        for name, path in (("json", json), ("html", html)):
            if path:
                check_own_file(path, REPORT_BEGINNINGS[name], what=f"{name} of labkit watch")
    if find_spec("torch") is None:
        raise missing_library("labkit watch", "", ModuleNotFoundError(name="torch"))
    run_watched(program, WatchOptions(steps, end, replay, json, html, stall, shares, lines, verbose))


@_command("diff")
def compare_watches(
    before: Annotated[str, Argument(metavar="BEFORE", help="What `labkit watch --json` wrote of one run.")],
    after: Annotated[str, Argument(metavar="AFTER", help="And of another.")],
) -> None:
    """Show what became faster or slower between two watched runs, and what else differs."""
    from labkit.watching.diff import compare_runs

    with one_line_errors("labkit", OSError, ValueError):
        lines = compare_runs(before, after)
    for line in lines:
        say(line)


_command()(site)


@_command()
def claims(scale: _Scale = "") -> None:
    """Check published claims against what tours have found on this machine, else against the stored run."""
    from shutil import get_terminal_size

    from labkit.course.ledger import claims as judged, lines_of

    with one_line_errors("labkit", OSError, ValueError):
        table = judged()
    for line in lines_of(table, get_terminal_size((100, 24)).columns):
        say(line)


@_command()
def convert(
    source: Annotated[
        str, Argument(metavar="SRC", help="Compressed tar: .tar.gz, .tar.bz2, .tar.xz. For tiles: images.")
    ],
    target: Annotated[str, Argument(metavar="DST", help="Plain tar to write; it must not exist yet. Or a folder.")],
    to: Annotated[str, Option(help="tar, or tiles: JPEGs of which crops are read alone.")] = "tar",
    short_side: Annotated[int | None, Option(help="Of tiles: make the shorter side so many pixels.")] = None,
    quality: Annotated[int | None, Option(help="Of JPEGs made small, 1 to 100 (default: 90).")] = None,
) -> None:
    """Decompress a tar to a plain one, which TarStore reads in any order; or tile the JPEGs of a folder, tar or URL."""
    from labkit.util.arguments import require_choice

    with one_line_errors("labkit", OSError, ValueError, RuntimeError):
        if require_choice("to", to, ("tar", "tiles")) == "tar":
            from labkit.data.tar_stream import convert_tar

            if (short_side, quality) != (None, None):
                raise ArgumentError("--short-side and --quality are for JPEGs: pass --to tiles with them")
            path = convert_tar(source, target)
            said = f"{path}: {path.stat().st_size} bytes"
        else:
            from json import loads

            from labkit.data.tiles import DAMAGED, MANIFEST, tile_jpegs

            path = tile_jpegs(source, target, short_side=short_side, quality=quality)
            record = loads((path / MANIFEST).read_bytes())
            said = f"{path}: {record['n_tiled']} tiled, {len(record['copied'])} copied as they are (see {MANIFEST})"
            if damaged := [key for key, reason in record["copied"].items() if reason.startswith(DAMAGED)]:
                said += f"; {len(damaged)} of these damaged, such as {damaged[0]}"
    say(said)


@_command()
def lab(
    port: Annotated[int, Option(help="Port of JupyterLab.")] = 8888,
    photos: _Photos = "",
    browser: Annotated[bool, Option(help="Open it in a browser, or only print its address.")] = True,
) -> None:
    """Open JupyterLab with the notebooks (on this machine only, behind its token); its runs are kept in results/."""
    from labkit.app import jupyter as lab_server
    from labkit.app.notebooks import find_notebooks, update_copies
    from labkit.app.recording import REMEDY
    from labkit.app.tour import make_scale_photos
    from labkit.measure.recorder import RESULTS_VARIABLE
    from labkit.util.files import check_writable
    from labkit.util.machine import IS_CLONE, NOTEBOOK_FOLDER, env_id, own_photos

    with one_line_errors("labkit", OSError, ValueError):
        folder = NOTEBOOK_FOLDER if IS_CLONE else update_copies(say)
        if own_photos():  # here, since what is left out is named on the terminal
            make_scale_photos()
    results = os.environ.setdefault(RESULTS_VARIABLE, os.path.abspath(os.path.join("results", env_id(), "frames")))
    try:
        check_writable(Path(results).expanduser(), REMEDY)
    except StorageError as error:  # a reader can do without
        say(f"labkit: no result will be kept: {error}", to_stderr=True)

    # -P: modules in the file's folder must not hide others. --ip: a configuration may have another address.
    command = [sys.executable, "-P", lab_server.__file__, "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/{find_notebooks()[0].path.name}"]
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(sys.executable, command)  # noqa: S606 - not a child process: ending this command ends JupyterLab
