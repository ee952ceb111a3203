# fmt: off
from .entry_point import made_training as made_training
from .epochs import CannotDiagnose as CannotDiagnose
from .stalls import diagnose as diagnose
