"""Fuzz targets that are handed a tar, or the index that labkit keeps beside one."""

import bz2
import gzip
import lzma
import os
import re
import tarfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import labkit as lk
from labkit import TarStore
from labkit.data.extract import WORK, extract_tars
from labkit.data.stores import is_image
from labkit.data.tar import SUFFIX
from labkit.errors import ItemErrors, TarError
from labkit.util.arguments import MAX_FILE_VARIABLE
from tests.hardening.fuzz.oracle import empty_folder, may_refuse, seeded, split_options, write_input
from tests.hardening.inputs import fix_tar, image_bytes, sparse_member, tar_bytes
from tests.tars import Member, member

_FIX, _GZIP, _BZIP2, _XZ, _SKIP = 1, 2, 4, 6, 8  # options; with _FIX, checksums are made right after each mutation
_PACK = {0: bytes, _GZIP: gzip.compress, _BZIP2: bz2.compress, _XZ: lzma.compress}
_SMALL = 1 << 22  # bytes: members that are compared
_limited_files = patch.dict(os.environ, {MAX_FILE_VARIABLE: str(_SMALL / 1e6)})  # so that an input is bounded in time


def _tar(*members: Member, **options) -> bytes:
    """A tar without the zeros that fill its last record: small inputs fuzz faster."""
    tar = tar_bytes(*members, **options)
    return tar[: -(-len(tar.rstrip(b"\0")) // 512) * 512] + bytes(1024)


@cache
def tar_seeds() -> dict[str, bytes]:
    """One of each kind of member and of header; all but one with right checksums after each mutation."""
    links = [member("b.jpg", kind=tarfile.SYMTYPE, link="a.jpg"), member("c.jpg", kind=tarfile.LNKTYPE, link="a.jpg")]
    old = {"GNU.sparse.size": "2000", "GNU.sparse.numblocks": "1", "GNU.sparse.offset": "7", "GNU.sparse.numbytes": "3"}
    gnu_sparse = bytearray(_tar(member("s.jpg", b"123")))  # 2000 bytes, of which 3 at 512 are stored
    gnu_sparse[156:157], gnu_sparse[386:410] = b"S", b"00000001000\x0000000000003\0"
    gnu_sparse[483:495] = b"00000003720\0"
    tars = {
        "files": _tar(member("a.jpg", b"123"), member("./b/c.png", b"4" * 600), member("README", b"5")),
        "links": _tar(member("a.jpg", b"123"), *links),
        "folder": _tar(member("b", kind=tarfile.DIRTYPE), member("b/a.jpg", b"1"), member("a.jpg", b"2")),
        "gnu long": _tar(member("d" * 120 + "/e.jpg", b"1"), format=tarfile.GNU_FORMAT),
        "pax": _tar(member("ü" * 80 + ".jpg", b"1"), format=tarfile.PAX_FORMAT),
        "global pax": _tar(member("a.jpg", b"1"), format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}),
        "pax size": _tar(member("a.jpg", b"1", pax_headers={"size": "1"}), format=tarfile.PAX_FORMAT),
        "pax sparse 1.0": _tar(sparse_member("s.jpg", 9, 0, 9, b"x" * 9)),
        "pax sparse 0.0": _tar(member("s.jpg", b"123", pax_headers=old), format=tarfile.PAX_FORMAT),
        "gnu sparse": fix_tar(bytes(gnu_sparse)),
        "device": _tar(member("a", kind=tarfile.CHRTYPE), member("p", kind=tarfile.FIFOTYPE)),
        "up": _tar(member("../a.jpg", b"1"), member("/b.jpg", b"2")),
        "through a link": _tar(member("l", kind=tarfile.SYMTYPE, link=".."), member("l/a.jpg", b"1")),
        "empty": bytes(1024),
    }
    tars |= {"cut": tars["files"][:700], "zeros, and more": tars["empty"] + tars["files"]}
    return {"plain": b"\0" + tars["files"], **{name: bytes([_FIX]) + tar for name, tar in tars.items()}}


def _payload(data: bytes) -> tuple[int, bytes]:
    options, tar = split_options(data)
    return options, fix_tar(tar) if options & _FIX else tar


def _open(path: Path, mode: str = "r") -> tarfile.TarFile:
    return tarfile.open(path, mode, encoding="utf-8", errors="surrogateescape")


@seeded(tar_seeds)
def tar_index(data: bytes) -> None:
    """A tar is refused with TarError, or its index lists what `tarfile` lists, and both read the same bytes."""
    path = write_input("x.tar", _payload(data)[1])
    path.with_name(path.name + SUFFIX).unlink(missing_ok=True)
    with may_refuse(TarError, names=path):
        ours = lk.TarStore(path)
        found = list(ours.names())
        with _open(path, "r:") as theirs:
            try:
                theirs.getmembers()
            except tarfile.ReadError:  # the padding of the last member is cut, of which labkit warns
                return
            last = {re.sub(r"^(\./+)+", "", info.name): info for info in theirs}  # devices, too
            infos = {name: info for name, info in last.items() if not (info.isdir() or info.isdev())}
            assert sorted(infos) == found, (sorted(infos), found)
            assert not path.read_bytes()[theirs.offset :].strip(b"\0"), "the tar goes on where tarfile stops"
            for name in found:
                _compare_member(ours, theirs, infos[name], name)


def _compare_member(ours: TarStore, theirs: tarfile.TarFile, info: tarfile.TarInfo, name: str) -> None:
    try:
        read = ours.read(name)
    except (KeyError, TarError) as error:  # also of links and holes that only tarfile follows
        if "is a link to a file that is not in" in str(error) or "is stored as a sparse file" in str(error):
            return
        raise
    try:
        file = theirs.extractfile(info)
        expected = file and file.read()
    except (KeyError, RecursionError):  # a link that leads nowhere
        expected = None
    assert read == expected, (name, read, expected)


def stored_index_seeds() -> dict[str, bytes]:
    """An index file, of another time."""
    path = write_input("seed.tar", tar_seeds()["files"][1:])
    lk.TarStore(path).keys()
    return {"whole": path.with_name(path.name + SUFFIX).read_bytes()}


@seeded(stored_index_seeds)
def stored_index(data: bytes) -> None:
    """A damaged index file is ignored."""
    path = write_input("i.tar", tar_seeds()["files"][1:])
    path.with_name(path.name + SUFFIX).write_bytes(data)
    store = lk.TarStore(path)
    assert {name: len(store.read(name)) for name in store.names()} == {"README": 1, "a.jpg": 3, "b/c.png": 600}


@seeded(tar_seeds)
def tar_extract(data: bytes) -> None:
    """A tar, compressed or not, is extracted completely and only below its folder, or refused with the reason."""
    options, tar = _payload(data)
    top = empty_folder("extract")
    archive, root = top / "x.tar", top / "root"
    archive.write_bytes(_PACK[options & 6](tar))
    with may_refuse(OSError, names=root):  # too little room
        try:
            extract_tars(archive, root, engine="threads", num_workers=0, progress=False)
        except ItemErrors as errors:
            [(key, text)] = errors.failures.items()
            kinds = ("UnsafeTarError", "TarError", "ValueError", "OSError", "FileExistsError")
            assert (key, text.partition(": ")[0] in kinds) == (str(archive), True), text
            assert str(archive) in text or str(root) in text, text
            assert not (root / "x").exists(), "half of a refused archive is there"
    assert sorted(os.listdir(top)) in (["root", "x.tar"], ["x.tar"])
    if root.exists():
        assert set(os.listdir(root)) <= {WORK, "x"}
    if (root / "x").exists():
        inside = os.path.realpath(root / "x")
        for path in (root / "x").rglob("*"):
            real = os.path.realpath(path)
            assert os.path.commonpath([real, inside]) == inside, real
            assert real != inside or path.is_symlink(), real
        with _open(archive) as theirs:
            missing = [info.name for info in theirs if not os.path.lexists(root / "x" / info.name)]
        assert not missing, missing


@cache
def shard_seeds() -> dict[str, bytes]:
    """Shards with whole samples, and with each thing wrong that can be wrong in one; compressed ones too."""
    image = image_bytes((3, 2))
    pairs = {
        "two samples": [("a/x.cls", b"0"), ("a/x.png", image), ("b/y.cls", b"12"), ("b/y.png", image)],
        "no label": [("a/x.png", image)], "label no number": [("x.cls", b"cat"), ("x.png", image)],
        "label too large": [("x.cls", b"9" * 30), ("x.png", image)], "no image": [("x.cls", b"0"), ("x.txt", b"0")],
        "caption": [("x.txt", b"a dog"), ("x.json", b"{}"), ("x.png", image)], "caption in Latin": [("x.txt", b"\xe9")],
        "numbers": [("x.json", b"[1, 0.5]"), ("x.png", image)], "no JSON": [("x.json", b"[1, "), ("x.png", image)],
        "broken image": [("x.cls", b"0"), ("x.png", image[:40])],
        "twice": [("x.cls", b"0"), ("x.cls", b"0"), ("x.png", image)],
        "odd suffixes": [("x.__bad__", b"1"), ("x.__key__", b"1"), ("x.cls", b"0"), ("x.png", image)],
        "odd names": [("v1.0\n/x.png", image), (".png", image), ("x", b"0"), ("x.cls\n", b"0")],
    }  # fmt: skip
    tars = {name: _tar(*(member(*pair) for pair in found)) for name, found in pairs.items()}
    seeds = {f"{bits} {name}": bytes([bits]) + tar for bits in (_FIX, _FIX | _SKIP) for name, tar in tars.items()}
    return seeds | {f"packed {bits}": bytes([bits | _FIX]) + tars["two samples"] for bits in (_GZIP, _BZIP2, _XZ)}


@seeded(shard_seeds)
def shards(data: bytes) -> None:
    """Every image of a shard is yielded with its label, or an error names the shard; none is skipped silently."""
    options, tar = _payload(data)
    packed = _PACK[options & 6](tar)
    path = write_input("x.tar", packed if not options & 16 else packed[: len(packed) // 2])
    with may_refuse(TarError, lk.DecodeError, ValueError, names=path), _limited_files:
        dataset = lk.read_shards(str(path), decoder="pil", on_error="skip" if options & _SKIP else "raise")
        samples = [(image.ndim, not isinstance(label, int) or -(2**63) <= label < 2**63) for image, label in dataset]
        assert set(samples) <= {(3, True)}
        try:
            with _open(path) as theirs:
                names = [info.name.rpartition("/") for info in theirs if not info.isdir() and is_image(info.name)]
        except MemoryError:  # tarfile gives an xz stream all that its header asks for
            return
        n_samples = len({(folder, name.partition(".")[0]) for folder, _, name in names})
        assert len(samples) + len(dataset.skipped) >= n_samples, names
