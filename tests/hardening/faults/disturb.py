"""Disturb a command: by a signal, a full disk, permissions, a harmed source or a bad server."""

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.hardening.faults import bad_server, judge, sandbox
from tests.hardening.faults.commands import COMMANDS, Command
from tests.hardening.faults.launch import Child, Setting, start
from tests.hardening.faults.sources import FRAME_ROWS, copy_sources
from tests.hardening.faults.trial import Known, Place, Verdict, wait_or_kill

SIGNALS = {
    "SIGKILL": (signal.SIGKILL, "main"), "SIGTERM": (signal.SIGTERM, "main"),
    "Ctrl-C": (signal.SIGINT, "group"), "SIGINT": (signal.SIGINT, "main"), "worker SIGKILL": (signal.SIGKILL, "self"),
}  # fmt: skip
HARMS = ("remove", "truncate", "replace")


@dataclass
class Disturbance:
    """How a fault is brought about.

    moment: When, for the report. trap: For startup/sitecustomize.py; empty for none. limits: Of `Setting`.
    signal, to: Signal to the process or group. delay_s: Seconds after which to send it; None: the trap sends it.
    harms_source: A source is not what it was.
    """

    moment: str = ""
    trap: dict = field(default_factory=dict)
    limits: dict = field(default_factory=dict)
    signal: int = 0
    to: str = ""
    delay_s: float | None = None
    harms_source: bool = False


def launch(place: Place, command: Command, setting: Setting, warm: bool, one_worker: bool = False) -> Child:
    """Start a command. one_worker: without worker processes, which changes nothing but its time."""
    fill = {"src": "src", "out": "out", "server": f"http://127.0.0.1:{place.port}/"}
    arguments = command.arguments.format(**fill).split()
    if one_worker and command.local:
        arguments[-1 - arguments[::-1].index("2")] = "1"
    if command.prepare is None:
        return start(command.main, arguments, setting, warm=warm)
    return start(str(Path(__file__).with_name("prepared.py")), [command.main, *arguments], setting, warm=warm)


def run_undisturbed(place: Place, name: str, warm: bool = True) -> Known:
    """Run a command without a fault, once; later calls return the same."""
    if (name, warm) not in place.known:
        command, log = COMMANDS[name], place.root / "changes.log"
        log.unlink(missing_ok=True)
        place.make(command.sources)
        child = launch(place, command, place.setting({"on": "change", "at": 0, "log": str(log)}), warm)
        code, seconds = child.wait(command.seconds), time.monotonic() - child.started
        leftovers = place.find_leftovers(child)
        out, err = child.read_output()
        if code != 0 or leftovers:
            raise RuntimeError(f"{name} undisturbed: exit {code}, {leftovers}, {out}{err}")
        changes = log.read_text().splitlines() if log.exists() else []
        tree = place.tree()
        sizes = [len(data) for path, data in tree.items() if data is not None and path.startswith("out/")]
        n_changes = max(Counter(line.split()[0] for line in changes).values(), default=0)  # each process counts its own
        place.known[name, warm] = Known(tree, n_changes, seconds, sum(sizes), max(sizes, default=1))
    return place.known[name, warm]


def disturb(place: Place, name: str, fault: str, draw: random.Random) -> Verdict:
    """Inject one fault into a command, judge the result, run the command again and judge that result too."""
    warm, fault = not fault.endswith(" fresh"), fault.removesuffix(" fresh")
    command, known = COMMANDS[name], run_undisturbed(place, name)
    pace = known if warm else run_undisturbed(place, name, warm=False)
    place.make(command.sources)
    disturbance = _prepare(place, name, fault, pace, draw)
    child = launch(place, command, place.setting(disturbance.trap, **disturbance.limits), warm)
    code = _wait_and_signal(child, disturbance, command.seconds)
    leftovers = place.find_leftovers(child, (judge.SCRATCH,) if fault in SIGNALS else ())
    _, err = child.read_output()
    if fault.startswith("server "):
        bad_server.configure(place.port)
    happened = place.mark.exists() or not disturbance.trap or (disturbance.delay_s is not None and code != 0)
    verdict = _judge_end(code, disturbance, err, happened, command.program)
    verdict.violations += leftovers + _judge_files(place, command, known, disturbance, code)
    _restore(place, command, fault)
    verdict.violations += _judge_rerun(place, command, known, draw.random() < 0.7)
    if fault == "full disk":
        sandbox.unmount(place.work / "out")
    return verdict


def _prepare(place: Place, name: str, fault: str, pace: Known, draw: random.Random) -> Disturbance:
    """Draw the moment of a fault, and set up what does not wait for it."""
    out = place.work / "out"
    if fault in SIGNALS:
        return _prepare_signal(name, fault, pace, draw)
    if fault == "file-size limit":
        n_bytes = draw.randint(0, pace.largest - 1)
        return Disturbance(f"{n_bytes} bytes", limits={"file_bytes": n_bytes})
    if fault == "full disk":
        n_bytes = draw.randint(1, max(2, pace.n_bytes // 4096)) * 4096
        sandbox.mount_small(out, n_bytes)
        return Disturbance(f"{n_bytes} bytes")
    if fault == "unwritable":
        os.chmod(out, 0o555)
        return Disturbance(limits={"obey_permissions": True})
    if fault.startswith("server "):
        kind, _, often = fault.removeprefix("server ").partition(", ")
        skip = draw.randint(0, 2)
        bad_server.configure(place.port, kind, skip, 1 if often == "once" else -1)
        return Disturbance(f"after {skip} answers")
    return _prepare_harm(place.work / "src", fault, pace, draw)


def _prepare_harm(src: Path, fault: str, pace: Known, draw: random.Random) -> Disturbance:
    victim = draw.choice(sorted(path for path in src.rglob("*") if path.is_file()))
    if fault == "unreadable":
        os.chmod(victim, 0)
        return Disturbance(victim.name, limits={"obey_permissions": True}, harms_source=True)
    trap = {"harm": fault.removeprefix("source ")}
    if victim.parent != src:
        trap |= {"on": "read", "at": draw.randint(1, 12), "below": [str(src)], "path": None}
    else:
        trap |= {"on": "change", "at": draw.randint(1, max(1, pace.changes - 1)), "path": str(victim)}
    return Disturbance(f"{trap['on']} {trap['at']}", trap, harms_source=True)


def _prepare_signal(name: str, fault: str, pace: Known, draw: random.Random) -> Disturbance:
    """Draw when a signal comes: at a change of files, some milliseconds after one, or at a time."""
    number, to = SIGNALS[fault]
    trap = {"signal": int(number), "to": to}
    if to == "self":  # the first worker to get there: the command itself makes few changes
        event = "read" if name.startswith("collect_sizes") else "change"
        trap |= {"on": event, "at": draw.randint(1, 3), "workers": True}
        return Disturbance(f"{event} {trap['at']} of a worker", trap, to=to)
    kind = draw.choice(("change", "change", "after", "time")) if pace.changes else "time"
    if kind == "time":
        seconds = draw.uniform(0, 1.05 * pace.seconds)
        trap |= {"on": "change", "at": 0}
        return Disturbance(f"{seconds:.3f} s", trap, signal=number, to=to, delay_s=seconds)
    trap |= {"on": "change", "at": draw.randint(1, pace.changes), "delay": draw.uniform(0, 0.02 * (kind == "after"))}
    return Disturbance(f"change {trap['at']} + {1e3 * trap['delay']:.1f} ms", trap, signal=number, to=to)


def _wait_and_signal(child: Child, disturbance: Disturbance, within_s: float) -> int | None:
    if disturbance.delay_s is not None and child.wait(disturbance.delay_s) is None:
        (os.killpg if disturbance.to == "group" else os.kill)(child.pid, disturbance.signal)
    return wait_or_kill(child, within_s)


def _restore(place: Place, command: Command, fault: str) -> None:
    """Undo the fault."""
    out, src = place.work / "out", place.work / "src"
    if fault == "full disk":
        sandbox.enlarge(out)
    out.chmod(0o755)
    for path in src.rglob("*"):
        if path.suffix == ".new":
            path.unlink()
        elif path.is_file():
            path.chmod(0o644)
    if fault.startswith("source "):
        copy_sources(command.sources, place.sources, src)


def _judge_files(place: Place, command: Command, known: Known, disturbance: Disturbance, code: int | None) -> list[str]:
    """Return violations by the files of a disturbed run."""
    violations = []
    found = {path: data for path, data in place.tree().items() if not path.endswith(".new")}
    if disturbance.harms_source:
        found = {path: data for path, data in found.items() if not path.startswith("src/")}
        if code == 0:  # collect_sizes goes on, with a row that says what it could not read
            for path in [path for path in found if path.endswith(".csv")]:
                violations += judge.judge_size_rows(found.pop(path), known.tree[path])
    violations += judge.judge_files(place.work, found, known.tree, command.evolves, command.timed)
    return violations + _judge_frames(place, command)


def _judge_rerun(place: Place, command: Command, known: Known, one_worker: bool) -> list[str]:
    """Run a command again, without a fault, and return violations."""
    # What has been judged already; scratch folders are not among it, since the next run removes them.
    judged = tuple(name for name in os.listdir(place.work / "tmp") if not name.startswith(judge.SCRATCH))
    child = launch(place, command, place.setting(), warm=True, one_worker=one_worker)
    code = child.wait(command.seconds)
    violations = place.find_leftovers(child, judged)
    err = child.read_output()[1]
    if code != 0 and not (command.ready and command.ready in err):
        violations.append(f"rerun: exit {code}: {err.strip()[-300:]}")
    wrong = judge.judge_final_files(place.work, place.tree(), known.tree, command.timed)
    return violations + [f"rerun: {text}" for text in wrong] + _judge_frames(place, command)


def _judge_end(code: int | None, disturbance: Disturbance, err: str, happened: bool, program: str) -> Verdict:
    """Judge exit status and error message of a disturbed run."""
    moment, number = disturbance.moment, disturbance.signal
    if code is None:
        return Verdict(moment, judge.NO_END, err[-300:], [f"hangs: {err[-300:]}"])
    if code == 0:
        return Verdict(moment, judge.RIGHT if happened and not number else judge.LATE)
    if number:
        return Verdict(moment, judge.STOPPED, err.strip(), _judge_interruption(code, number, err))
    names = ("out/", "src/", "http://", ".jpg", ".tar", ".png")
    return Verdict(moment, judge.CLEAR, err.strip(), judge.judge_message(err, names, program))


def _judge_interruption(code: int, number: int, err: str) -> list[str]:
    end = err.strip()[-300:]
    if number != signal.SIGINT:
        return [] if code == -number else [f"exit {code} for {signal.Signals(number).name}: {end}"]
    violations = [] if code in (1, 130, -2) else [f"exit {code} for Ctrl-C: {end}"]
    if "Traceback" in err and "app()" in err:  # any other traceback is that of Python, while it starts
        violations.append(f"a traceback for Ctrl-C: {end}")
    return violations


def _judge_frames(place: Place, command: Command) -> list[str]:
    """Return what is wrong with the frames that tours have recorded."""
    violations = []
    for path in (place.work / "results").rglob("*.csv") if command.timed else ():
        if path.stem in ("10_first", "11_second"):
            violations += judge.judge_frame(path, FRAME_ROWS, path.stem)
        elif problem := judge.find_damage(path):
            violations.append(f"wrong frame: {path.name}: {problem}")
    return violations
