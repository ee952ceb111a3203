"""Start a command under test: in a fork of this process, which has imported everything, or in a fresh process."""

import atexit
import fcntl
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.hardening.faults.sandbox import obey_permissions
from tests.hardening.faults.startup import sitecustomize

REPO = Path(__file__).parents[3]
STARTUP = Path(__file__).with_name("startup")
_F_SETPIPE_SZ = 1031


@dataclass
class Setting:
    """Folder, environment and limits of a command.

    file_bytes: Largest file that it may write. obey_permissions: Even as root.
    """

    cwd: Path
    env: dict[str, str]
    file_bytes: int | None = None
    obey_permissions: bool = False

    def apply(self) -> None:
        if self.file_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_bytes, self.file_bytes))
        if self.obey_permissions:
            obey_permissions()


@dataclass
class Child:
    """A started command, whose process leads its own session."""

    pid: int
    readers: tuple[int, int]
    started: float = field(default_factory=time.monotonic)
    code: int | None = None

    def wait(self, within_s: float) -> int | None:
        """Return the exit status, negative for a signal; None if the process still runs."""
        deadline = self.started + within_s
        while self.code is None and time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.002)
        return self.code

    def read_output(self) -> tuple[str, str]:
        """Return stdout and stderr. Call it once, after the end."""
        return tuple(_read_pipe(reader) for reader in self.readers)


def start(main: str | Callable[[], int | None], arguments: list[str], setting: Setting, *, warm: bool) -> Child:
    """Start a script with arguments. warm: in a fork; `main` may then also be a function."""
    pipes = [_make_pipe(), _make_pipe()]
    if warm:
        pid = os.fork()
        if not pid:
            _run_in_fork(main, arguments, setting, [writer for _, writer in pipes])
    else:
        pid = subprocess.Popen(
            [sys.executable, main, *arguments], cwd=setting.cwd, env=setting.env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=pipes[0][1], stderr=pipes[1][1], preexec_fn=setting.apply,
        ).pid  # fmt: skip
    for _, writer in pipes:
        os.close(writer)
    return Child(pid, tuple(reader for reader, _ in pipes))


def _make_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _F_SETPIPE_SZ, 1 << 20)  # the output fits, though nobody reads it before the end
    os.set_blocking(reader, False)
    return reader, writer


def _read_pipe(reader: int) -> str:
    parts = []
    try:
        while part := os.read(reader, 1 << 16):
            parts.append(part)
    except BlockingIOError:  # a process that is left behind holds the other end
        pass
    os.close(reader)
    return b"".join(parts).decode(errors="replace")


def _run_in_fork(main: str | Callable, arguments: list[str], setting: Setting, writers: list[int]) -> None:
    """Run the script as a fresh process would, and end the fork."""
    code = 1
    try:
        os.setsid()
        for writer, standard in zip(writers, (1, 2), strict=True):
            os.dup2(writer, standard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(setting.env)
        os.chdir(setting.cwd)
        tempfile.tempdir = None
        setting.apply()
        code = _run(main, arguments)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # as Python ends itself
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _run(main: str | Callable, arguments: list[str]) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sitecustomize.arm()
    try:
        if callable(main):
            return main() or 0
        sys.argv, module.__file__ = [main, *arguments], main
        exec(compile(Path(main).read_text(), main, "exec"), module.__dict__)  # noqa: S102 - our own script
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
