# fmt: off
from .peer import (
    JPEG_FILES as JPEG_FILES, JPEG_PACKED as JPEG_PACKED, RAW_PIXELS as RAW_PIXELS, Peer as Peer, Work as Work,
)
from .report import list_peers as list_peers, run_peers as run_peers
