"""One fault: a place made ready, a run disturbed, what is left judged, and the rerun judged too."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.hardening.faults import judge, sandbox
from tests.hardening.faults.launch import REPO, STARTUP, Child, Setting, start
from tests.hardening.faults.sources import copy_sources

GRACE_S = 12.0  # torch's workers look for their parent every five seconds
TREE = ("src", "out", "home/labkit", "results")


@dataclass
class Verdict:
    """What came of one fault."""

    moment: str = ""
    outcome: str = ""
    message: str = ""
    violations: list[str] = field(default_factory=list)


@dataclass
class Place:
    """Where trials run, one after the other, always under the same path. `work` is made anew for each."""

    root: Path
    sources: Path
    port: int = 0
    own_mounts: bool = False
    number: int = 0
    known: dict = field(default_factory=dict)  # what undisturbed runs gave

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def mark(self) -> Path:
        return self.root / "fault-has-happened"

    def make(self, sources: tuple[str, ...]) -> None:
        """An empty place with some of the sources."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.mark.unlink(missing_ok=True)
        copy_sources(sources, self.sources, self.work / "src")
        for name in ("out", "tmp", "home"):
            (self.work / name).mkdir()
        self.number += 1

    def setting(self, fault: dict | None = None, **limits) -> Setting:
        """Environment of a run in this place."""
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

    @property
    def run(self) -> str:
        return f"{os.getpid()}-{self.number}"

    def tree(self) -> judge.Tree:
        return judge.tree_of(self.work, TREE)

    def end(self, child: Child, before: set[str], others: tuple[str, ...] = ()) -> list[str]:
        """Violations by what a run has left behind, after a few seconds to go."""
        left = sandbox.left_behind(self.run, child.pid, GRACE_S)
        segments = {name for name in sandbox.shared_memory() - before if name.startswith(("torch_", "psm_", "sem."))}
        return judge.left_over(left, segments, self.work / "tmp", others)


def drill(
    place: Place,
    sources: tuple[str, ...],
    function: Callable[[Path], None],
    *,
    bound: bool = False,
    others: tuple[str, ...] = (),
) -> Verdict:
    """Run a drill in a fork; it judges what it reads itself, here is judged how it ended."""
    place.make(sources)
    before = sandbox.shared_memory()
    child = start(lambda: function(place.work), [], place.setting(bound=bound), warm=True)
    code = child.wait(200)
    if code is None:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(210)
    left = place.end(child, before, others)
    out, err = child.said()
    if code != 0:
        ended = "hangs" if code is None else f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        return Verdict("", "no end", err[-300:], [f"the process {ended}: {err.strip()[-300:]}", *left])
    result = json.loads(out.strip().splitlines()[-1])
    return Verdict("", result["outcome"], result["message"], result["violations"] + left)


@dataclass
class Known:
    """An undisturbed run of a command: what it left, the changes of files that it made, its seconds and bytes."""

    tree: judge.Tree
    changes: int
    seconds: float
    n_bytes: int
    largest: int


def moment_of(known: Known, draw: random.Random, delay: bool) -> tuple[dict, float | None, str]:
    """When a fault happens: at a change of files, some milliseconds after one, or at a time."""
    kind = draw.choice(("change", "change", "after", "time")) if delay else "change"
    kind = kind if known.changes else "time"  # a command that writes nothing
    if kind == "time":
        seconds = draw.uniform(0, 1.05 * known.seconds)
        return {"on": "change", "at": 0}, seconds, f"{seconds:.3f} s"
    at = draw.randint(1, max(1, known.changes))
    after = draw.uniform(0, 0.02) if kind == "after" else 0
    said = f"change {at}" + (f" + {1e3 * after:.1f} ms" if after else "")
    return {"on": "change", "at": at, "delay": after}, None, said


def wait_for(child: Child, seconds: float | None, number: int, to: str, limit: float) -> int | None:
    """Let a run come to its end, after a signal at a time if one is wanted. None: it does not come to it."""
    if seconds is not None and child.wait(seconds) is None:
        (os.killpg if to == "group" else os.kill)(child.pid, number)
    code = child.wait(limit)
    if code is None:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(time.monotonic() - child.started + 10)
    return code
