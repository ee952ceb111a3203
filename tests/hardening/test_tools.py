"""The tests' own tools: the audit of installed packages, training on several ranks, and tests that run alone."""

import json
import re
import subprocess
import sys

import pytest

from tests.hardening import audit
from tests.hardening.ranks import check, make_set
from tests.paths import REPO
from tests.scripted_server import Handler, serve_script

# The audit fails on a vulnerable package, and says so where nobody answers.


class Service(Handler):
    """As OSV's: knows urllib3 and badpkg."""

    known = {"urllib3": "GHSA-www2-v7xj-xrc6", "badpkg": "GHSA-aaaa-bbbb-cccc"}  # noqa: RUF012

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = self.known.get(asked["package"]["name"])
        events = [{"introduced": "0"}, {"fixed": "9.9"}]
        affected = [{"package": asked["package"], "ranges": [{"type": "ECOSYSTEM", "events": events}]}]
        vulnerability = {"id": found, "affected": affected, "details": "bad", "modified": "2020-01-01T00:00:00Z"}
        self.say(200, json.dumps({"vulns": [vulnerability]} if found else {}).encode())


@pytest.mark.exhaustive
def test_a_vulnerable_package_fails_the_audit_and_a_silent_service_does_not(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pip_audit", reason='pip-audit is not installed: python -m pip install -e ".[test]"')
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("goodpkg", "badpkg"):
        audit.pretend_to_install(tmp_path, name, "1.0")
    with serve_script(Service) as server:
        service = ["-s", "osv", "--osv-url", f"{server.url}/"]
        assert audit.audit(service, packages=["--path", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "audit: badpkg 1.0 has GHSA-aaaa-bbbb-cccc; fixed in: 9.9\n"
    assert audit.audit(service) == 0  # the server has gone
    assert "NOTHING WAS AUDITED" in capsys.readouterr().out


@pytest.fixture
def answers(monkeypatch):
    """What runs of pip-audit end with: exit status, stdout, stderr."""
    answers = []

    def run(command, **options):
        return subprocess.CompletedProcess(command, *answers.pop(0))

    monkeypatch.setattr(subprocess, "run", run)
    return answers


def dependencies(*packages: dict) -> tuple[int, str, str]:
    return 0, json.dumps({"dependencies": [{"name": "urllib3", "version": "1", **package} for package in packages]}), ""


KNOWN, UNKNOWN = {"vulns": [{"id": "GHSA-1", "fix_versions": []}]}, {"skip_reason": "not found"}


def test_packages_that_the_service_does_not_know_are_counted(answers, capsys):
    answers += [dependencies(KNOWN), dependencies({"vulns": []}, UNKNOWN)]
    assert audit.audit([]) == 0
    assert "1 packages; 1 are not known" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [{"vulns": []}, UNKNOWN])
def test_a_service_that_knows_nothing_is_none(answers, capsys, answer):
    answers += [dependencies(answer)]
    assert audit.audit([]) == 0
    assert "NOTHING WAS AUDITED" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "said"), [(2, "unrecognized arguments"), (1, "Traceback: KeyError"), (-11, "")])
def test_a_failure_of_its_own_is_no_outage(answers, code, said):
    answers += [(code, "", said)]
    with pytest.raises(SystemExit, match=f"pip-audit failed \\({code}\\): {said}") as failure:
        audit.audit([])
    assert failure.value.code


# Training on two ranks, for real: each sample once an epoch, equal batches, pixels in memory once, a kill told.


@pytest.mark.exhaustive
def test_two_ranks_share_each_epoch_and_the_memory_of_its_pixels(tmp_path):
    make_set(tmp_path)
    found = check(tmp_path, 2, "BatchLoader")
    assert found["each_once"]
    assert found["kill_named"]
    assert found["batches_of_a_rank"] == [80]
    assert found["pixels_pss_mb"] == pytest.approx(found["pixels_mb"], rel=0.05)


# Tests that measure run alone, and only they.

ALONE = """
import pathlib, time, pytest
HERE, NAME, OTHER = pathlib.Path(__file__).parent, {name!r}, {other!r}
MARKS = ["alone", "cuda", "cuda", "alone"]

def seen_as(kind):
    own, seen, end = HERE / f"{{NAME}} {{kind}}.in", set(), time.monotonic() + 0.2
    own.touch()
    while time.monotonic() < end:
        seen.update(path.name for path in HERE.glob("*.in"))
        time.sleep(0.01)
    own.unlink()
    return seen

def test_two_meet():
    (HERE / NAME).touch()
    end = time.monotonic() + 60
    while not (HERE / OTHER).exists():
        assert time.monotonic() < end
        time.sleep(0.01)

@pytest.mark.parametrize("number", [pytest.param(n, marks=getattr(pytest.mark, mark)) for n, mark in enumerate(MARKS)])
def test_nobody_else(number):
    assert seen_as("alone") == {{f"{{NAME}} alone.in"}}

@pytest.mark.parametrize("number", range(3))
def test_nobody_alone(number):
    assert not [name for name in seen_as("shared") if "alone" in name]
"""


@pytest.mark.exhaustive
def test_nothing_runs_beside_a_test_that_measures(tmp_path):
    pytest.importorskip("xdist")
    pytest.importorskip("fcntl", reason="this system has no file locks")
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    for name, other in ["ab", "ba"]:
        (tmp_path / f"test_{name}.py").write_text(ALONE.format(name=name, other=other))
    options = ["-q", "-c", str(REPO / "pyproject.toml"), f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "2", "--dist", "loadfile", "."],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"^16 passed", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr
