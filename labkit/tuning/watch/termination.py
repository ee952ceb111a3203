"""SIGTERM, as from a scheduler or torchrun, ends a script at once: report first, unless it has a handler itself."""

import functools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


def before_termination(report: Callable[[], object]) -> None:
    """Call `report` when SIGTERM would end this process, then let it end so.

    The script finds what it would find without this: `signal.getsignal` and `signal.signal` say that there is no
    handler, one that it sets takes this one's place, and `SIG_DFL` brings this one back. A process that it forks has
    none.
    """
    set_handler, get_handler = signal.signal, signal.getsignal
    if get_handler(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        report()
        set_handler(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def shown(handler: Any) -> Any:
        return signal.SIG_DFL if handler is terminate else handler

    @functools.wraps(set_handler)
    def set_shown(signalnum: int, handler: Any) -> Any:
        is_default = signalnum == signal.SIGTERM and not callable(handler) and handler == signal.SIG_DFL
        return shown(set_handler(signalnum, terminate if is_default else handler))

    @functools.wraps(get_handler)
    def get_shown(signalnum: int) -> Any:
        return shown(get_handler(signalnum))

    def end_in_child() -> None:
        if get_handler(signal.SIGTERM) is terminate:
            with suppress(ValueError):
                set_handler(signal.SIGTERM, signal.SIG_DFL)

    set_handler(signal.SIGTERM, terminate)
    signal.signal, signal.getsignal = set_shown, get_shown
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=end_in_child)
