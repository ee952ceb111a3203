"""The audit of installed packages: fails on a vulnerable one, and says so where nobody answers."""

import json
import subprocess

import pytest

from tests.hardening import audit
from tests.scripted_server import Handler, serve_script

pytest.importorskip("pip_audit", reason='pip-audit is not installed: python -m pip install -e ".[test]"')


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


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve_script(Service) as server:
        yield ["-s", "osv", "--osv-url", f"{server.url}/"]


@pytest.mark.exhaustive
def test_a_vulnerable_package_fails_the_audit(service, tmp_path, capsys, monkeypatch):
    for name in ("goodpkg", "badpkg"):
        audit.pretend_to_install(tmp_path, name, "1.0")
    monkeypatch.setattr(audit, "_HERE", ["--path", str(tmp_path)])
    assert audit.audit(service) == 1
    assert capsys.readouterr().out == "audit: badpkg 1.0 has GHSA-aaaa-bbbb-cccc; fixed in: 9.9\n"


@pytest.mark.parametrize("answer", [{"vulns": []}, {"skip_reason": "not found"}])
def test_a_service_that_knows_nothing_is_none(capsys, monkeypatch, answer):
    monkeypatch.setattr(audit, "_run_pip_audit", lambda *arguments: [{"name": "urllib3", **answer}])
    assert audit.audit([]) == 0
    assert "NOTHING WAS AUDITED" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_nobody_answers(capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert audit.audit(["-s", "osv", "--osv-url", "http://127.0.0.1:9/"]) == 0
    assert "NOTHING WAS AUDITED" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "said"), [(2, "unrecognized arguments"), (1, "Traceback: KeyError"), (-11, "")])
def test_a_failure_of_its_own_is_no_outage(monkeypatch, code, said):
    done = subprocess.CompletedProcess([], code, "", said)
    monkeypatch.setattr(audit.subprocess, "run", lambda *arguments, **options: done)
    with pytest.raises(SystemExit, match=f"pip-audit failed \\({code}\\): {said}") as failure:
        audit.audit([])
    assert failure.value.code


def test_packages_that_the_service_does_not_know(capsys):
    packages = [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "unknown"}]
    assert audit._report(packages) == 0
    assert "1 packages; 1 are not known" in capsys.readouterr().out
