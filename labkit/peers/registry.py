"""compare_peers(): the loaders that a reader may pick instead, each doing the same work, timed in one run."""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from labkit.core import labkit_home, progress_bar, scale, usable_cores
from labkit.data.samples import make_photos
from labkit.measure import VariantError, compare
from labkit.peers.adapters import BASELINE, DECODE_LIMIT, LIMITS, MEMCPY_LIMIT, NAIVE, OWN
from labkit.peers.check import PeerError, check_peer, make_pictures
from labkit.peers.host import Host, HostedLoader, HostError
from labkit.peers.peer import JPEG_FILES, JPEG_PACKED, RAW_PIXELS, Peer, Work
from labkit.peers.plots import plot_peers
from labkit.peers.table import against_best, left_out, peer_table

__all__ = [
    "BASELINE", "DECODE_LIMIT", "JPEG_FILES", "JPEG_PACKED", "MEMCPY_LIMIT", "PEERS", "RAW_PIXELS", "Peer",
    "PeerError", "Work", "against_best", "check_peer", "compare_peers", "left_out", "make_work", "missing_modules",
    "peer_table", "plot_peers",
]  # fmt: skip

_ADAPTERS = (
    "torchvision", "timm", "albumentations", "dali", "ffcv", "spdl", "webdataset", "litdata", "streaming", "datasets",
)  # fmt: skip

# Enough for several batches a core; fewer at `ci` scale, where only the code is tried.
_N_PHOTOS = {
    "imagenet": {"ci": 24, "laptop": 1024, "gpu": 4096},
    "camera": {"ci": 3, "laptop": 64, "gpu": 256},
}
_LARGEST_BATCH = 64


def _registry() -> dict[str, Peer]:
    modules = [importlib.import_module(f"labkit.peers.adapters.{name}") for name in _ADAPTERS]
    return {peer.name: peer for module in modules for peer in module.PEERS_HERE}


PEERS: dict[str, Peer] = _registry()


class _Row(NamedTuple):
    kind: str  # "peer", "labkit", "baseline" or "limit"
    peer: Peer


def missing_modules(peer: Peer) -> list[str]:
    """Modules that a peer needs and this environment lacks."""
    return [name for name in peer.modules if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def make_work(
    profile: str = "imagenet",
    *,
    n_photos: int | None = None,
    batch_size: int | None = None,
    scratch: str | os.PathLike | None = None,
    progress: bool = True,
) -> Work:
    """Make the photos of a profile, as far as they are missing, and say what is to be done with them.

    Arguments as in `compare_peers`.
    """
    if profile not in _N_PHOTOS:
        raise ValueError(f"profile={profile!r}: choose one of {', '.join(_N_PHOTOS)}")
    n_photos = _N_PHOTOS[profile][scale().name] if n_photos is None else n_photos
    if n_photos < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(f"n_photos={n_photos}, batch_size={batch_size}: at least 1 is wanted")
    batch_size = batch_size or max(1, min(_LARGEST_BATCH, n_photos // (4 * usable_cores())))
    root = make_photos(labkit_home() / "photos" / f"{profile}-{n_photos}", n_photos, profile=profile, progress=progress)
    return Work(root, Path(scratch or labkit_home() / "peers") / f"{profile}-{n_photos}", batch_size=batch_size)


def compare_peers(
    profile: str = "imagenet",
    *,
    only: Sequence[str] = (),
    n_photos: int | None = None,
    batch_size: int | None = None,
    rounds: int | None = None,
    scratch: str | os.PathLike | None = None,
    peers: Iterable[Peer] | None = None,
    experiment: str = "",
    progress: bool = True,
) -> pd.DataFrame:
    """Time every installed peer, labkit's own loaders and the limits on the same work, in interleaved rounds.

    Each runs in a process of its own: it prepares its format, is checked by `check_peer`, and then takes its turns. One
    that fails at any of these, crashes or hangs is reported and left out; the rest go on.

    Args:
        profile: Photos: `"imagenet"` or `"camera"`.
        only: Names of `PEERS`; empty: all. labkit's rows and the limits always run.
        n_photos: Default: by scale, enough for several batches a core.
        batch_size: Default: 64, less where the photos would not give each core four batches.
        rounds: Default: the scale's.
        scratch: Folder for prepared formats, kept for the next time. Default: under labkit's own.
        peers: Loaders to compare instead of `PEERS`: your own.
        experiment: Name under which a tour keeps the frame.
        progress: Show a live bar.

    Returns:
        Runs, as `compare` gives them, with the factors `kind` (`peer`, `labkit`, `baseline`, `limit`), `source`,
        `antialias` and `profile`. Rates count from the first wait to the last batch; workers live on from run to run.
        CPU time and memory are those of the loader's own process tree. `left_out(frame)` tells who is missing and who
        broke.

    Raises:
        ValueError: unknown profile or name; says what there is.
        HostError: labkit's own baseline does not run.

    Taught in: notebooks/13_peers.ipynb
    """
    chosen = _chosen(PEERS.values() if peers is None else peers, only)
    work = make_work(profile, n_photos=n_photos, batch_size=batch_size, scratch=scratch, progress=progress)
    absent = {peer.name: _row_left_out(peer, "missing", peer.install) for peer in chosen if missing_modules(peer)}
    rows = [_Row("baseline", NAIVE), *(_Row("peer", peer) for peer in chosen if peer.name not in absent)]
    rows += [*(_Row("labkit", peer) for peer in OWN), *(_Row("limit", peer) for peer in LIMITS)]
    with ExitStack() as stack:
        hosts, broken = _start(rows, work, stack, progress)
        options = {"rounds": rounds or scale().rounds, "experiment": experiment, "progress": progress}
        frame = _compare(hosts, broken, work, profile=profile, **options)
    frame.attrs["left_out"] = [*absent.values(), *broken.values()]
    return frame


def _chosen(peers: Iterable[Peer], only: Sequence[str]) -> list[Peer]:
    by_name = {peer.name: peer for peer in peers}
    lowered = {name.lower(): name for name in by_name}
    unknown = [name for name in only if name.lower() not in lowered]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a peer: choose among {', '.join(by_name)}")
    return [by_name[lowered[name.lower()]] for name in dict.fromkeys(only)] or list(by_name.values())


def _row_left_out(peer: Peer, state: str, why: str) -> dict[str, str]:
    return {"name": peer.name, "state": state, "why": why}


def _start(rows: list[_Row], work: Work, stack: ExitStack, progress: bool) -> tuple[dict, dict]:
    """Hosts of the rows that prepare and pass their check, and what was wrong with the others."""
    make_pictures(work)  # before several hosts want them at once
    hosts, broken = {row.peer.name: (row, stack.enter_context(Host(row.peer, work))) for row in rows}, {}
    for _, host in hosts.values():
        stack.callback(host.hang_up)  # all together, before each is waited for
    with progress_bar(show=progress, total=2 * len(rows), desc="peers: prepare, check", unit="step") as bar:
        _ask_all("prepare", hosts, broken, 1, bar)  # one by one: some share a format
        checked = {name: pair for name, pair in hosts.items() if pair[0].kind != "limit"}
        _ask_all("check", checked, broken, usable_cores(), bar)
    return {name: pair for name, pair in hosts.items() if name not in broken}, broken


def _ask_all(command: str, hosts: dict, broken: dict, at_once: int, bar: Any) -> None:
    """Let hosts obey, so many at a time; who fails is taken out of `hosts` and told in `broken`."""
    for group in _groups(list(hosts.items()), at_once):
        for _, (_, host) in group:
            host.tell(command)
        for name, (row, host) in group:
            try:
                host.answer()
            except HostError as error:
                del hosts[name]
                broken[name] = _broke(row, host, error)
            bar.update()


def _groups(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _broke(row: _Row, host: Host, error: Exception) -> dict[str, str]:
    host.close()
    if row.kind == "baseline":
        raise error
    return _row_left_out(row.peer, "broke", str(error))


def _compare(hosts: dict[str, tuple[_Row, Host]], broken: dict, work: Work, **options: Any) -> pd.DataFrame:
    """Interleaved runs. Where one breaks, all begin again without it: its rounds were not those of the others."""
    while True:
        loaders = {name: (lambda host=host: HostedLoader(host, work)) for name, (_, host) in hosts.items()}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the variants did not deliver the same number")
                return compare(loaders, baseline=BASELINE, rung=False, storage="folder", **_factors(hosts), **options)
        except VariantError as error:
            name = next(name for name in hosts if str(error).startswith(f"variant {name!r} "))
            row, host = hosts.pop(name)
            broken[name] = _broke(row, host, error.__cause__ or error)


def _factors(hosts: dict[str, tuple[_Row, Host]]) -> dict[str, dict[str, Any]]:
    rows = {name: row for name, (row, _) in hosts.items()}
    return {
        "kind": {name: row.kind for name, row in rows.items()},
        "source": {name: row.peer.source for name, row in rows.items()},
        "antialias": {name: row.peer.antialias for name, row in rows.items()},
    }
