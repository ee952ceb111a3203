"""The classes of the comparison: what is read, and what is delivered. Only within one does a ratio mean anything."""

from dataclasses import dataclass

from labkit.core import require_choice
from labkit.peers.peer import FLOAT32, JPEG_FILES, JPEG_PACKED, RAW_PIXELS, UINT8, Peer

_JPEG = (JPEG_FILES, JPEG_PACKED)


@dataclass(frozen=True)
class PeerClass:
    """Loaders that may be compared, as `python -m labkit peers --class` names them.

    Args:
        title: What is read and delivered, in words.
        sources: The `Peer.source` of those that take part.
        dtype: What they deliver, as `Work.dtype`.
        profile: Photos: `"imagenet"` or `"camera"`.
        jpeg_short_side: Short side in pixels that the photos are reduced to, as JPEGs, before anyone reads them.
    """

    title: str
    sources: tuple[str, ...]
    dtype: str = UINT8
    profile: str = "imagenet"
    jpeg_short_side: int | None = None

    def admits(self, peer: Peer) -> bool:
        return peer.source in self.sources and self.dtype in peer.dtypes


CLASSES = {
    "jpeg-uint8": PeerClass("JPEG to uint8", _JPEG),
    "jpeg-float32": PeerClass("JPEG to normalised float32", _JPEG, FLOAT32),
    "raw-uint8": PeerClass("raw pixels at 256 to uint8", (RAW_PIXELS,)),
    "raw-float32": PeerClass("raw pixels at 256 to normalised float32", (RAW_PIXELS,), FLOAT32),
    "jpeg256-uint8": PeerClass("JPEG at 256 to uint8", _JPEG, jpeg_short_side=256),
    "camera-uint8": PeerClass("camera JPEG to uint8", _JPEG, profile="camera"),
}


def chosen_classes(names: str) -> list[str | None]:
    """The classes that a command line names: comma-separated, `all`, or none, which leaves the choice to the profile.

    Raises:
        ValueError: an unknown name; lists the accepted ones.
    """
    if names == "all":
        return list(CLASSES)
    return [require_choice("--class", name.strip(), CLASSES) for name in names.split(",") if name.strip()] or [None]


def class_of_profile(profile: str) -> PeerClass:
    """All that read a profile's photos and deliver bytes, JPEGs and raw pixels in one run."""
    return PeerClass(f"{profile} to uint8", (*_JPEG, RAW_PIXELS), profile=profile)
