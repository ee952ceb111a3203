"""`labkit lab`, once for real: on the loopback interface alone, and only for who has the token."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import psutil
import pytest

from labkit.lab import jupyter as lab_server
from tests.lab_server import _free_port


def environment(home):
    """No settings of this machine's user, but those that the test writes into `home/config`."""
    folders = {"HOME": "", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    return {**kept, **{name: str(home / folder) for name, folder in folders.items()}, "BROWSER": "true"}


def started(home):
    command = [sys.executable, "-m", "labkit", "lab", "--port", str(_free_port())]
    with open(home / "log", "w") as log:
        return subprocess.Popen(command, cwd=home, env=environment(home), stdout=log, stderr=log)


def address(server, home):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for path in (home / "runtime").glob("jpserver-*.json"):
            try:
                about = json.loads(path.read_text())
                status("http://127.0.0.1", about)
                return about
            except (OSError, ValueError):
                pass  # not yet whole, or not yet listening
        time.sleep(0.1)
    raise RuntimeError((home / "log").read_text()[-2000:])


def status(host, about, query=""):
    try:
        with urllib.request.urlopen(f"{host}:{about['port']}/api/contents{query}", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_on_this_machine_and_with_its_token(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "jupyter_server_config.py").write_text("c.ServerApp.ip = '0.0.0.0'\n")
    server = started(tmp_path)
    try:
        about = address(server, tmp_path)
        assert len(about["token"]) >= 32
        assert status("http://127.0.0.1", about) == 403
        assert status("http://127.0.0.1", about, "?token=wrong") == 403
        assert status("http://127.0.0.1", about, f"?token={about['token']}") == 200
        listening = [place for place in psutil.Process(server.pid).net_connections() if place.status == "LISTEN"]
        assert {place.laddr.ip for place in listening} == {"127.0.0.1"}
        assert about["token"] not in " ".join(psutil.Process(server.pid).cmdline())
        urllib.request.urlopen(f"http://127.0.0.1:{about['port']}/api/kernels?token={about['token']}", b"{}").close()
        commands = {child: child.cmdline() for child in psutil.Process(server.pid).children(recursive=True)}
        [kernel] = [child for child, command in commands.items() if "ipykernel_launcher" in command]
        assert commands[kernel][-2:] == ["--ext", "labkit.lab.recording"]
        kernel.kill()
    finally:
        server.kill()
        server.wait()


def test_without_a_token_it_does_not_start(monkeypatch):
    """As where a configuration has `token = ''`: what counts is what Jupyter made of all its settings."""
    from jupyterlab.labapp import LabApp

    started, asked = [], []
    identity = SimpleNamespace(auth_enabled=False)
    server = SimpleNamespace(identity_provider=identity, start=lambda: started.append(True))
    monkeypatch.setattr(LabApp, "initialize_server", lambda argv: asked.append(argv) or server)
    with pytest.raises(SystemExit, match="a Jupyter configuration turns the token off"):
        lab_server.main(["--port=1"])
    assert started == []
    identity.auth_enabled = True
    lab_server.main(["--port=1"])
    assert started == [True]
    assert [arguments[0] for arguments in asked] == ["--port=1"] * 2
