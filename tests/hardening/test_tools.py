"""The tests' own tools: the audit, training on several ranks, and resuming after a kill."""

import json
import subprocess

import pytest

from tests.hardening import audit, resume
from tests.hardening.ranks import check, make_set

# The audit fails on a vulnerable package, and says so where nobody answers.


def dependencies(*packages: dict) -> tuple[int, str, str]:
    return 0, json.dumps({"dependencies": [{"name": "urllib3", "version": "1", **package} for package in packages]}), ""


KNOWN, UNKNOWN = dependencies({"vulns": [{"id": "GHSA-1", "fix_versions": []}]}), {"skip_reason": "not found"}
OUTCOMES = {
    "packages that the service does not know are counted": (
        [KNOWN, dependencies({"vulns": []}, UNKNOWN)], "no known vulnerability in 1 packages; 1 are not known",
    ),
    "a service that does not know a bad package is none": ([dependencies(UNKNOWN)], "NOTHING WAS AUDITED"),
    "wrong arguments are no outage": ([(2, "", "unrecognized arguments")], "failed (2): unrecognized arguments"),
    "a bug is no outage": ([(1, "", "Traceback: KeyError")], "failed (1): Traceback: KeyError"),
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
@pytest.mark.parametrize("kind", resume.KINDS)
def test_a_killed_loader_goes_on_in_a_new_process(tmp_path, kind):
    if kind.startswith("read_shards"):
        pytest.importorskip("torchdata", reason="StatefulDataLoader is torchdata's")
    resume.make_sources(tmp_path)
    found = resume.check_kind(kind, tmp_path, n_kills=3, seed=0)
    assert (found["kills"] >= 3, found["wrong_epochs"]) == (True, 0)
