"""`labkit plan`: its options, its page, and mistakes."""

import json

import pytest
from typer.testing import CliRunner

import labkit as lk
from labkit.app.cli import app
from labkit.planning import formulas
from labkit.planning.formulas import Estimate, LoaderCosts

OWN = ["--images-per-s", "1000", "--cores", "4", "--cpu-ms", "2"]


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


class TestPlan:
    def test_the_page(self, tmp_path):
        result = run(
            "--gpu", "h100", "--n-gpus", "8", "--cpu-ms", "1:2.4", "--storage", "s3", "--json", str(tmp_path / "p.json")
        )
        assert result.exit_code == 0, result.output
        assert "8 GPUs on 1 node, ResNet-50, H100 SXM" in result.output
        assert "Little's law: requests/s x time of a request" in result.output
        assert "training_results_v4.0" in result.output
        found = json.loads((tmp_path / "p.json").read_text())
        expected = lk.plan(gpu="h100", n_gpus=8, cpu_ms_per_image=(1, 2.4), storage="s3")
        assert found == json.loads(json.dumps(expected.to_dict()))

    def test_measured_costs_are_kept_and_read(self, tmp_path, monkeypatch):
        found = LoaderCosts({"photos": {"cpu_ms_per_image": Estimate(3, source="a run", kind="measured here")}})
        monkeypatch.setattr(formulas, "loader_costs", lambda source: found)
        path = str(tmp_path / "costs.json")
        measured = run("--images-per-s", "100", "--cores", "2", "--measure", "photos", "--costs", path)
        assert f"wrote {path}" in measured.output.replace("\n", "")
        again = run("--images-per-s", "100", "--cores", "2", "--costs", path)
        assert "cpu_ms_per_image: a run" in again.output
        assert again.output in measured.output

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ([], "labkit: the demand of a GPU is not known"),
            ([*OWN, "--cpu-ms", "fast"], "--cpu-ms must be a number, LOW:HIGH or LOW:VALUE:HIGH, got 'fast'"),
            ([*OWN, "--kb", "1:2:3:4"], "--kb must be a number"),
            ([*OWN, "--storage", "tape"], "storage must be one of"),
            ([*OWN, "--costs", "/nowhere.json"], "No such file"),
            (["--watched", "/nowhere.json"], "No such file"),
            (["--gpu", "T4"], "gpu must name one of"),
        ],
    )
    def test_mistakes_are_one_line(self, arguments, says):
        result = run(*arguments)
        assert result.exit_code == 2
        assert says in result.output
        assert result.output.count("\n") == 1
