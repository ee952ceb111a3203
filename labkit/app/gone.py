"""Commands and options that are gone: whoever asks for one is told in one line what to use instead.

A row is kept for one version.
"""

from labkit.app.commands import say

# A command, or a command and its option -> what to use instead.
GONE = {
    "plan": "notebook 15 does its arithmetic by hand, and `lk.plan` does it in Python",
    "reference": "on a machine with a CUDA device, the notebooks run on it: `python -m labkit tour --store`",
    "watch --trace": "export a trace for Perfetto by torch.profiler: prof.export_chrome_trace(path)",
}


def refuse_gone(command: str, option: str = "") -> None:
    """Print what to use instead of a command or option that is gone, and exit with code 2; else do nothing."""
    name = f"{command} {option}".strip()
    if successor := GONE.get(name):
        say(f"labkit: `{name}` is gone: {successor}", to_stderr=True)
        raise SystemExit(2)
