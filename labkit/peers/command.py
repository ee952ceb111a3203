"""What `python -m labkit peers` prints and writes."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from labkit.measure.frames import save_frame
from labkit.measure.plots import WIDTH_IN
from labkit.peers.peer import CLASSES, OWN_PHOTOS, missing_modules
from labkit.peers.ranking import leaders, left_out, peer_table, plot_peers, shown_tables
from labkit.peers.registry import PEERS, compare_own, compare_peers
from labkit.util.files import check_writable, write_atomic
from labkit.util.machine import env_id
from labkit.util.pictures import png_bytes


def list_peers() -> None:
    """Print each peer: installed, or how to install it."""
    for peer in PEERS.values():
        missing = missing_modules(peer)
        state = f"missing ({', '.join(missing)}): {peer.install}" if missing else "installed"
        print(f"{peer.name:<28} {state}")
        if peer.published:
            print(f"{'':<28} published: {peer.published}")
    for name, in_class in CLASSES.items():
        print(f"--class {name:<20} {in_class.title}")


def run_peers(
    peer_class: str = "imagenet",
    *,
    own: str = "",
    only: Sequence[str] = (),
    rounds: int | None = None,
) -> None:
    """Compare the peers, print the table, and write `results/<env_id>/peers-<peer_class>.csv` and `.png`.

    Args:
        peer_class: One of `CLASSES`.
        own: A folder of a reader's photos in its place.

    Other arguments, and errors, as for `compare_peers`.
    """
    title = OWN_PHOTOS.title if own else CLASSES[peer_class].title
    folder = Path("results").resolve() / env_id()
    check_writable(folder, "run labkit in another folder, or make room there")
    if own:
        frame = compare_own(own, only=only, rounds=rounds)
    else:
        frame = compare_peers(peer_class=peer_class, only=only, rounds=rounds)
    path = save_frame(frame, folder / f"peers-{'own' if own else peer_class}.csv")
    figure = Figure(figsize=(WIDTH_IN, 1.9 + 0.28 * frame["variant"].nunique()), layout="constrained")
    plot_peers(frame, ax=figure.add_subplot())
    write_atomic(path.with_suffix(".png"), png_bytes(figure, dpi=120))
    print(f"{title}: all loaders do the same work, in one run; in brackets: 95 % intervals")
    parts = []
    for name, rows in shown_tables(frame).items():
        parts += [pd.DataFrame("", [name], rows.columns), rows.rename(index="  {}".format)]
    print(pd.concat(parts).to_string())
    for name, found in leaders(frame).items():
        print(f"{name}: {found}")
    for name, note in peer_table(frame)["note"].items():
        if note:
            print(f"{name}: {note}")
    for name, row in left_out(frame).iterrows():
        print(f"{name} {row['state']}: {row['why']}")
    print(f"wrote {path} and its .png")
