"""compare_peers(): time other loaders and labkit's own on the same work, in one run."""

import importlib
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from PIL import Image

from labkit.data.decode import decode
from labkit.data.pixels import shrink
from labkit.data.samples import make_photos
from labkit.data.stores import FolderStore
from labkit.errors import ArgumentError, HostError, PeerError, VariantError
from labkit.measure.compare import DifferentWorkWarning, compare
from labkit.peers.adapters.own import BASELINE, DATALOADER, LIMITS, NAIVE, OWN
from labkit.peers.check import check_peer, make_pictures
from labkit.peers.host import Host, HostedLoader
from labkit.peers.peer import (
    CLASSES,
    FLOAT32,
    JPEG_FILES,
    JPEG_PACKED,
    RAW_PIXELS,
    UINT8,
    Peer,
    PeerClass,
    Work,
    class_of_profile,
    missing_modules,
)
from labkit.peers.ranking import against_best, left_out, peer_table, plot_peers
from labkit.util.arguments import require_choice, require_int
from labkit.util.files import write_atomic
from labkit.util.machine import labkit_home, scale, usable_cores
from labkit.util.pictures import encode_image
from labkit.util.process import progress_bar

__all__ = [
    "CLASSES", "FLOAT32", "JPEG_FILES", "JPEG_PACKED", "PEERS", "RAW_PIXELS", "UINT8", "Peer", "PeerError", "Work",
    "against_best", "check_peer", "compare_peers", "left_out", "make_work", "missing_modules", "peer_table",
    "plot_peers",
]  # fmt: skip

_ADAPTERS = (
    "torchvision", "timm", "albumentations", "reduced", "torchcodec", "torchdata", "grain", "datago", "dali", "ffcv",
    "spdl", "turboloader", "webdataset", "litdata", "streaming", "datasets",
)  # fmt: skip

# Enough for 16 batches of 64 in an epoch, and for raw pixels several times as large as a cache; fewer at `ci` scale,
# which only tests the code. Camera photos are large: each is read three times in an epoch, under as many names, which
# gives 6 batches.
_N_PHOTOS = {
    "imagenet": {"ci": 24, "laptop": 1024, "gpu": 4096},
    "camera": {"ci": 3, "laptop": 128, "gpu": 256},
}
_N_NAMES = {"imagenet": 1, "camera": 3}
_BATCH_SIZE = 64
_QUALITY = 90  # of photos that are made small
_MIN_STEADY_S = {"ci": 0.05, "laptop": 1.0, "gpu": 1.0}

_MODULES = [importlib.import_module(f"labkit.peers.adapters.{name}") for name in _ADAPTERS]
#: The other loaders by name, whether installed here or not, each a `Peer` that does the same work.
PEERS: dict[str, Peer] = {peer.name: peer for module in _MODULES for peer in module.PEERS_HERE}


class _PeerRun(NamedTuple):
    kind: str  # "peer", "labkit", "dataloader", "baseline" or "limit"
    peer: Peer
    host: Host


def make_work(
    profile: str = "imagenet", *, peer_class: str | None = None, n_photos: int | None = None, progress: bool = True
) -> Work:
    """Make the photos of a profile or a class that are missing, and return the work to do on them.

    Arguments as in `compare_peers`.
    """
    chosen = _choose_class(profile, peer_class)
    by_scale = _N_PHOTOS[require_choice("profile", chosen.profile, _N_PHOTOS)]
    n_photos = require_int("n_photos", by_scale[scale().name] if n_photos is None else n_photos)
    folder, name = labkit_home() / "photos", f"{chosen.profile}-{n_photos}"
    root = make_photos(folder / name, n_photos, profile=chosen.profile, progress=progress)
    if chosen.jpeg_short_side is not None:
        name += f"-jpeg{chosen.jpeg_short_side}"
        root = make_small_photos(root, folder / name, chosen.jpeg_short_side)
    if (n_names := _N_NAMES[chosen.profile]) > 1 and scale().name != "ci":
        name += f"-x{n_names}"
        root = repeat_photos(root, folder / name, n_names)
    return Work(
        root, labkit_home() / "peers" / name, batch_size=min(_BATCH_SIZE, max(1, n_photos // 2)), dtype=chosen.dtype,
        min_steady_s=_MIN_STEADY_S[scale().name],
    )  # fmt: skip


def make_small_photos(photos: Path, root: Path, short_side: int) -> Path:
    """Reduce photos once, as most people who store JPEGs do before training.

    Each is written as a JPEG of quality 90, its shorter side at most `short_side` pixels.

    Args:
        photos: Folder of photos in sub-folders.
        root: Where the small ones go, under the same names. Those that are there are kept.

    Returns:
        `root`.

    Raises:
        DecodeError: a photo cannot be decoded; names it.
    """
    store = FolderStore(photos)

    def make_small(key: str) -> None:
        if not (root / key).exists():
            image = Image.fromarray(shrink(decode(store.read(key), key=key), short_side))
            write_atomic(root / key, encode_image(image, "JPEG", quality=_QUALITY))

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(make_small, store.keys()))
    return root


def repeat_photos(photos: Path, root: Path, n_names: int) -> Path:
    """A folder in which each photo has `n_names` names, so that an epoch of a few large photos is a long one.

    The names are links to one and the same bytes. Those that are there are kept.
    """
    for path in FolderStore(photos).paths():
        for number in range(n_names):
            name = root / path.relative_to(photos).with_stem(f"{path.stem}-{number}")
            if not name.exists():
                name.parent.mkdir(parents=True, exist_ok=True)
                name.hardlink_to(path)
    return root


def _choose_class(profile: str, peer_class: str | None) -> PeerClass:
    if peer_class is None:
        return class_of_profile(profile)
    chosen = CLASSES[require_choice("peer_class", peer_class, CLASSES)]
    if profile not in ("imagenet", chosen.profile):
        raise ArgumentError(f"profile={profile!r} and peer_class={peer_class!r} exclude each other: pass one of them")
    return chosen


def compare_peers(
    profile: str = "imagenet",
    *,
    peer_class: str | None = None,
    only: Sequence[str] = (),
    n_photos: int | None = None,
    rounds: int | None = None,
    peers: Iterable[Peer] | None = None,
    experiment: str = "",
    progress: bool = True,
) -> pd.DataFrame:
    """Time every installed peer, labkit's own loaders and the limits on the same work, in interleaved rounds.

    Each loader runs in its own process: it prepares its format, `check_peer` checks it, then it is timed. A loader
    that fails, crashes or hangs is left out and reported; the others go on.

    Args:
        profile: Photos: `"imagenet"` or `"camera"`. All that read them and deliver bytes take part.
        peer_class: One of `CLASSES` instead, such as `"jpeg-float32"`.
        only: Names of `PEERS`; default: all. labkit's rows and the limits always run.
        n_photos: Default: by scale; 16 batches of 64 in an epoch, of camera photos 6.
        rounds: As for `compare`.
        peers: Your own loaders to compare, instead of `PEERS`.
        experiment, progress: As for `compare`.

    Returns:
        Runs as `compare` returns them, with the factors `kind` (`peer`, `labkit`, `dataloader` for `make_loader`,
        `baseline`, `limit`), `source`, `antialias`, `decoded_at`, `dtype`, `profile`, `peer_class`, `version` and
        `differs` (`Peer.note`); timed as `labkit.peers.run` says. `left_out(frame)` lists the others, with reasons.

    Raises: ValueError (unknown profile, class or name; lists the accepted ones), HostError (the baseline does not run).
    Taught in: notebooks/13_peers.ipynb
    """
    in_class = _choose_class(profile, peer_class)
    chosen, omitted = _choose_installed(PEERS.values() if peers is None else peers, only, in_class)
    work = make_work(profile, peer_class=peer_class, n_photos=n_photos, progress=progress)
    make_pictures(work)  # before several hosts need them at once
    by_kind = {"baseline": [NAIVE], "dataloader": [DATALOADER], "peer": chosen, "labkit": OWN, "limit": LIMITS}
    factors = {"profile": in_class.profile, "peer_class": peer_class or in_class.profile}
    options: dict[str, Any] = {"rounds": rounds, "experiment": experiment, "progress": progress}
    with ExitStack() as stack:
        rows = {
            peer.name: _PeerRun(kind, peer, stack.enter_context(Host(peer, work)))
            for kind, of_kind in by_kind.items()
            for peer in of_kind
            if kind == "baseline" or in_class.admits(peer)
        }
        for row in rows.values():
            stack.callback(row.host.hang_up)  # all at once, before waiting for each
        _prepare_and_check(rows, omitted, progress)
        frame = _time_all(rows, omitted, work, factors, options)
    frame.attrs["left_out"] = [{"name": name, "state": state, "why": why} for name, (state, why) in omitted.items()]
    return frame


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


def _prepare_and_check(rows: dict[str, _PeerRun], omitted: dict, progress: bool) -> None:
    """Let all hosts build their formats and pass the check, and drop those that fail.

    One after another: some share a format, and each uses all cores. Of two checks at once, each takes several times as
    long, since OpenMP threads spin while they wait for each other.
    """
    with progress_bar(show=progress, total=2 * len(rows), desc="peers: prepare, check", unit="step") as bar:
        for command in ("prepare", "check"):
            for name, row in list(rows.items()):
                try:
                    if command == "prepare" or row.kind != "limit":
                        row.host.ask(command)
                except HostError as error:
                    _leave_out(name, error, rows, omitted)
                bar.update()


def _leave_out(name: str, error: BaseException, rows: dict[str, _PeerRun], omitted: dict) -> None:
    row = rows.pop(name)
    row.host.close()
    if row.kind == "baseline":
        raise error
    omitted[name] = ("broke", str(error))


def _time_all(
    rows: dict[str, _PeerRun], omitted: dict, work: Work, factors: dict[str, str], options: dict[str, Any]
) -> pd.DataFrame:
    """Time all hosts in interleaved rounds. If one breaks, start over without it, so that all share every round."""
    while True:
        loaders = {name: partial(HostedLoader, row.host, work) for name, row in rows.items()}
        columns: dict[str, Any] = {
            **factors,
            "kind": {name: row.kind for name, row in rows.items()},
            "source": {name: row.peer.source for name, row in rows.items()},
            "antialias": {name: row.peer.antialias for name, row in rows.items()},
            "decoded_at": {name: row.peer.decoded_at for name, row in rows.items()},
            "version": {name: row.peer.version for name, row in rows.items()},
            "differs": {name: row.peer.note for name, row in rows.items()},
            "dtype": work.dtype,
            "storage": "folder",
        }
        try:
            with warnings.catch_warnings(action="ignore", category=DifferentWorkWarning):
                frame = compare(loaders, baseline=BASELINE, rung=False, verdicts=False, factors=columns, **options)
        except VariantError as error:
            _leave_out(error.label, error.__cause__ or error, rows, omitted)
        else:
            restarting = [name for name, row in rows.items() if row.peer.restarts]
            frame.loc[frame["variant"].isin(restarting), "cpu_s"] = float("nan")
            return frame
