# fmt: off
from .observing import NothingSeen as NothingSeen
from .program import WatchOptions as WatchOptions, run_watched as run_watched, watch_script as watch_script
from .report import WatchReport as WatchReport
from .script import CannotRun as CannotRun, Script as Script
from .session import Watched as Watched, watch as watch
from .trial import CannotTry as CannotTry, Tried as Tried, try_settings as try_settings
