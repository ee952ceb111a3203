"""compare_peers(): time other loaders and labkit's own on the same work, in one run."""

import importlib
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.errors import ArgumentError, HostError, VariantError
from labkit.measure.compare import DifferentWorkWarning, compare
from labkit.measure.frames import MEASURE_VERSION
from labkit.peers.adapters.own import DATALOADER, LIMITS, NAIVE, OWN
from labkit.peers.check import check_peer, make_pictures
from labkit.peers.host import TIMEOUT_S, Host
from labkit.peers.peer import CLASSES, JPEG_FILES, OWN_PHOTOS, Peer, PeerClass, Work, missing_modules
from labkit.peers.photos import make_work, sample_photos
from labkit.peers.ranking import peer_table, plot_peers
from labkit.util.arguments import require_choice
from labkit.util.files import ScratchFolder
from labkit.util.machine import scale, usable_cores
from labkit.util.process import progress_bar

__all__ = [
    "JPEG_FILES", "PEERS", "Peer", "Work", "check_peer", "compare_peers", "make_work", "peer_table", "plot_peers",
]  # fmt: skip

_ADAPTERS = (
    "torchvision", "timm", "albumentations", "torchdata", "dali", "ffcv", "spdl", "turboloader", "webdataset",
    "litdata", "datasets",
)  # fmt: skip
_MODULES = [importlib.import_module(f"labkit.peers.adapters.{name}") for name in _ADAPTERS]
#: The other loaders by name, whether installed here or not, each a `Peer` that does the same work.
PEERS: dict[str, Peer] = {peer.name: peer for module in _MODULES for peer in module.PEERS_HERE}

# What a comparison on a reader's photos spends on timing. The checks before it take a few seconds for each loader.
_OWN_BUDGET_S = {"ci": 1.0, "laptop": 150.0, "gpu": 150.0}
_OWN_TIMEOUT_S = 180.0  # for one answer, so that a loader that hangs does not hold up the others for long
_N_EPOCHS = 6  # of a loader: two in the warm-up, then four rounds
_MIN_ROUNDS = 2  # have an interval
_STEADY_SHARE = 3 / 4  # of an epoch, see `labkit.peers.run`
_BATCHES_A_WORKER = 4  # in an epoch: a queue settles in the first


def compare_peers(
    peer_class: str = "imagenet",
    *,
    only: Sequence[str] = (),
    n_photos: int | None = None,
    rounds: int | None = None,
    peers: Iterable[Peer] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Time every installed peer, labkit's own loaders and the limits on the same work, in interleaved rounds.

    Each loader runs in its own process: it prepares its format, `check_peer` checks it, then it is timed. A loader
    that fails, crashes or hangs is left out and reported; the others go on.

    Args:
        peer_class: One of `CLASSES`, such as `"jpeg-float32"`.
        only: Names of `PEERS`; default: all. labkit's rows and the limits always run.
        n_photos: Default: by scale; 16 batches of 64 in an epoch, of camera photos 6.
        rounds: As for `compare`.
        peers: Your own loaders to compare, instead of `PEERS`.
        progress: As for `compare`.

    Returns:
        Runs as `compare` returns them, with the factors `kind` (`peer`, `labkit`, `dataloader` for `make_loader`,
        `baseline`, `limit`), `source`, `antialias`, `decoded_at`, `dtype`, `peer_class`, `version` and
        `differs` (`Peer.note`); timed as `labkit.peers.run` says. `left_out(frame)` lists the others, with reasons.

    Raises: ValueError (unknown class or name; lists the accepted ones), HostError (the baseline does not run).
    Taught in: notebooks/13_peers.ipynb
    """
    in_class = CLASSES[require_choice("peer_class", peer_class, CLASSES)]
    chosen, omitted = _choose_installed(PEERS.values() if peers is None else peers, only, in_class)
    work = make_work(peer_class, n_photos=n_photos, progress=progress)
    loaders = {"baseline": [NAIVE], **_admitted(in_class, chosen)}
    return _compare(loaders, omitted, work, peer_class, TIMEOUT_S, progress, rounds=rounds)


def compare_own(folder: str | Path, *, only: Sequence[str] = (), rounds: int | None = None) -> pd.DataFrame:
    """As `compare_peers`, on a sample of a reader's own photos.

    The baseline is the `DataLoader` that `make_loader` sets up. How many photos are read follows from the number of
    loaders and cores and the size of the photos, so that timing takes about three minutes. Prints what they are.
    """
    chosen, omitted = _choose_installed(PEERS.values(), only, OWN_PHOTOS)
    loaders, budget_s = _admitted(OWN_PHOTOS, chosen), _OWN_BUDGET_S[scale().name]
    run_s = budget_s / _N_EPOCHS / sum(map(len, loaders.values()))
    with ScratchFolder() as scratch:  # the copies go when all is timed
        photos = sample_photos(folder, scratch / "photos", run_s)
        for name, fact in photos.facts().items():
            print(f"{name}: {fact}", flush=True)
        epoch_s = photos.core_s / usable_cores()
        if rounds is None and epoch_s > 1.5 * run_s:  # even the fewest photos take longer
            rounds = max(_MIN_ROUNDS, round(_N_EPOCHS * run_s / epoch_s) - 2)
        batch_size = min(64, max(1, len(photos.sizes) // (_BATCHES_A_WORKER * usable_cores())))
        work = Work(scratch / "photos", scratch, batch_size=batch_size, min_steady_s=_STEADY_SHARE * run_s)
        options = {"rounds": rounds, "budget_s": budget_s}
        return _compare(loaders, omitted, work, "own", _OWN_TIMEOUT_S, True, **options)


def _choose_installed(
    peers: Iterable[Peer], only: Sequence[str], in_class: PeerClass
) -> tuple[list[Peer], dict[str, tuple[str, str]]]:
    """Peers that can run, and state and reason of those that cannot. Those of other classes are named if asked for."""
    by_name = {peer.name.lower(): peer for peer in peers}
    if unknown := [name for name in only if name.lower() not in by_name]:
        names = ", ".join(peer.name for peer in by_name.values())
        raise ArgumentError(f"{unknown[0]!r} is not a peer: choose from {names}")
    chosen, omitted = [], {}
    for peer in [by_name[name.lower()] for name in dict.fromkeys(only)] or by_name.values():
        if not in_class.admits(peer):
            if only:
                omitted[peer.name] = "in another class", f"{peer.source} to {', '.join(peer.dtypes)}"
        elif missing_modules(peer):
            omitted[peer.name] = "missing", peer.install
        else:
            chosen.append(peer)
    return chosen, omitted


def _admitted(in_class: PeerClass, chosen: list[Peer]) -> dict[str, list[Peer]]:
    by_kind = {"dataloader": [DATALOADER], "peer": chosen, "labkit": OWN, "limit": LIMITS}
    return {kind: [peer for peer in of_kind if in_class.admits(peer)] for kind, of_kind in by_kind.items()}


def _compare(
    by_kind: dict[str, list[Peer]],
    omitted: dict[str, tuple[str, str]],
    work: Work,
    peer_class: str,
    timeout_s: float,
    progress: bool,
    **options: Any,
) -> pd.DataFrame:
    """Check and time loaders, which come by their kind, the baseline first; `options` are those of `compare`."""
    make_pictures(work)  # before several hosts need them at once
    with ExitStack() as stack:
        kinds = {peer.name: kind for kind, of_kind in by_kind.items() for peer in of_kind}
        hosts = {
            peer.name: stack.enter_context(Host(peer, work, timeout_s=timeout_s))
            for of_kind in by_kind.values()
            for peer in of_kind
        }
        for host in hosts.values():
            stack.callback(host.hang_up)  # all at once, before waiting for each
        baseline = next(iter(hosts))

        def leave_out(name: str, error: BaseException) -> None:
            if name == baseline:
                raise HostError(f"{name}, which all others are compared with, does not run: {error}") from error
            hosts.pop(name).close()
            omitted[name] = ("broke", str(error))

        # One after another: some share a format, and each uses all cores. Of two checks at once, each takes several
        # times as long, since OpenMP threads spin while they wait for each other.
        with progress_bar(show=progress, total=2 * len(hosts), desc="peers: prepare, check", unit="step") as bar:
            for command in ("prepare", "check"):
                for name, host in list(hosts.items()):
                    try:
                        if command == "prepare" or kinds[name] != "limit":
                            host.ask(command)
                    except HostError as error:
                        leave_out(name, error)
                    bar.update()
        while True:  # if one breaks, start over without it, so that all share every round
            columns = {
                "peer_class": peer_class,
                "kind": kinds,
                "source": {name: host.peer.source for name, host in hosts.items()},
                "antialias": {name: host.peer.antialias for name, host in hosts.items()},
                "decoded_at": {name: host.peer.decoded_at for name, host in hosts.items()},
                "version": {name: host.peer.version for name, host in hosts.items()},
                "differs": {name: host.peer.note for name, host in hosts.items()},
                "dtype": work.dtype,
                "storage": "folder",
                "measure": MEASURE_VERSION,
            }
            try:
                with warnings.catch_warnings(action="ignore", category=DifferentWorkWarning):
                    frame = compare(
                        {name: lambda host=host: host for name, host in hosts.items()},  # type: ignore[misc]
                        baseline=baseline, rung=False, verdicts=False, factors=columns, progress=progress, **options,
                    )  # fmt: skip
            except VariantError as error:
                leave_out(error.label, error.__cause__ or error)
            else:
                break
    frame.attrs["left_out"] = [{"name": name, "state": state, "why": why} for name, (state, why) in omitted.items()]
    return frame
