# fmt: off
from .experiments import writeup_cutmix as writeup_cutmix
from .record import record_reference as record_reference
from .runs import FOLDER as FOLDER, reference_runs as reference_runs
