"""Commands that write, a fault in a run of each, and what must be so of the files, words and processes that it leaves.

Whatever happens, a file under its final name is one that an undisturbed run writes, and the same command, run again
without the fault, ends with all of them.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import labkit as lk
from tests.paths import REPO
from tests.tars import make_tar

CLEAR, STOPPED, RIGHT = "clear error", "stopped", "right all the same"
LATE, NO_END = "completed before the fault", "no end"
SIGNALS = {
    "SIGKILL": (signal.SIGKILL, "main"), "SIGTERM": (signal.SIGTERM, "main"), "Ctrl-C": (signal.SIGINT, "group"),
    "SIGINT": (signal.SIGINT, "main"), "worker SIGKILL": (signal.SIGKILL, "self"),
}  # fmt: skip

Tree = dict[str, bytes | None]  # path below the root -> contents, None for a folder

_PLACES = ("src", "out", "home/labkit")  # whose files are compared
_GRACE_S = 12.0  # torch's workers check every five seconds whether their parent lives
_LIMIT_S = 200.0
_MARKER = "LABKIT_FAULT_RUN"  # a variable that every process of a trial inherits
_SCRATCH = "labkit-scratch-"  # a folder that a killed run leaves until the next run
_TEMPORARY = re.compile(
    r"(^|/)\.[^/]*\.(partial|lock)$|(^|/)[^/]*\.parts(/|$)|(^|/)\.[^/]*\.partial/|/unfinished(/|$)|/\.extract(/|$)"
    rf"|/photos/{_SCRATCH}[^/]+/"
)


@dataclass(frozen=True)
class Command:
    """A command, and what may be said of its output.

    arguments: Separated by blanks. evolves: Pattern of JSON that has its name before its last content. ready: What
    another run says, by an error, of what is there already. Those whose name ends in "local" start workers.
    """

    name: str
    arguments: str
    evolves: str = "$."
    ready: str = ""

    @property
    def line(self) -> list[str]:
        program = self.name.split()[0]
        start = ["-m", "labkit"] if program == "labkit" else [str(REPO / "data_scripts" / f"{program}.py")]
        return [sys.executable, *start, *self.arguments.split()]

    @property
    def faults(self) -> list[str]:
        faults = [fault for fault in SIGNALS if fault != "worker SIGKILL" or self.name.endswith(" local")]
        return [*faults, "file-size limit", "unwritable"]


COMMANDS = [
    Command("make_photos", "out/set 5 --num-threads 2", r"manifest\.json$"),
    Command("make_photos local", "out/set 5 --num-threads 2 --engine local", r"manifest\.json$"),
    Command("make_depth", "out/set 1 --tar --num-workers 1"),
    Command("make_shards", "src/photos out/set --max-count 3 --seed 0 --engine threads"),
    Command("make_shards local", "src/photos.tar out/set --max-count 3 --num-workers 2"),
    Command("make_pixels", "src/photos out/set.pixels --num-workers 2"),
    Command("make_pixels local", "src/photos.tar out/set.pixels --num-workers 2 --engine local"),
    Command("extract_tars", "out/set src/photos.tar.gz"),
    Command("extract_tars local", "out/set src/photos.tar src/other.tar --num-workers 2"),
    Command("collect_sizes", "src/photos out/sizes.csv --no-caches --write-metadata-cache"),
    Command("labkit convert", "convert src/photos.tar.gz out/plain.tar", ready="exists: choose another name"),
]


@dataclass
class Verdict:
    """The result of one fault."""

    outcome: str
    moment: str = ""
    message: str = ""
    violations: list[str] = field(default_factory=list)


def make_sources(root: Path) -> Path:
    """Fill `root` with what is read: photos, and tars of them."""
    store = lk.FolderStore(lk.make_photos(root / "photos", 12, progress=False))
    files = {key: store.read(key) for key in store.keys()}  # noqa: SIM118 - a store is no dict
    make_tar(root / "photos.tar", files)
    make_tar(root / "photos.tar.gz", files, "w:gz")
    make_tar(root / "other.tar", dict(list(files.items())[:4]))
    return root


@dataclass
class Known:
    """An undisturbed run of a command: its files, how many changes of files it made, and their sizes."""

    tree: Tree
    changes: int
    sizes: list[int]


@dataclass
class Place:
    """The folder of all trials, which run one after the other; `work` is made anew for each."""

    root: Path
    sources: Path
    number: int = 0
    known: dict[str, Known] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)  # shared memory that was there before the trial

    work = property(lambda self: self.root / "work")
    mark = property(lambda self: self.root / "fault-has-happened")
    run = property(lambda self: f"{self.root.name}-{self.number}")

    def make(self) -> None:
        """Make an empty working folder with the sources."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.mark.unlink(missing_ok=True)
        shutil.copytree(self.sources, self.work / "src")
        for name in ("out", "tmp", "home"):
            (self.work / name).mkdir()
        self.number += 1
        self.segments = set(os.listdir("/dev/shm"))

    def environment(self, trap: dict | None = None) -> dict[str, str]:
        home, startup = str(self.work / "home"), Path(__file__).with_name("startup")
        fault = {"below": [str(self.work / name) for name in _PLACES], "mark": str(self.mark), **(trap or {})}
        return {
            "PATH": os.environ["PATH"], "HOME": home, "TMPDIR": str(self.work / "tmp"), "LABKIT_HOME": f"{home}/labkit",
            "PYTHONPATH": f"{startup}:{REPO}", "TQDM_DISABLE": "1", _MARKER: self.run, "PYTHONDONTWRITEBYTECODE": "1",
            **({"LABKIT_FAULT": json.dumps(fault)} if trap else {}),
        }  # fmt: skip

    def leftovers(self, session: int, others: tuple[str, ...] = ()) -> list[str]:
        """Violations by what a run has left behind, after a few seconds to end; `others` may stay in TMPDIR."""
        processes = end_processes(self.run, session, _GRACE_S)
        return judge_leftovers(processes, set(os.listdir("/dev/shm")) - self.segments, self.work / "tmp", others)


def undisturbed(place: Place, command: Command) -> Known:
    """Run a command without a fault, once; later calls return the same."""
    if command.name not in place.known:
        place.make()
        log = place.root / "changes.log"
        log.write_text("")
        code, said, wrong = run(place, command, {"at": 0, "log": str(log)})
        if code != 0 or wrong:
            raise RuntimeError(f"{command.name} undisturbed: exit {code}, {wrong}, {said}")
        tree = read_tree(place.work)
        sizes = [len(data) for path, data in tree.items() if data is not None and path.startswith("out/")]
        changes = max(Counter(log.read_text().split()).values(), default=0)  # each process counts its own
        place.known[command.name] = Known(tree, changes, sizes)
    return place.known[command.name]


def run(
    place: Place, command: Command, trap: dict | None = None, *, prepare: Callable[[], None] | None = None,
    others: tuple[str, ...] = (),
) -> tuple[int | None, str, list[str]]:  # fmt: skip
    """Run a command; returns its exit status, None if it hangs, its stderr, and violations by what it leaves behind."""
    with open(place.root / "said", "w+b") as said:
        child = subprocess.Popen(
            command.line, cwd=place.work, env=place.environment(trap), start_new_session=True, preexec_fn=prepare,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LIMIT_S)
        code = child.poll()
        child.kill()
        child.wait()
        wrong = place.leftovers(child.pid, others)
        said.seek(0)
        return code, said.read().decode(errors="replace"), wrong


def disturb(place: Place, draw: random.Random, command: Command, fault: str) -> Verdict:
    """Inject one fault into a command, judge the result, run the command again and judge that result too."""
    known = undisturbed(place, command)
    place.make()
    out, trap, options, moment = place.work / "out", None, {}, "start"
    number, to = SIGNALS.get(fault, (0, ""))
    if number:
        is_worker = fault == "worker SIGKILL"  # the first to get there; each makes few changes
        at = draw.randint(1, 3 if is_worker else known.changes)
        trap, moment = {"at": at, "workers": is_worker, "signal": int(number), "to": to}, f"change {at}"
    elif fault == "file-size limit":
        n_bytes = draw.randint(0, max(known.sizes) - 1)
        options["prepare"], moment = limit_files(n_bytes), f"{n_bytes} bytes"
    else:
        out.chmod(0o555)
        options["prepare"] = obey_permissions
    code, said, wrong = run(place, command, trap, others=(_SCRATCH,) if number else (), **options)
    verdict = judge_end(command, code, 0 if to == "self" else number, said, place.mark.exists() or not trap)
    wrong += judge_files(read_tree(place.work), known.tree, command.evolves)
    out.chmod(0o755)
    judged = tuple(name for name in os.listdir(place.work / "tmp") if not name.startswith(_SCRATCH))
    code, said, left = run(place, command, others=judged)
    if code != 0 and not (command.ready and command.ready in said):
        left.append(f"exit {code}: {said.strip()[-300:]}")
    left += judge_final_files(read_tree(place.work), known.tree)
    verdict.moment, verdict.violations = moment, verdict.violations + wrong + [f"rerun: {text}" for text in left]
    return verdict


def limit_files(n_bytes: int) -> Callable[[], None]:
    """What a program calls before it starts, so that none of its files can be larger."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


_libc = ctypes.CDLL(None)


def obey_permissions() -> None:
    """What a program calls before it starts, so that it obeys file permissions, even as root's."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        _libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def make_own_shm() -> None:
    """Give this process and its children, if that is allowed, a /dev/shm into which no other program writes."""
    if os.geteuid() == 0 and _libc.unshare(0x20000) == 0:  # CLONE_NEWNS
        for arguments in (["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", "/dev/shm"]):
            subprocess.run(["mount", *arguments], capture_output=True, check=False)


def end_processes(run: str, session: int, within_s: float) -> dict[int, str]:
    """Wait for the processes of a trial, by session or marker, to end; kill those that live on, and return them."""
    deadline = time.monotonic() + within_s
    while True:
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = os.getsid(process.pid) == session or process.environ().get(_MARKER) == run
                if is_ours and process.pid != os.getpid() and process.status() not in ("zombie", "dead"):
                    found[process.pid] = " ".join(process.cmdline())[:120]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def read_tree(root: Path) -> Tree:
    """All files and folders of a run, hidden ones too."""
    found: Tree = {}
    for path in sorted(path for place in _PLACES for path in (root / place).rglob("*")):
        is_link, name = path.is_symlink(), str(path.relative_to(root))
        found[name] = os.readlink(path).encode() if is_link else None if path.is_dir() else path.read_bytes()
    return found


def judge_end(command: Command, code: int | None, number: int, said: str, has_happened: bool) -> Verdict:
    """Judge exit status and error message of a disturbed run; `number` is that of a signal to the command."""
    end = said.strip()[-300:]
    if code is None:
        return Verdict(NO_END, violations=[f"hangs: {end}"])
    if code == 0:
        return Verdict(RIGHT if has_happened and not number else LATE)
    if not number:
        return Verdict(CLEAR, message=end, violations=judge_message(said, command.name.split()[0]))
    wrong = [] if code in ((1, 130, -2) if number == signal.SIGINT else (-number,)) else [f"exit {code}: {end}"]
    if number == signal.SIGINT and "Traceback" in said and "app()" in said:  # any other is that of Python's start
        wrong.append(f"a traceback for Ctrl-C: {end}")
    return Verdict(STOPPED, message=end, violations=wrong)


def judge_message(said: str, program: str) -> list[str]:
    """What is wrong with the stderr of a failed command: it must be one line that names a file."""
    shown = repr(said.strip()[-200:])
    if "Traceback" in said:
        return [f"a traceback: {shown}"]
    if not said.startswith(f"{program}: ") or said.count("\n") != 1:
        return [f"not one line after {program!r}: {shown}"]
    return [] if re.search(r"out/|src/|\.jpg|\.tar|\.png", said) else [f"names no file: {shown}"]


def judge_leftovers(processes: dict[int, str], segments: set[str], temporary: Path, others: tuple = ()) -> list[str]:
    """Violations by what outlived a trial: processes, shared memory, files in its temporary folder."""
    ours = sorted(name for name in segments if name.startswith(("torch_", "psm_", "sem.")))
    files = [name for name in sorted(os.listdir(temporary)) if not name.startswith(("torchinductor_", *others))]
    return [
        *(f"orphan: {command}" for command in processes.values()),
        *(f"leaked in /dev/shm: {name}" for name in ours),
        *(f"leaked in TMPDIR: {name}" for name in files),
    ]


def judge_files(found: Tree, expected: Tree, may_differ: str = "$.") -> list[str]:
    """What is wrong with the files of a disturbed run; those that match `may_differ` need only be whole JSON."""
    wrong = []
    for name, data in found.items():
        if data is None or _TEMPORARY.search(name):
            continue
        if name not in expected:
            wrong.append(f"a file that no whole run has: {name}")
        elif problem := find_damage(data) if re.search(may_differ, name) else differ(found, expected, name):
            wrong.append(f"half file under a final name: {name} ({problem})")
    return wrong


def judge_final_files(found: Tree, expected: Tree) -> list[str]:
    """What is wrong with the files of a completed run that followed a disturbed one."""
    wrong = [f"left over: {name}" for name in found.keys() - expected.keys()]
    wrong += [f"missing: {name}" for name in expected.keys() - found.keys()]
    for name in found.keys() & expected.keys():
        if problem := differ(found, expected, name):
            wrong.append(f"not as in an undisturbed run: {name} ({problem})")
    return sorted(wrong)


def differ(found: Tree, expected: Tree, name: str) -> str:
    return "" if found[name] == expected[name] else "other bytes"


def find_damage(data: bytes) -> str:
    """Why this is no JSON; "" if it is."""
    try:
        json.loads(data)
    except ValueError as error:
        return str(error)
    return ""
