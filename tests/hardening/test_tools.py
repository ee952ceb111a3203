"""The tests' own tools: the audit, training on several ranks, resuming after a kill, and tests that run alone."""

import json
import re
import subprocess
import sys

import pytest

from tests.hardening import audit, resume
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


def dependencies(*packages: dict) -> tuple[int, str, str]:
    return 0, json.dumps({"dependencies": [{"name": "urllib3", "version": "1", **package} for package in packages]}), ""


KNOWN, UNKNOWN = dependencies({"vulns": [{"id": "GHSA-1", "fix_versions": []}]}), {"skip_reason": "not found"}
OUTCOMES = {
    "packages that the service does not know are counted": (
        [KNOWN, dependencies({"vulns": []}, UNKNOWN)], "no known vulnerability in 1 packages; 1 are not known",
    ),
    "a service that has nothing against a bad package is none": (
        [dependencies({"vulns": []})], "NOTHING WAS AUDITED",
    ),
    "a service that does not know a bad package is none": ([dependencies(UNKNOWN)], "NOTHING WAS AUDITED"),
    "wrong arguments are no outage": ([(2, "", "unrecognized arguments")], "failed (2): unrecognized arguments"),
    "a bug is no outage": ([(1, "", "Traceback: KeyError")], "failed (1): Traceback: KeyError"),
    "a crash is no outage": ([(-11, "", "")], "failed (-11): it said nothing"),
}  # fmt: skip


@pytest.mark.parametrize(("answers", "said"), OUTCOMES.values(), ids=OUTCOMES)
def test_what_pip_audit_answers_is_told(answers, said, monkeypatch, capsys):
    replies = iter(answers)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, *next(replies)))
    try:
        assert audit.audit([]) == 0
        told = capsys.readouterr().out
    except SystemExit as failure:
        told = failure.code
    assert said in told


# Training on two ranks, for real: each sample once an epoch, equal batches, pixels in memory once, a kill told.


@pytest.mark.exhaustive
def test_two_ranks_share_each_epoch_and_the_memory_of_its_pixels(tmp_path):
    make_set(tmp_path)
    found = check(tmp_path, 2, "BatchLoader")
    assert found["each_once"]
    assert found["kill_named"]
    assert found["batches_of_a_rank"] == [80]
    assert found["pixels_pss_mb"] == pytest.approx(found["pixels_mb"], rel=0.05)


# A loader that is killed goes on in a new process with what has not come.


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in resume.KINDS if "processes" not in kind])  # which load torch anew
def test_a_killed_loader_goes_on_in_a_new_process(tmp_path, kind):
    if kind.startswith("read_shards"):
        pytest.importorskip("torchdata", reason="StatefulDataLoader is torchdata's")
    resume.make_sources(tmp_path)
    found = resume.check_kind(kind, tmp_path, n_kills=3, seed=0)
    assert (found["kills"] >= 3, found["wrong_epochs"]) == (True, 0)


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
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure, pytest_sessionfinish\n")
    for name, other in ["ab", "ba"]:
        (tmp_path / f"test_{name}.py").write_text(ALONE.format(name=name, other=other))
    options = ["-q", "-c", str(REPO / "pyproject.toml"), f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "2", "--dist", "loadfile", "."],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"^16 passed", ran.stdout, re.MULTILINE), ran.stdout + ran.stderr
