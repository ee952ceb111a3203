"""JupyterLab and Chromium for the tests of the lab: started apart from all settings of this machine, ended whole."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil

from labkit.lab import jupyter as lab_server

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def find_chromium(playwright):
    """The variable CHROMIUM, a system's Chromium, or playwright's own; None where there is none."""
    system = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    own = playwright.chromium.executable_path
    for path in (os.environ.get("CHROMIUM"), *system, own):
        if path and Path(path).exists():
            return path
    return None


@contextmanager
def jupyterlab(notebooks, home, **variables):
    """A JupyterLab on a free port, with no settings but its own; gives the address of a file's page."""
    folders = {
        "HOME": home, "JUPYTER_CONFIG_DIR": home / "config", "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces", "JUPYTER_RUNTIME_DIR": home / "runtime",
        "IPYTHONDIR": home / "ipython", "JUPYTER_DATA_DIR": home / "data",
    }  # fmt: skip
    command = [
        sys.executable, lab_server.__file__, "--no-browser", f"--port={_free_port()}", "--ip=127.0.0.1", "--allow-root",
        "--ServerApp.token=lab", f"--ServerApp.root_dir={notebooks}", "--expose-app-in-browser",
    ]  # fmt: skip
    _settle(home / "settings" / "@jupyterlab", home / "runtime")
    environment = {**os.environ, **{name: str(value) for name, value in {**folders, **variables}.items()}}
    with (home / "jupyterlab.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            base = _address(server, home)
            # A workspace each: else the second page restores what the first has open, beside its own.
            yield lambda name: f"{base}lab/workspaces/{name[:2]}/tree/{name}?token=lab"
        finally:
            _end(server)


def _free_port():
    """Free a moment ago: the server takes the next one where somebody was quicker, and says which."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _settle(settings, runtime):
    """Every cell is drawn, also those that are not in view; and nobody asks the network for news."""
    chosen = {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    for name, values in chosen.items():
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    runtime.mkdir()


def _address(server, home):
    """Of the running server, from the file that it writes itself."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for path in (home / "runtime").glob("jpserver-*.json"):
            try:
                url = json.loads(path.read_text())["url"]
                urllib.request.urlopen(f"{url}api?token=lab", timeout=5).close()
                return url
            except (OSError, ValueError):
                pass  # not yet whole, or not yet listening
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start: {(home / 'jupyterlab.log').read_text()[-2000:]}")


def _end(server):
    """The server, its kernels and their workers."""
    family = [*psutil.Process(server.pid).children(recursive=True)] if server.poll() is None else []
    server.terminate()
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5)
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(5)
