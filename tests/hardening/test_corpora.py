"""The script for collections of foreign files: content with sound and damaged ones, and not with wrong pixels."""

import shutil
import tarfile

from PIL import ImageOps

import labkit as lk
from tests.hardening import corpora


def collection(root, photo_set):
    (root / "cat").mkdir(parents=True)
    for number, key in enumerate(lk.FolderStore(photo_set).keys()[:2]):
        shutil.copy(photo_set / key, root / f"cat/{number}.jpg")
    (root / "cat/cut.jpg").write_bytes((root / "cat/0.jpg").read_bytes()[:900])
    with tarfile.open(root / "photos.tar", "w") as tar:
        tar.add(root / "cat", "cat")
    return root


def test_sound_and_damaged_files_make_no_fault(photo_set, tmp_path):
    counts, faults = corpora.check(collection(tmp_path / "set", photo_set))
    assert faults == []
    assert (counts["images"], counts["decoded"], counts["refused by all decoders and Pillow"]) == (3, 2, 1)
    assert (counts["tars"], counts["skipped by BatchLoader"]) == (1, 1)


def test_what_differs_is_named(photo_set, tmp_path, monkeypatch):
    root = collection(tmp_path / "set", photo_set)
    monkeypatch.setattr(ImageOps, "exif_transpose", ImageOps.flip)  # another oracle
    _, faults = corpora.check(root)
    assert {fault.partition(":")[0] for fault in faults} == {"cat/0.jpg", "cat/1.jpg"}
