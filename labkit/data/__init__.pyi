# fmt: off
from .datasets import (
    ImageDataset as ImageDataset, PILDataset as PILDataset, SkipLog as SkipLog, Skipped as Skipped,
    collate as collate,
)
from .decoders import (
    DECODERS as DECODERS, MAX_PIXELS as MAX_PIXELS, DecodeError as DecodeError, decode as decode,
    missing_decoders as missing_decoders,
)
from .jpeg_segments import is_scalable as is_scalable
from .labels import Labeled as Labeled, check_same_classes as check_same_classes, labels_of as labels_of
from .partial_jpeg import (
    SCALES as SCALES, Frame as Frame, Part as Part, load_library as load_library, open_decoder as open_decoder,
)
from .upright import jpeg_orientation as jpeg_orientation
