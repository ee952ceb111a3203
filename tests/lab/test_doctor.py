"""labkit doctor: what it reports about this machine."""

from email.message import Message

from typer.testing import CliRunner

from labkit.app import cli, doctor, tour


def test_doctor_reports_everything(lab):
    output = CliRunner().invoke(cli.app, ["doctor", "--scale", "ci"]).output
    for subject in (
        "usable cores", "bound by", "memory", "is missing: python -m labkit tour", "GPU", "torch", "decoders",
        "JPEGs in part", "extra 'test'",
    ):  # fmt: skip
        assert subject in output
    tour.make_scale_photos()
    output = CliRunner().invoke(cli.app, ["doctor"]).output
    assert " disk" in output


def test_doctor_names_what_is_missing(monkeypatch):
    about = Message()
    for requirement in ('surely-missing>=1 ; extra == "peers"', "numpy", 'pytest ; extra == "test"'):
        about["Requires-Dist"] = requirement
    about["Provides-Extra"], about["Provides-Extra"] = "test", "peers"
    monkeypatch.setattr(doctor, "metadata", lambda name: about)
    assert doctor.extras() == {"peers": 'lacks surely-missing: python -m pip install -e ".[peers]"', "test": "complete"}
