# fmt: off
from .frames import Frames as Frames, Read as Read, on_gpu as on_gpu, paired as paired, read_folder as read_folder
from .judging import claims as claims, judged as judged
from .ledger import LEDGER as LEDGER
from .steps import checklist as checklist
from .text import lines_of as lines_of, ratios as ratios
from .verdicts import (
    FAILS as FAILS, HOLDS as HOLDS, LARGER as LARGER, MISSING as MISSING, NEEDS_GPU as NEEDS_GPU, OPEN as OPEN,
    Reading as Reading, agreeing_range as agreeing_range, reaches as reaches, together as together,
)
