"""Which faults are injected into what, and in which order."""

import random
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count as count_up, islice, product
from typing import Any, NamedTuple

from tests.hardening.faults import bad_server, drills, loader_drills, net_drills
from tests.hardening.faults.commands import COMMANDS, Command
from tests.hardening.faults.disturb import HARMS, SIGNALS, disturb
from tests.hardening.faults.trial import Place, Verdict, run_drill

_DEATHS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGBUS": signal.SIGBUS, "OSError": 0}

_DOWNLOAD_FAULTS = [
    f"server {kind}, {often}"
    for kind, often in product(bad_server.KINDS, ("once", "always"))
    if kind not in ("no range", "other range")
]


class Injection(NamedTuple):
    """A case, a fault, and the function that runs them. every: run in every n-th round only; slow ones come seldom."""

    case: str
    fault: str
    run: Callable[[Place, random.Random], Verdict]
    every: int = 1


def iter_injections(place: Place, count: int, pattern: str = "") -> Iterator[Injection]:
    """Yield `count` injections whose 'case / fault' matches the pattern: the whole plan, round after round."""
    plan = [*_plan_commands(place), *_plan_readings(), *_plan_servers(), *_plan_loaders()]
    random.Random(0).shuffle(plan)  # so that any part of a run has all kinds
    plan = [injection for injection in plan if re.search(pattern, f"{injection.case} / {injection.fault}")]
    repeated = (injection for turn in count_up() for injection in plan if turn % injection.every == 0)
    yield from islice(repeated, count if plan else 0)


def _plan_commands(place: Place) -> Iterator[Injection]:
    for name, command in COMMANDS.items():
        every = 4 if command.timed else 1
        for fault in _command_faults(name, command, place):
            yield Injection(name, fault, partial(disturb, name=name, fault=fault), every)


def _command_faults(name: str, command: Command, place: Place) -> list[str]:
    faults = [fault for fault in SIGNALS if fault != "worker SIGKILL" or command.local]
    if not command.local and name != "labkit tour --only 00":
        faults += ["SIGKILL fresh", "SIGTERM fresh", "Ctrl-C fresh"]
    if command.timed:
        return faults
    faults += ["file-size limit", "unwritable"] + ["full disk"] * place.own_mounts
    if name == "download":
        return faults + _DOWNLOAD_FAULTS
    harms = HARMS[1:2] if command.local else HARMS
    return faults + ["unreadable", *(f"source {harm}" for harm in harms)] * bool(command.sources)


def _plan_drill(
    drill: Callable[..., drills.Result],
    sources: tuple[str, ...],
    moment: str,
    moments: range = range(12),
    **options: Any,
) -> Callable[[Place, random.Random], Verdict]:
    """Return a function that draws the moment and runs the drill then."""

    def run(place: Place, draw: random.Random) -> Verdict:
        at = draw.choice(moments)
        return run_drill(place, sources, partial(drill, at=at), moment.format(at), **options)

    return run


def _plan_readings() -> Iterator[Injection]:
    for (name, reading), how in product(drills.READINGS.items(), (*HARMS, "unreadable")):
        drill = partial(drills.drill_reading, reading, how)
        run = _plan_drill(drill, (reading.source,), "item {}", obey_permissions=True)
        yield Injection(name, f"source {how}", run)


def _plan_servers() -> Iterator[Injection]:
    for client, kind, times in product(net_drills.CLIENTS, bad_server.KINDS, (1, -1)):
        # No client can tell that a shorter listing page, with a matching length, is not the whole page.
        moments = range(5 if kind == "short" and "HTTP" in client.upper() else 0, 12)
        run = _plan_drill(partial(net_drills.drill_server, client, kind, times), (), "after {} answers", moments)
        yield Injection(client, f"server {kind}, {'once' if times == 1 else 'always'}", run)


def _plan_loaders() -> Iterator[Injection]:
    for (death, number), loader in product(_DEATHS.items(), loader_drills.LOADERS):
        if loader != "make_loader between epochs" or number:
            yield from _plan_worker_deaths(loader, death, int(number))
    samples = range(loader_drills.N)
    for (death, number), name in product(_DEATHS.items(), loader_drills.TOOLS):
        drill = partial(loader_drills.TOOLS[name], int(number))
        yield Injection(name, f"worker {death}", _plan_drill(drill, ("shards",), "sample {}", samples))
    run = _plan_drill(loader_drills.drill_threads, ("photos",), "read {}", range(1, 13))
    yield Injection("BatchLoader of a folder", "thread OSError", run)


def _plan_worker_deaths(loader: str, death: str, number: int) -> Iterator[Injection]:
    methods = ("fork", "spawn", "forkserver") if death in ("SIGKILL", "OSError") else ("fork",)
    # A killed worker of torch's own loader leaves Python's sockets in TMPDIR: not labkit's to remove.
    others = ("pymp-", "tmp") if loader == "DataLoader of shards" else ()
    for method, persistent in product(methods, (False, True) if loader == "make_loader" else (True,)):
        drill = partial(loader_drills.drill_loader, loader, method, persistent, number)
        run = _plan_drill(drill, ("shards",), "sample {}", range(loader_drills.N), others=others)
        case = f"{loader} {method}" + (" persistent" if persistent else "")
        yield Injection(case, f"worker {death}", run, 1 if method == "fork" else 3)
