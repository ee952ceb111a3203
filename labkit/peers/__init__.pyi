# fmt: off
from .peer import (
    JPEG_FILES as JPEG_FILES, JPEG_PACKED as JPEG_PACKED, RAW_PIXELS as RAW_PIXELS, Peer as Peer, Work as Work,
    missing_modules as missing_modules,
)
from .classes import CLASSES as CLASSES, chosen_classes as chosen_classes
from .collection import append_runs as append_runs, comparisons as comparisons, stored_runs as stored_runs
from .plots import draw_table as draw_table, plot_peers as plot_peers
from .registry import PEERS as PEERS
from .table import peer_table as peer_table
from .report import list_peers as list_peers, run_peers as run_peers
from .scaling import plot_cores as plot_cores, predict_cores as predict_cores
from .check import make_pictures as make_pictures
from .host import Host as Host, HostError as HostError
