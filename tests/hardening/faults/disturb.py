"""Commands, disturbed: by signals, by a disk, by permissions, by whoever harms their source, by a server."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

from tests.hardening.faults import bad_server, judge, sandbox
from tests.hardening.faults.commands import COMMANDS, Command
from tests.hardening.faults.launch import Child, Setting, start
from tests.hardening.faults.record import LATE
from tests.hardening.faults.sources import FRAME_ROWS
from tests.hardening.faults.trial import Known, Place, Verdict, moment_of, wait_for

SIGNALS = {
    "SIGKILL": (signal.SIGKILL, "main"), "SIGTERM": (signal.SIGTERM, "main"),
    "Ctrl-C": (signal.SIGINT, "group"), "SIGINT": (signal.SIGINT, "main"), "worker SIGKILL": (signal.SIGKILL, "self"),
}  # fmt: skip
HARMS = ("remove", "truncate", "replace")


def launch(place: Place, command: Command, setting: Setting, warm: bool, alone: bool = False) -> Child:
    """Start a command in a place; alone: without workers, which changes nothing but its time."""
    fill = {"src": "src", "out": "out", "server": f"http://127.0.0.1:{place.port}/"}
    arguments = [argument.format(**fill) for argument in command.arguments]
    if alone and command.local:
        arguments[max(number for number, argument in enumerate(arguments) if argument == "2")] = "1"
    if command.prepare is None or not warm:
        main = command.main
        if command.prepare is not None:
            main, arguments = str(Path(__file__).with_name("prepared.py")), [command.main, *arguments]
        return start(main, arguments, setting, warm=warm)

    def run() -> int:
        import runpy
        import sys

        command.prepare(place.work / "src", fill["server"])
        sys.argv = [command.main, *arguments]
        runpy.run_path(command.main, run_name="__main__")
        return 0

    return start(run, [], setting, warm=True)


def undisturbed(place: Place, name: str, warm: bool = True) -> Known:
    """What a command does when nothing happens; run once."""
    if (name, warm) not in place.known:
        command, log = COMMANDS[name], place.root / "changes.log"
        log.unlink(missing_ok=True)
        place.make(command.sources)
        child = launch(place, command, place.setting({"on": "change", "at": 0, "log": str(log)}), warm)
        code, seconds = child.wait(command.seconds), time.monotonic() - child.started
        left = place.end(child, sandbox.shared_memory())
        out, err = child.said()
        if code != 0 or left:
            raise RuntimeError(f"{name} undisturbed: exit {code}, {left}, {out}{err}")
        changes = log.read_text().splitlines() if log.exists() else []
        tree = place.tree()
        sizes = [len(data) for path, data in tree.items() if data is not None and path.startswith("out/")]
        n_changes = max(Counter(line.split()[0] for line in changes).values(), default=0)  # a process counts its own
        place.known[name, warm] = Known(tree, n_changes, seconds, sum(sizes), max(sizes, default=1))
    return place.known[name, warm]


def disturb(place: Place, name: str, fault: str, draw: random.Random) -> Verdict:
    """One fault in a command, and what became of it."""
    warm = not fault.endswith(" fresh")
    fault = fault.removesuffix(" fresh")
    command = COMMANDS[name]
    known = undisturbed(place, name)
    pace = known if warm else undisturbed(place, name, warm=False)
    place.make(command.sources)
    before = sandbox.shared_memory()
    trap, seconds, number, to, limits, moment = {}, None, 0, "", {}, ""
    out, src = place.work / "out", place.work / "src"
    victim = None
    if fault in SIGNALS:
        number, to = SIGNALS[fault]
        trap, seconds, moment = moment_of(pace, draw, delay=to != "self")
        trap |= {"signal": int(number), "to": to}
        if to == "self":  # whoever of the workers is first: the command itself makes few changes
            event = "read" if name.startswith("collect_sizes") else "change"  # what they do
            trap |= {"on": event, "at": draw.randint(1, 3), "workers": True}
            moment = f"{event} {trap['at']} of a worker"
    elif fault == "file-size limit":
        limits = {"file_bytes": draw.randint(0, known.largest - 1)}
        moment = f"{limits['file_bytes']} bytes"
    elif fault == "full disk":
        room = draw.randint(1, max(2, known.n_bytes // 4096)) * 4096
        sandbox.mount_small(out, room)
        moment = f"{room} bytes"
    elif fault == "unwritable":
        limits = {"bound": True}
        os.chmod(out, 0o555)
    elif fault == "unreadable":
        limits = {"bound": True}
        victim = _victim(src, draw)
        moment = victim.name
        os.chmod(victim, 0)
    elif fault.startswith("source "):
        victim = _victim(src, draw)
        harm = fault.removeprefix("source ")
        if victim.parent != src:
            trap = {"on": "read", "at": draw.randint(1, 12), "harm": harm, "below": [str(src)], "path": None}
        else:
            at = draw.randint(1, max(1, pace.changes - 1))
            trap = {"on": "change", "at": at, "harm": harm, "path": str(victim)}
        moment = f"{trap['on']} {trap['at']}"
    elif fault.startswith("server "):
        kind, _, often = fault.removeprefix("server ").partition(", ")
        skip = draw.randint(0, 2)
        bad_server.tell(place.port, kind, skip, 1 if often == "once" else -1)
        moment = f"after {skip} answers"

    child = launch(place, command, place.setting(trap or None, **limits), warm)
    code = wait_for(child, seconds, number, to, command.seconds)
    wrong = place.end(child, before, (judge.SCRATCH,) if fault in SIGNALS else ())
    said = child.said()
    if fault.startswith("server "):
        bad_server.tell(place.port)
    fired = place.mark.exists() or not trap or (seconds is not None and code != 0)
    found = place.tree()
    for path in [path for path in found if path.endswith(".new")]:
        del found[path]
    verdict = _ended(code, number if fault in SIGNALS and to != "self" else 0, said, fired, command, fault)
    verdict.moment = moment
    verdict.violations += wrong
    harmed = fault.startswith("source ") or fault == "unreadable"
    judged = {path: data for path, data in found.items() if not (harmed and path.startswith("src/"))}
    if harmed and code == 0:  # who lists sizes goes on, with a row that says what could not be read
        for path in [path for path in judged if path.endswith(".csv")]:
            verdict.violations += judge.wrong_rows(judged.pop(path), known.tree[path])
    verdict.violations += judge.after_fault(place.work, judged, known.tree, command.evolves, command.timed)
    if command.timed:
        verdict.violations += frames_of(place)
    # Put right, and run again.
    if fault == "full disk":
        sandbox.enlarge(out)
    os.chmod(out, 0o755)
    _restore(place, command, victim, fault)
    # Judged already; the next run sweeps scratch folders.
    there = tuple(name for name in os.listdir(place.work / "tmp") if not name.startswith(judge.SCRATCH))
    again = launch(place, command, place.setting(), warm=True, alone=draw.random() < 0.7)
    code = again.wait(command.seconds)
    wrong = place.end(again, before, there)
    said = again.said()
    if code != 0 and not (command.ready and command.ready in said[1]):
        wrong.append(f"rerun: exit {code}: {said[1].strip()[-300:]}")
    wrong += [f"rerun: {text}" for text in judge.after_rerun(place.work, place.tree(), known.tree, command.timed)]
    if command.timed:
        wrong += frames_of(place)
    verdict.violations += wrong
    if fault == "full disk":
        sandbox.unmount(out)
    return verdict


def _victim(src: Path, draw: random.Random) -> Path:
    files = sorted(path for path in src.rglob("*") if path.is_file())
    return draw.choice(files)


def _restore(place: Place, command: Command, victim: Path | None, fault: str) -> None:
    if victim is None:
        return
    src = place.work / "src"
    for name in command.sources:
        origin = place.sources / name
        files = [path for path in origin.rglob("*") if path.is_file()] if origin.is_dir() else [origin]
        for file in files:
            target = src / file.relative_to(place.sources)
            os.chmod(target, 0o644) if target.exists() else None
            if fault != "unreadable":
                shutil.copy2(file, target)
    for path in src.rglob("*.new"):
        path.unlink()


def _ended(code: int | None, number: int, said: tuple[str, str], fired: bool, command: Command, fault: str) -> Verdict:
    """What the end of the disturbed run says."""
    name = "labkit" if command.main.endswith("__main__.py") else Path(command.main).stem
    err = said[1]
    if code is None:
        return Verdict("", "no end", err[-300:], [f"hangs: {err[-300:]}"])
    if code == 0:
        same = fault == "worker SIGKILL" or number == 0
        return Verdict("", "right all the same" if fired and same else LATE, "")
    if number:
        return _interrupted(code, number, err, name)
    names = ("out/", "src/", "http://", ".jpg", ".tar", ".png")
    return Verdict("", "clear error", err.strip(), judge.unclear(err, names, name))


def _interrupted(code: int, number: int, err: str, name: str) -> Verdict:
    verdict = Verdict("", "stopped", err.strip())
    if number == signal.SIGINT:
        if code not in (1, 130, -2):
            verdict.violations.append(f"exit {code} for Ctrl-C: {err.strip()[-300:]}")
        if "Traceback" in err and "app()" in err:  # else Python itself, which was only starting
            verdict.violations.append(f"a traceback for Ctrl-C: {err.strip()[-300:]}")
    elif code != -number:
        verdict.violations.append(f"exit {code} for {signal.Signals(number).name}: {err.strip()[-300:]}")
    return verdict


def frames_of(place: Place) -> list[str]:
    """What is wrong with the frames that tours have recorded."""
    wrong = []
    for path in (place.work / "results").rglob("*.csv"):
        if path.stem in ("10_first", "11_second"):
            wrong += judge.wrong_frame(path, FRAME_ROWS, path.stem)
        elif problem := judge.unreadable(path):
            wrong.append(f"wrong frame: {path.name}: {problem}")
    return wrong
