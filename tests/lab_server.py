"""JupyterLab and Chromium for tests: started without any settings of this machine, and ended completely."""

import json
import os
import shutil
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import urllib3

from labkit.app import jupyter

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

# JupyterLab draws every cell, even those out of view, and never asks the network for news.
_SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
_FOLDERS = {
    "HOME": "", "JUPYTER_CONFIG_DIR": "config", "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython",
    "JUPYTER_DATA_DIR": "data",
}  # fmt: skip


def find_chromium(playwright):
    """The variable CHROMIUM, a system's Chromium, or playwright's own; None if there is none."""
    system = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    for path in (os.environ.get("CHROMIUM"), *system, playwright.chromium.executable_path):
        if path and Path(path).exists():
            return path
    return None


@contextmanager
def jupyterlab(notebooks, home, **variables):
    """A JupyterLab on a free port, with no settings but its own; gives the address of a file's page."""
    command = [
        sys.executable, jupyter.__file__, "--no-browser", f"--port={free_port()}", "--ip=127.0.0.1", "--allow-root",
        "--ServerApp.token=lab", f"--ServerApp.root_dir={notebooks}", "--expose-app-in-browser",
    ]  # fmt: skip
    for name, values in _SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with running_server(command, home, **variables) as (_, info):
        yield lambda name: f"{info['url']}lab/tree/{name}?token=lab"


@contextmanager
def running_server(command, home, **variables):
    """A Jupyter server with all its settings in `home`: the process, and what it says about itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    own = {**{name: home / folder for name, folder in _FOLDERS.items()}, **variables, "BROWSER": "true"}
    environment = {**kept, **{name: str(value) for name, value in own.items()}}
    with (home / "jupyterlab.log").open("w") as log:
        server = psutil.Popen(command, cwd=home, stdout=log, stderr=log, env=environment)
        try:
            yield server, _wait_until_ready(server, home)
        finally:
            family = [server, *server.children(recursive=True)] if server.poll() is None else []
            for process in family[:1]:
                process.terminate()
            for process in psutil.wait_procs(family, timeout=5)[1]:  # its kernels, and their workers
                process.kill()
            psutil.wait_procs(family, timeout=5)


def free_port():
    """A port that was free a moment ago: if it is taken meanwhile, the server uses the next one and says so."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_until_ready(server, home):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for path in (home / "runtime").glob("jpserver-*.json"):
            try:
                info = json.loads(path.read_text())
                if urllib3.request("GET", f"{info['url']}api?token={info['token']}", timeout=5).status == 200:
                    return info
            except (ValueError, urllib3.exceptions.HTTPError):
                pass  # not completely written, or not yet listening
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start: {(home / 'jupyterlab.log').read_text()[-2000:]}")
