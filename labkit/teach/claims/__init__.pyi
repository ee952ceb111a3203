# fmt: off
from .judging import claims as claims, judged as judged
from .text import lines_of as lines_of, ratios as ratios
from .verdicts import (
    FAILS as FAILS, HOLDS as HOLDS, MISSING as MISSING, NEEDS_GPU as NEEDS_GPU, OPEN as OPEN, Reading as Reading,
    reaches as reaches, together as together,
)
