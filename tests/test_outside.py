"""The check that a run of pytest changes nothing outside its own folders."""

import os
import subprocess
import sys

from tests.paths import REPO

LEFT = {
    "(home / 'results').mkdir()": "new: {home}/results",
    "(home / 'grows').write_text('longer')": "changed: {home}/grows",
    "(home / 'goes').unlink()": "gone: {home}/goes",
    "(home / 'photos/camera-2/0.jpg').write_text('longer')": "changed: {home}/photos/camera-2/0.jpg",
    "(pathlib.Path.home() / 'notes').mkdir()": "new: {user}/notes",
    "(pathlib.Path.home() / '.cache/mine').mkdir()": "new: {user}/.cache/mine",
    "tempfile.mkdtemp(prefix='', suffix='-kept', dir=None)": "-kept in TMPDIR",
}
ALLOWED = "(home / 'photos/camera-3').mkdir(); (home / 'photos/camera-3/0.jpg').touch(); (tmp_path / 'own').mkdir()"


def test_what_a_run_leaves_is_named_and_fails_it(tmp_path):
    home, user, temporary = (tmp_path / name for name in ("home", "user", "temporary"))
    for folder in (home / "photos" / "camera-2", user / ".cache", temporary):
        folder.mkdir(parents=True)
    for path in (home / "grows", home / "goes", home / "photos" / "camera-2" / "0.jpg"):
        path.write_text("first")
    body = "\n    ".join([ALLOWED, *LEFT])
    (tmp_path / "test_inner.py").write_text(
        "import os, pathlib, tempfile\nhome = pathlib.Path(os.environ['LABKIT_HOME'])\n"
        f"def test_inner(tmp_path):\n    {body}\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {
        **os.environ, "HOME": str(user), "LABKIT_HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(REPO),
        "PYTEST_DEBUG_TEMPROOT": str(temporary), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "tests.outside", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed" in done.stdout
    told = done.stdout.partition("changed outside of pytest's folders")[2]
    expected = [line.format(home=home, user=user) for line in LEFT.values()]
    assert done.returncode == 1
    assert [line for line in expected if line not in told] == []
    assert sum(line.startswith(("new: ", "changed: ", "gone: ")) for line in told.splitlines()) == len(expected)
