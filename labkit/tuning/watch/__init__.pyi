# fmt: off
from .program import WatchOptions as WatchOptions, watch_script as watch_script
from .report import WatchReport as WatchReport
from .script import CannotRun as CannotRun, Script as Script
from .session import NothingSeen as NothingSeen, Watched as Watched, watch as watch
from .trial import CannotTry as CannotTry, Tried as Tried, try_settings as try_settings
