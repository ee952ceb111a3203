"""The place where trials run, and the run of a drill in it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.hardening.faults import judge, sandbox
from tests.hardening.faults.launch import REPO, STARTUP, Child, Setting, start
from tests.hardening.faults.sources import copy_sources

GRACE_S = 12.0  # torch's workers check every five seconds whether their parent lives
TREE = ("src", "out", "home/labkit", "results")


@dataclass
class Verdict:
    """The result of one fault."""

    moment: str = ""
    outcome: str = ""
    message: str = ""
    violations: list[str] = field(default_factory=list)


@dataclass
class Place:
    """The folder of all trials, which run one after the other. `work` is made anew for each."""

    root: Path
    sources: Path
    port: int = 0
    own_mounts: bool = False
    number: int = 0
    known: dict = field(default_factory=dict)  # results of undisturbed runs
    segments: set[str] = field(default_factory=set)  # shared memory that was there before the trial

    work = property(lambda self: self.root / "work")
    mark = property(lambda self: self.root / "fault-has-happened")
    run = property(lambda self: f"{os.getpid()}-{self.number}")

    def make(self, sources: tuple[str, ...]) -> None:
        """Make an empty working folder with some of the sources."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.mark.unlink(missing_ok=True)
        copy_sources(sources, self.sources, self.work / "src")
        for name in ("out", "tmp", "home"):
            (self.work / name).mkdir()
        self.number += 1
        self.segments = sandbox.list_shared_memory()

    def setting(self, fault: dict | None = None, **limits) -> Setting:
        """Return environment and limits of a run in this place."""
        env = {
            "PATH": os.environ["PATH"], "HOME": str(self.work / "home"), "TMPDIR": str(self.work / "tmp"),
            "LABKIT_HOME": str(self.work / "home" / "labkit"), "PYTHONPATH": f"{STARTUP}:{REPO}",
            "TQDM_DISABLE": "1", "no_proxy": "*", "NO_ALBUMENTATIONS_UPDATE": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "MPLCONFIGDIR": str(self.root / "matplotlib"), "JUPYTER_RUNTIME_DIR": str(self.work / "home" / "jupyter"),
            "IPYTHONDIR": str(self.work / "home" / "ipython"), sandbox.MARKER: self.run,
            "LABKIT_FAULT_PLACE": str(self.work / "src"), "LABKIT_FAULT_SERVER": f"http://127.0.0.1:{self.port}/",
        }  # fmt: skip
        if fault:
            below = [str(self.work / part) for part in TREE]
            env["LABKIT_FAULT"] = json.dumps({"below": below, "mark": str(self.mark), **fault})
        return Setting(self.work, env, **limits)

    def tree(self) -> judge.Tree:
        return judge.read_tree(self.work, TREE)

    def find_leftovers(self, child: Child, others: tuple[str, ...] = ()) -> list[str]:
        """Return violations by what a run has left behind, after a few seconds to end."""
        processes = sandbox.kill_leftovers(self.run, child.pid, GRACE_S)
        new = sandbox.list_shared_memory() - self.segments
        ours = {name for name in new if name.startswith(("torch_", "psm_", "sem."))}
        return judge.judge_leftovers(processes, ours, self.work / "tmp", others)


def run_drill(
    place: Place,
    sources: tuple[str, ...],
    drill: Callable[..., dict],
    moment: str,
    *,
    obey_permissions: bool = False,
    others: tuple[str, ...] = (),
) -> Verdict:
    """Run a drill in a fork. The drill judges what it reads; this function judges how its process ended."""
    place.make(sources)
    setting = place.setting(obey_permissions=obey_permissions)
    child = start(lambda: print("\n" + json.dumps(drill(place=place)), flush=True), [], setting, warm=True)
    code = wait_or_kill(child, 200)
    leftovers = place.find_leftovers(child, others)
    out, err = child.read_output()
    if code != 0:
        end = "hangs" if code is None else f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        return Verdict(moment, judge.NO_END, err[-300:], [f"the process {end}: {err.strip()[-300:]}", *leftovers])
    result = json.loads(out.strip().splitlines()[-1])
    return Verdict(moment, result["outcome"], result["message"], result["violations"] + leftovers)


@dataclass
class Known:
    """An undisturbed run of a command: the files it left, how many changes of files it made, its seconds and bytes."""

    tree: judge.Tree
    changes: int
    seconds: float
    n_bytes: int
    largest: int


def wait_or_kill(child: Child, within_s: float) -> int | None:
    """Return the exit status; kill the process and return None if it runs for longer than that."""
    code = child.wait(within_s)
    if code is None:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(time.monotonic() - child.started + 10)
    return code
