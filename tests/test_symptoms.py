"""The pages of the guide by symptom: each script shows its symptom, and no longer does after the change of its page.

A page has its blocks in this order: the change as a diff, the script `train.py` in Python that it is made to, one
command or several, what they print before the change, and what after it. A page of sums has Python blocks alone, which
print something, or none.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import course
from tests.pages import SYMPTOM_INDEX, SYMPTOMS, blocks
from tests.paths import REPO

pytestmark = pytest.mark.exhaustive

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
_CUT = "-- commands --"  # between a script and its commands, which one diff may change both
SCRIPTS = [name for name, path in SYMPTOMS.items() if blocks(path, "diff")]
# What these print does not depend on how fast they run.
UNTIMED = {"bus_error", "hangs", "memory_grows", "same_augmentation", "too_many_open_files"}
SUMS = [name for name, path in SYMPTOMS.items() if blocks(path, "python") and not blocks(path, "diff")]


def apply(diff, text):
    """The text after the diff, whose lines without a + stand in the text: each next to the one before, or only once."""
    lines, place, is_anchored = text.splitlines(), 0, False
    for line in diff.splitlines():
        sign, rest = line[:1], line[1:]
        if sign == "+":
            lines.insert(place, rest)
            place += 1
        else:
            if not (is_anchored and lines[place : place + 1] == [rest]):
                assert lines.count(rest) == 1, f"{lines.count(rest)} lines are {rest!r}"
                place = lines.index(rest)
            is_anchored = True
            if sign == "-":
                del lines[place]
            else:
                place += 1
    return "\n".join(lines) + "\n"


def flat(text):
    """In one line, without the bars."""
    return " ".join(text.replace("#", " ").split())


def entries(text):
    """What a block shows, line by line: a line that begins with a blank goes on from the one before."""
    return [flat(entry) for entry in re.split(r"\n(?! )", text.strip())]


def masked(entry):
    return _NUMBER.sub("0", entry)


def find(entry, printed):
    """The numbers of an entry where it is printed, whatever they are; None if it is not. `...` stands for anything."""
    words = (re.escape(part) for part in _NUMBER.split(entry))
    pattern = rf"({_NUMBER.pattern})".join(words).replace(re.escape("..."), ".*?")
    found = re.search(pattern, flat(printed))
    return None if found is None else numbers(found.groups())


def numbers(texts):
    return [float(text.replace(",", "")) for text in texts]


def check(block, other, printed):
    """A run prints what its block shows.

    Numbers differ from run to run. Where the other block has the same line with other numbers, those that differ by
    half and more are nearer to those of the block than to those of the other.
    """
    others = {masked(entry): numbers(_NUMBER.findall(entry)) for entry in entries(other.text)}
    for entry in entries(block.text):
        found = find(entry, printed)
        assert found is not None, f"not printed: {entry}\n{printed}"
        own = numbers(_NUMBER.findall(entry))
        for number, here, there in zip(found, own, others.get(masked(entry), own), strict=True):
            if abs(here - there) >= 0.5 * max(here, there) > 0:
                said = f"{number:g} is not nearer to {here:g} than to {there:g}: {entry}\n{printed}"
                assert abs(number - here) < abs(number - there), said


def test_numbers_that_a_change_halves_are_on_their_side():
    before, after = (type("Block", (), {"text": text}) for text in ("96 of 128 repeat\n", "0 of 128 repeat\n"))
    check(before, after, "90 of 512 repeat")
    with pytest.raises(AssertionError, match="nearer to 0 than to 96"):
        check(after, before, "96 of 128 repeat")
    with pytest.raises(AssertionError, match="not printed"):
        check(before, after, "96 of 128 differ")


class TestPages:
    def test_each_is_named_in_the_index(self):
        listed = re.findall(r"\]\(symptoms/(\w+)\.md\)", SYMPTOM_INDEX.read_text())
        assert set(SYMPTOMS) <= set(listed)
        assert len(listed) == len(set(listed))

    @pytest.mark.parametrize("name", SCRIPTS)
    def test_it_has_its_blocks_and_its_change_fits_its_script(self, name):
        path = SYMPTOMS[name]
        order = re.findall(r"^```(\w*)\n.*?^```$", path.read_text(), re.DOTALL | re.MULTILINE)
        assert [language or "commands" for language in order[:5]] == ["diff", "python", "commands", "text", "text"]
        before, after = versions(name)
        assert before != after
        [script, _] = after.split(f"{_CUT}\n")
        compile(script, f"{name}.md", "exec")


def versions(name):
    """The script and the commands of a page, before and after its change."""
    path = SYMPTOMS[name]
    text = f"{blocks(path, 'python')[0].text}{_CUT}\n{blocks(path, '')[0].text}"
    return text, apply(blocks(path, "diff")[0].text, text)


@pytest.fixture
def place(tmp_path, photo_set, monkeypatch):
    """The current folder, with `photos`: 480 in class folders, of which only 24 differ."""
    monkeypatch.chdir(tmp_path)
    for photo in sorted(photo_set.rglob("*.jpg")):
        folder = tmp_path / "photos" / photo.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(20):
            os.link(photo, folder / f"{photo.stem}_{number:02}.jpg")
    return tmp_path


@pytest.fixture
def bucket(place, monkeypatch):
    """A distant S3 server that `s3://bucket/photos` leads to, with half of the photos."""
    pytest.importorskip("s3fs", reason='s3fs is not installed: python -m pip install -e ".[s3]"')
    for photo in (place / "photos").rglob("*_1?.jpg"):
        photo.unlink()
    (place / "bucket").mkdir()
    (place / "photos").rename(place / "bucket" / "photos")
    with course.serve_s3({"bucket": place / "bucket"}, latency_ms=100) as options:
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
        yield


def run(version):
    """The exit status of a script's commands, and what they print on either stream."""
    script, commands = version.split(f"{_CUT}\n")
    Path("train.py").write_text(script)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPO)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", "-c", commands], env=environment, **output)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in UNTIMED else pytest.mark.alone) for name in SCRIPTS]
)
def test_a_page_shows_its_symptom_and_cures_it(name, place, request):
    if "s3://" in SYMPTOMS[name].read_text():
        request.getfixturevalue("bucket")
    shown, cured = blocks(SYMPTOMS[name], "text")[:2]
    before, after = versions(name)
    if "unshare" in before and subprocess.run(["unshare", "--mount", "--map-root-user", "true"]).returncode:
        pytest.skip("a /dev/shm of its own takes mounts, which are not allowed here")
    _, printed = run(before)
    check(shown, cured, printed)
    status, printed = run(after)
    assert status == 0, printed
    check(cured, shown, printed)
    gone = set(map(masked, entries(shown.text))) - set(map(masked, entries(cured.text)))
    assert [entry for entry in gone if find(entry, printed) is not None] == [], printed


@pytest.mark.parametrize("name", SUMS)
def test_the_sums_of_a_page_run(name, place, capsys):
    names = {"__name__": "__main__"}
    for block in blocks(SYMPTOMS[name], "python"):
        code = compile("\n" * (block.line - 1) + block.text, f"{name}.md", "exec")
        exec(code, names)  # noqa: S102 - our own text
        assert capsys.readouterr().out
