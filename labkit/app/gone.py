"""Commands and options that are gone: whoever asks for one is told in one line what to use instead."""

from labkit.app.commands import say
from labkit.util.gone import told_if_gone


def refuse_gone(command: str, option: str = "") -> None:
    """Print what to use instead of a command or option that is gone, and exit with code 2; else do nothing."""
    if told := told_if_gone(f"labkit {command} {option}".strip()):
        say(f"labkit: {told}", to_stderr=True)
        raise SystemExit(2)
