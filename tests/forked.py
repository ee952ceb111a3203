"""Python processes for tests that begin with torch imported: forks of a server, which has imported it once.

`run_python` runs a script so. As a program, `python tests/forked.py SCRIPT...` or `-m MODULE...` stands for a fork that
does it: a kernel's command. Variables that libraries read when they are imported are those of the server.
"""

import array
import contextlib
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

ADDRESS, KERNEL = "LABKIT_TESTS_FORK_SERVER", "forked"  # the first is a variable
_PRELOADED = (
    "albumentations", "cv2", "ipykernel.kernelapp", "ipykernel.ipkernel", "kornia.augmentation", "labkit.course",
    "labkit.loading.batch_loader", "labkit.loading.torch_loader", "labkit.measure.compare", "labkit.measure.plots",
    "matplotlib.pyplot", "pandas", "PIL.Image", "seaborn", "torch.utils.data",
    "torchvision.datasets", "torchvision.transforms.v2", "webdataset",
)  # fmt: skip


def start(jupyter: Path) -> subprocess.Popen:
    """The server: it imports nothing before the first request, and ends with this process at the latest.

    The description of a kernel that it forks, `KERNEL`, lies in Jupyter's folder of data.
    """
    os.environ[ADDRESS] = f"labkit-tests-{uuid4().hex}"  # not a file: the path of one may be too long for a socket
    command = [sys.executable, __file__, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "forked", "language": "python"}
    (jupyter / "kernels" / KERNEL).mkdir(parents=True)
    (jupyter / "kernels" / KERNEL / "kernel.json").write_text(json.dumps(spec))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{os.environ[ADDRESS]}")
    listener.listen(64)
    command = [sys.executable, "-X", "utf8", "-m", "tests.forked", "serve", str(listener.fileno()), str(os.getpid())]
    root = Path(__file__).resolve().parents[1]
    with listener:  # a session of its own: Ctrl-C is for pytest
        return subprocess.Popen(command, cwd=root, pass_fds=[listener.fileno()], start_new_session=True)


def run_python(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], text=True, capture_output=True)`; `sys.argv[0]` is absolute."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        files = (nothing.fileno(), out.fileno(), err.fileno())
        with _request(arguments, str(cwd), dict(os.environ if env is None else env), files) as connection:
            status = _status(connection)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([sys.executable, *arguments], status, *texts)


def _request(arguments, cwd: str, environment: dict[str, str], files: tuple[int, ...]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{os.environ[ADDRESS]}")
    message = json.dumps([list(arguments), cwd, environment]).encode("utf-8", "surrogateescape")
    socket.send_fds(connection, [struct.pack("!I", len(message))], list(files))
    connection.sendall(message)
    return connection


def _status(connection: socket.socket) -> int:
    answer = connection.recv(4)
    if len(answer) < 4:
        raise RuntimeError("the fork server has ended")
    return os.waitstatus_to_exitcode(struct.unpack("!i", answer)[0])


def _stand_in(arguments: list[str]) -> int:
    """As this process, a fork: it gets the signals, and goes when this goes."""
    connection = _request(arguments, os.getcwd(), dict(os.environ), (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = _status(connection)
    return status if status >= 0 else 128 - status


def _serve(listener: socket.socket, owner: int) -> tuple[list[str], str]:
    """Fork for each request, and tell its asker the end of it; returns in the forks alone."""
    connections: dict[int, socket.socket] = {}  # by process
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        for place in (listener, woken):
            selector.register(place, selectors.EVENT_READ, None)
        is_ready = False
        while _is_there(owner):
            for key, _ in selector.select(timeout=1):
                if key.fileobj is woken:
                    woken.recv(4096)
                    _tell_ends(connections, selector)
                elif key.fileobj is not listener:
                    _pass_on(key.fileobj, key.data)
                else:
                    connection, _ = listener.accept()
                    if not _is_of_this_user(connection):
                        connection.close()
                        continue
                    if not is_ready:
                        _preload()
                        is_ready = True
                    arguments, cwd, environment, files = _read_request(connection)
                    if pid := os.fork():
                        connections[pid] = connection
                        selector.register(connection, selectors.EVENT_READ, pid)
                        for file in files:
                            os.close(file)
                        continue
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    os.setsid()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    for other in (listener, woken, wake, connection, *connections.values()):
                        other.close()
                    os.environ.clear()
                    os.environ.update(environment)
                    return arguments, cwd
    for pid in connections:
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _is_of_this_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _tell_ends(connections: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with connections.pop(pid) as connection, contextlib.suppress(OSError, KeyError):
            selector.unregister(connection)
            connection.sendall(struct.pack("!i", status))


def _pass_on(connection: socket.socket, pid: int) -> None:
    """A signal from the asker, or its end: then the fork and its children are to end, as a terminal's would."""
    with contextlib.suppress(OSError):  # one of both has gone meanwhile
        numbers = connection.recv(16)
        for number in numbers:
            os.kill(pid, number)
        if not numbers:
            os.killpg(pid, signal.SIGKILL)
            time.sleep(0.01)  # until SIGCHLD tells: the connection's end is readable all the time


def _read_request(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    (left,) = struct.unpack("!I", head)
    message = b""
    while len(message) < left:
        message += connection.recv(left - len(message))
    arguments, cwd, environment = json.loads(message.decode("utf-8", "surrogateescape"))
    return arguments, cwd, environment, list(array.array("i", files))


def _preload() -> None:
    import importlib

    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _become(arguments: list[str], cwd: str) -> dict:
    """Run a script or a module as `python` would, in a fork. Returns its names, which live until Python ends."""
    import matplotlib
    import numpy as np

    os.chdir(cwd)
    # What was set when the server imported it.
    tempfile.tempdir = None
    np.random.seed()
    is_kernel = arguments[:2] == ["-m", "ipykernel_launcher"]
    if backend := os.environ.get("MPLBACKEND", "module://matplotlib_inline.backend_inline" if is_kernel else ""):
        matplotlib.rcParams["backend"] = backend
    multiprocessing.process.ORIGINAL_DIR = cwd
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], cwd
        return runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    script = Path(arguments[0]).resolve()
    sys.argv, sys.path[0] = arguments, str(script.parent)
    return runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        # A collection that found a loader among them would wait 5 s for each of its workers.
        names = _become(*_serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])))
    else:
        sys.exit(_stand_in(sys.argv[1:]))
