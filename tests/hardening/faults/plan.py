"""Which faults are injected into what, in which order."""

import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from tests.hardening.faults import bad_server, drills, loader_drills, net_drills
from tests.hardening.faults.commands import COMMANDS
from tests.hardening.faults.disturb import HARMS, SIGNALS, disturb
from tests.hardening.faults.trial import Place, Verdict, drill


class Injection(NamedTuple):
    """A case, a fault, and what does both. every: In which rounds through the plan: dear ones come seldom."""

    case: str
    fault: str
    run: Callable[[Place, random.Random], Verdict]
    every: int = 1


def plan(place: Place) -> list[Injection]:
    """All pairs of case and fault that this machine allows."""
    found = [*_commands(place), *_readings(), *_servers(), *_loaders()]
    random.Random(0).shuffle(found)  # so that any stretch of the record has all kinds
    return found


def drawn(place: Place, count: int, wanted: Callable[[Injection], bool]) -> Iterator[Injection]:
    """`count` injections: the plan, round after round."""
    pairs, number, turn = [pair for pair in plan(place) if wanted(pair)], 0, 0
    while pairs and number < count:
        for pair in pairs:
            if turn % pair.every == 0 and number < count:
                yield pair
                number += 1
        turn += 1


def _commands(place: Place) -> Iterator[Injection]:
    for name, command in COMMANDS.items():
        dear = 4 if command.timed else 1
        faults = [fault for fault in SIGNALS if fault != "worker SIGKILL" or command.local]
        if not command.timed:
            faults += ["file-size limit", "unwritable", *(["full disk"] if place.own_mounts else [])]
            if command.sources and name != "download":
                faults += ["unreadable", *(f"source {harm}" for harm in (HARMS[1:2] if command.local else HARMS))]
        if name == "download":
            kinds = set(bad_server.KINDS) - {"no range", "other range"}
            faults += [f"server {kind}, {often}" for kind in sorted(kinds) for often in ("once", "always")]
        for fault in faults:
            yield Injection(name, fault, partial(disturb, name=name, fault=fault), dear)
        if not command.local and name != "labkit tour --only 00":
            for fault in ("SIGKILL", "SIGTERM", "Ctrl-C"):
                fresh = f"{fault} fresh"
                yield Injection(name, fresh, partial(disturb, name=name, fault=fresh), dear)


def _readings() -> Iterator[Injection]:
    for name, reading in drills.READINGS.items():
        for harm in (*HARMS, "unreadable"):

            def run(place: Place, draw: random.Random, reading=reading, harm=harm) -> Verdict:
                at = draw.randrange(0, 12)
                act = partial(drills.drill_reading, reading, harm, at)
                return _at(drill(place, reading.sources, act, bound=True), f"item {at}")

            yield Injection(name, f"source {harm}", run)


def _servers() -> Iterator[Injection]:
    for client in net_drills.CLIENTS:
        for kind in bad_server.KINDS:
            for times in (1, -1):

                def run(place: Place, draw: random.Random, client=client, kind=kind, times=times) -> Verdict:
                    # A listing page that is shorter than it was, and says so, is another page: no client can tell.
                    skip = draw.randrange(5 if kind == "short" and "HTTP" in client.upper() else 0, 12)
                    act = partial(_ask, client, kind, skip, times, place.port)
                    return _at(drill(place, (), act), f"after {skip} answers")

                often = "once" if times == 1 else "always"
                yield Injection(client, f"server {kind}, {often}", run)


def _ask(client: str, kind: str, skip: int, times: int, port: int, work) -> None:
    net_drills.drill_server(client, kind, skip, times, port)


def _loaders() -> Iterator[Injection]:
    deaths = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGBUS": signal.SIGBUS, "OSError": 0}
    for death, number in deaths.items():
        for loader in loader_drills.LOADERS:
            if loader == "make_loader between epochs" and not number:
                continue
            for method in ("fork", "spawn", "forkserver") if death in ("SIGKILL", "OSError") else ("fork",):
                persistents = (False, True) if loader == "make_loader" else (True,)
                for persistent in persistents:
                    act = partial(loader_drills.drill_loader, loader, method, persistent, int(number))
                    case = f"{loader} {method}" + (" persistent" if persistent else "")
                    # What a killed worker of torch's own loader had in TMPDIR is Python's, not labkit's: its sockets.
                    others = ("pymp-", "tmp") if loader == "DataLoader of shards" else ()
                    yield Injection(case, f"worker {death}", _dying(act, others), 1 if method == "fork" else 3)
        for name in ("compare", "diagnose", "tune"):
            act = partial(getattr(loader_drills, f"drill_{name}"), int(number))
            yield Injection(name, f"worker {death}", _dying(act))

    def threads(place: Place, draw: random.Random) -> Verdict:
        at = draw.randrange(1, 13)
        return _at(drill(place, ("photos",), partial(loader_drills.drill_threads, at)), f"read {at}")

    yield Injection("BatchLoader of a folder", "thread OSError", threads)


def _dying(act: Callable, others: tuple[str, ...] = ()) -> Callable[[Place, random.Random], Verdict]:
    def run(place: Place, draw: random.Random) -> Verdict:
        at = draw.randrange(0, loader_drills.N)
        verdict = drill(place, ("shards",), lambda work: act(at=at, work=work), others=others)
        return _at(verdict, f"sample {at}")

    return run


def _at(verdict: Verdict, moment: str) -> Verdict:
    verdict.moment = moment
    return verdict
