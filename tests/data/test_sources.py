"""Sources that are no places of image files: mappings, Parquet files, folders of shards."""

import io
import json
import pickle
import warnings

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch
import webdataset

import labkit as lk
from labkit.data.labels import LabelWarning
from tests.memory_store import MemoryStore
from tests.shards import noisy, write
from tests.tars import listed, make_tar

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

STORE = noisy(10)
FILES = [STORE.files[key] for key in sorted(STORE.files)]
CLASSES = ["a", "b"]
LABELS = [CLASSES.index(key[0]) for key in sorted(STORE.files)]
IMAGES = {"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)}


def read_all(store):
    return list(map(store.read, store.keys()))


def cells(files=FILES, path="{}.jpg"):
    return [{"bytes": data, "path": path and path.format(row)} for row, data in enumerate(files)]


def table_of(features=IMAGES, **columns):
    columns = columns or {"image": cells(), "label": LABELS}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    table_of().to_parquet(str(root / "set.parquet"))
    write(STORE, root / "shards", max_count=4)
    return root


@pytest.fixture(params=["mapping", "Parquet", "shards"])
def source(request, place):
    """Each source of the same ten images, in the same order."""
    return {
        "mapping": {key: STORE.files[key] for key in sorted(STORE.files)}, "Parquet": str(place / "set.parquet"),
        "shards": place / "shards",
    }[request.param]  # fmt: skip


class TestEverySource:
    def test_is_a_store_of_its_files_and_travels(self, source):
        store = lk.open_store(source)
        keys = list(store.keys())
        assert keys == sorted(set(keys))
        assert all(key.endswith(".jpg") for key in keys)
        for each in (store, pickle.loads(pickle.dumps(store))):
            assert [each.read(key) for key in keys] == FILES
            assert f"{type(store).__name__}(" in repr(each)
            assert "10 images" in repr(each)
            for key in ("no.jpg", "000099.jpg", "000001.png", "", "-1.jpg", "000001", "\ud800"):
                with pytest.raises(KeyError, match=r"is not in|is no image") as failure:
                    each.read(key)
                assert repr(key) in str(failure.value)

    @pytest.mark.parametrize(("num_workers", "method"), [(0, None), (2, "forkserver")])
    def test_gives_data_sets_their_images_and_labels(self, source, num_workers, method):
        dataset = lk.ImageDataset(source, decoder="pil")
        [(images, labels)] = lk.make_loader(
            dataset, num_workers=num_workers, start_method=method, oversubscribe=num_workers > 0
        )
        expected = [np.asarray(PIL.Image.open(io.BytesIO(data))) for data in FILES]
        assert (images.permute(0, 2, 3, 1).numpy() == np.stack(expected)).all()
        assert labels.tolist() == LABELS
        assert (dataset.classes, dataset.labels.tolist()) == (CLASSES, LABELS)

    def test_feeds_batch_loader(self, source):
        loader = lk.BatchLoader(source, size=32, batch_size=5, num_threads=4, reads_in_flight=4)
        expected = lk.BatchLoader(STORE, size=32, batch_size=5)
        for (images, labels), (others, others_labels) in zip(loader, expected, strict=True):
            assert torch.equal(images, others)
            assert torch.equal(labels, others_labels)
        assert loader.classes == CLASSES

    def test_is_taken_wherever_a_store_is(self, source, tmp_path):
        pixels = lk.PixelStore.build(source, tmp_path / "set.pixels", short_side=32, progress=False)
        oracle = lk.PixelStore.build(STORE, tmp_path / "oracle.pixels", short_side=32, progress=False)
        assert [pixels.labels.tolist(), pixels.classes] == [LABELS, CLASSES]
        assert all(torch.equal(pixels[row][0], oracle[row][0]) for row in range(10))
        assert [image.mode for image, _ in lk.PILDataset(source)] == ["RGB"] * 10
        written = write(source, tmp_path / "shards")
        assert [label for _, label in lk.read_shards(written)] == LABELS
        lk.tile_jpegs(source, tmp_path / "tiled", short_side=32, progress=False)
        assert len(lk.open_store(tmp_path / "tiled").keys()) == 10


class TestMappings:
    def test_may_be_of_any_kind_and_hold_any_kind_of_bytes(self):
        """In the order of the mapping, which whoever made it knows."""
        files = pd.Series({"b": bytearray(FILES[0]), "a.jpg": memoryview(FILES[1]), "c.GIF": b""}).to_dict()
        store = lk.open_store(files, ignore=".gif")
        assert list(store.keys()) == ["b", "a.jpg"]
        assert read_all(store) == FILES[:2]
        assert store.sizes().tolist() == [len(FILES[0]), len(FILES[1])]

    @pytest.mark.parametrize(("files", "error", "said"), [
        ({}, FileNotFoundError, "the mapping holds no image"),
        ({0: b""}, TypeError, "keys must be the images' names, such as 'cat/1.jpg', got 0"),
        ({"a.jpg": "path.jpg"}, TypeError, "'a.jpg' must lead to the bytes of an image file, got str"),
        ({"a.gif": b"", "b.jpg": b""}, ValueError, r"1 image with suffixes that labkit does not read \(1 .gif"),
    ])  # fmt: skip
    def test_of_other_things_are_refused(self, files, error, said):
        store = lk.open_store(files)
        with pytest.raises(error, match=said):
            store.read(store.keys()[0])


class TestTables:
    def test_are_in_the_order_of_their_rows(self, tmp_path):
        rows = [7, 2, 5]
        table_of().select(rows).to_parquet(tmp_path / "set.parquet")
        store = lk.open_store(tmp_path / "set.parquet")
        assert read_all(store) == [FILES[row] for row in rows]
        assert list(store.labels) == [LABELS[row] for row in rows]
        dataset = lk.ImageDataset(store, labels=rows)  # whoever made the table knows their order
        assert dataset.labels.tolist() == rows

    def test_in_another_order_are_other_images(self, tmp_path):
        """For pixels that were built before, and for a training that goes on, although the keys are the same."""
        tables = [tmp_path / "first.parquet", tmp_path / "other.parquet"]
        for path, files in zip(tables, (FILES, FILES[::-1]), strict=True):
            table_of({"image": datasets.Image()}, image=cells(files)).to_parquet(path)
        first, other = (lk.BatchLoader(table, size=8, batch_size=2, classes=[]) for table in tables)
        sizes = [len(data) for data in FILES]
        assert [lk.open_store(table).sizes().tolist() for table in tables] == [sizes, sizes[::-1]]
        next(iter(first))
        with pytest.raises(ValueError, match="the state was taken with keys_crc32"):
            other.load_state_dict(first.state_dict())
        lk.PixelStore.build(tables[0], tmp_path / "p", classes=[], progress=False)
        with pytest.raises(lk.LabkitError, match="is of other images"):
            lk.PixelStore.build(tables[1], tmp_path / "p", classes=[], progress=False)

    def test_have_the_suffixes_of_their_paths_or_bytes(self, tmp_path):
        small = PIL.Image.new("RGB", (4, 4))
        files = []
        for format_ in ("JPEG", "PNG", "WEBP", "PNG"):
            small.save(buffer := io.BytesIO(), format_)
            files.append(buffer.getvalue())
        images = [{"bytes": data, "path": None} for data in files] + [None]
        images[3]["path"] = "named.JPG"
        table = table_of({"image": datasets.Image()}, image=images)
        table.to_parquet(tmp_path / "set.parquet")
        store = lk.open_store(tmp_path / "set.parquet")
        assert list(store.keys()) == ["000000.jpg", "000001.png", "000002.webp", "000003.jpg", "000004"]
        assert list(map(store.read, store.keys()[:4])) == files
        assert (store.labels, store.classes) == (None, None)
        with pytest.raises(KeyError, match=r"'000004' of .* has no image: its row holds no bytes"):
            store.read("000004")

    @pytest.mark.parametrize("column", ["large bytes", "struct"])
    def test_of_plain_bytes_are_read(self, column, tmp_path):
        if column != "struct":
            images = pyarrow.array(FILES, pyarrow.large_binary())
        else:
            images = pyarrow.array(cells(), pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
        made = pyarrow.table({"jpeg": images, "label": ["b", "a"] * 5, "other": [1.5] * 10})
        parquet.write_table(made, tmp_path / "set.parquet", row_group_size=3)
        assert read_all(lk.open_store(tmp_path / "set.parquet")) == FILES
        dataset = lk.ImageDataset(tmp_path / "set.parquet")
        assert (dataset.classes, dataset.labels.tolist()) == (["a", "b"], [1, 0] * 5)

    def test_that_hold_paths_alone_say_so(self, tmp_path):
        made = pyarrow.table({"image": pyarrow.array([{"bytes": None, "path": "/gone/1.jpg"}], pyarrow.struct(
            [("bytes", pyarrow.binary()), ("path", pyarrow.string())]))})  # fmt: skip
        parquet.write_table(made, tmp_path / "set.parquet")
        store = lk.open_store(tmp_path / "set.parquet")
        assert store.sizes().tolist() == [0]
        with pytest.raises(KeyError, match=r"'000000.jpg' of .* has no image: its row holds no bytes"):
            store.read(store.keys()[0])
        parquet.write_table(pyarrow.table({"image": ["/gone/1.jpg"]}), tmp_path / "texts.parquet")
        with pytest.raises(ValueError, match=r"no column of .*Paths are not followed: open the folder of the files"):
            lk.open_store(tmp_path / "texts.parquet")

    def test_leave_out_what_is_ignored_with_its_labels(self, tmp_path):
        images = cells(FILES[:2]) + [{"bytes": FILES[2], "path": "a.gif"}] + cells(FILES[3:4])
        table_of(image=images, label=[0, 1, 0, 1]).to_parquet(table := tmp_path / "set.parquet")
        with pytest.raises(ValueError, match=r"1 image with suffixes that labkit does not read \(1 .gif"):
            lk.open_store(table).keys()
        store = lk.open_store(table, ignore=".gif")
        assert list(store.keys()) == ["000000.jpg", "000001.jpg", "000003.jpg"]
        assert list(store.labels) == [0, 1, 1]
        assert store.read("000003.jpg") == FILES[3]

    def test_with_several_columns_need_a_name(self, tmp_path):
        two = {"fine": datasets.ClassLabel(names=CLASSES), "coarse": datasets.ClassLabel(names=["x"])}
        columns = {"fine": LABELS, "coarse": [0] * 10, "n": list(range(10))}
        features = {"photo": datasets.Image(), "mask": datasets.Image(), **two, "n": datasets.Value("int64")}
        source = tmp_path / "set.parquet"
        table_of(features, photo=cells(), mask=cells(FILES[::-1]), **columns).to_parquet(source)
        with pytest.raises(ValueError, match=r"2 columns hold images \(photo, mask\): name one.*image_column='photo'"):
            lk.open_store(source)
        with pytest.raises(ValueError, match=r"2 columns hold labels \(fine, coarse\): name one.*label_column='fine'"):
            lk.open_store(source, image_column="mask")
        for wrong in ("n", "none"):
            with pytest.raises(ValueError, match="the columns are photo, mask, fine, coarse, n"):
                lk.open_store(source, image_column=wrong)
        with pytest.raises(ValueError, match="no column 'none' for label_column: the columns are"):
            lk.open_store(source, image_column="mask", label_column="none")
        store = lk.open_store(source, image_column="mask", label_column="coarse")
        assert store.read(store.keys()[0]) == FILES[-1]
        assert (list(store.labels), store.classes) == ([0] * 10, ["x"])
        dataset = lk.ImageDataset(lk.open_store(source, image_column="photo", label_column="n"))
        assert (dataset.labels.tolist(), dataset.classes) == (list(range(10)), [])

    def test_without_labels_say_so_as_folders_without_classes_do(self, tmp_path):
        unlabeled = tmp_path / "test.parquet"
        table_of(image=cells(), label=[-1] * 10).to_parquet(unlabeled)  # as in test sets
        with pytest.warns(LabelWarning, match="all labels are 0"):
            assert lk.ImageDataset(unlabeled).labels.tolist() == [0] * 10
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lk.ImageDataset(unlabeled, classes=[])

    def test_of_hugging_face_go_to_make_loader(self):
        table = table_of()
        for opened in (lk.ImageDataset, lk.BatchLoader):
            with pytest.raises(
                TypeError, match=r"got Dataset\. torch's loaders, and lk\.make_loader, take a Hugging Face"
            ):
                opened(table)
        loader = lk.make_loader(table.with_format("torch"), batch_size=10, num_workers=0)
        [batch] = loader
        assert batch["label"].tolist() == LABELS
        with pytest.raises(TypeError, match="image_column is for a Parquet file, got dict"):
            lk.open_store({}, image_column="image")

    def test_files_that_are_no_parquet_are_named(self, tmp_path):
        (tmp_path / "a.parquet").write_bytes(b"PAR1 and more, and PAR1")
        with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file, or is damaged: "):
            lk.open_store(tmp_path / "a.parquet")
        with pytest.raises(FileNotFoundError, match=r"b\.parquet does not exist"):
            lk.open_store(tmp_path / "b.parquet")


def samples_of(root):
    """What WebDataset reads of all shards: the samples' bytes by key."""
    shards = sorted(map(str, root.glob("*.tar")))
    return {sample["__key__"]: sample for sample in webdataset.WebDataset(shards, shardshuffle=False)}


class TestShards:
    def test_hold_what_webdataset_reads(self, tmp_path):
        files = {f"{folder}/{n}.v1.JPG": FILES[n] for n in range(9) for folder in "xy"}
        root = write(MemoryStore(files), tmp_path / "set", max_count=5, seed=1, classes=["y", "x"])
        store = lk.open_store(root)
        samples = samples_of(root)
        assert len(samples) == len(store.keys()) == 18
        for key, label, size in zip(store.keys(), store.labels, store.sizes().tolist(), strict=True):
            sample = samples[key.removesuffix(".jpg")]
            assert (store.read(key), label) == (sample["jpg"], int(sample["cls"]))
            assert size == len(sample["jpg"])
        assert store.classes == ["y", "x"]
        (root / "shard-000009.tar").write_bytes((root / "shard-000000.tar").read_bytes())  # not in the manifest
        assert list(lk.open_store(root).keys()) == list(store.keys())

    def test_with_several_classes_for_each_are_read_back(self, tmp_path):
        names = [["a", "x"], ["b", "x"]] * 5
        root = write(STORE, tmp_path / "set", labels=names, max_count=4)
        dataset = lk.ImageDataset(root)
        assert [[dataset.classes[label] for label in row] for row in dataset.labels] == names
        with pytest.raises(ValueError, match="other classes than those asked for"):
            lk.ImageDataset(root, classes=["x", "a", "b"])

    def test_of_other_tools_are_read_with_their_labels_in_any_order(self, tmp_path):
        first = {f"{n}.jpg": FILES[n] for n in range(3)} | {f"{n}.cls": b"%d\n" % (n * 10) for n in range(3)}
        make_tar(tmp_path / "b.tar", first | {"0.json": b"{}", "notes.md": b"x"})
        make_tar(tmp_path / "a.tar", {"sub/9.cls": b"7", "sub/9.jpg": FILES[9]})
        (tmp_path / "README.md").write_text("x")
        store = lk.open_store(tmp_path)
        assert list(store.keys()) == ["0.jpg", "1.jpg", "2.jpg", "sub/9.jpg"]
        assert list(store.labels) == [0, 10, 20, 7]
        assert read_all(store) == [*FILES[:3], FILES[9]]
        dataset = lk.ImageDataset(tmp_path)
        assert (dataset.labels.tolist(), dataset.classes) == ([0, 10, 20, 7], [])

    def test_may_hold_one_name_in_several_if_they_have_labels(self, tmp_path):
        for number in range(2):
            make_tar(tmp_path / f"s{number}.tar", {"0.jpg": FILES[number], "0.cls": b"%d" % number})
        store = lk.open_store(tmp_path)
        assert list(store.keys()) == ["s0/0.jpg", "s1/0.jpg"]
        assert (read_all(store), list(store.labels)) == (FILES[:2], [0, 1])
        for number in range(2):
            make_tar(tmp_path / f"s{number}.tar", {"0.jpg": FILES[number]})
        with pytest.raises(ValueError, match=r"2 tars in .* have an image '0.jpg', and none has labels: give"):
            lk.open_store(tmp_path).keys()

    @pytest.mark.parametrize(("files", "said"), [
        ({"0.jpg": b"", "0.cls": b"1", "1.jpg": b""}, r"1 image of 2 in .*, such as '1.jpg', have no .cls member"),
        ({"0.jpg": b"", "0.cls": b"cat"}, r"has b'cat' as the .cls member of '0.jpg', which is no label: pass"),
        ({"0.jpg": b"", "0.txt": b"a dog"}, r"are texts, in .txt members, which lk.read_shards gives: pass labels="),
        ({"0.jpg": b"", "0.json": b"[" * 100_000}, r"which is no label"),
        ({"0.jpg": b"", "0.json": b'{"a": 1}'}, r"in .json members, are no numbers, such as {'a': 1} of '0.jpg'"),
        ({"0.jpg": b"", "0.seg.png": b"", "0.cls": b"1"}, "'0.jpg' and '0.seg.png' in .* are images of one sample"),
    ])  # fmt: skip
    def test_with_broken_labels_are_refused_where_these_are_used(self, files, said, tmp_path):
        tar = make_tar(tmp_path / "a.tar", files)
        for place in (tmp_path, tar):  # the same, and followed as it says
            with pytest.raises(ValueError, match=said):
                lk.ImageDataset(place)
            assert set(lk.ImageDataset(place, classes=[]).labels.tolist()) == {0}
            assert lk.ImageDataset(place, labels=lambda key: key.partition("/")[0]).classes == sorted(
                name for name in files if name.endswith((".jpg", ".png"))
            )

    def test_that_changed_meanwhile_are_named(self, tmp_path):
        path = make_tar(tmp_path / "a.tar", {"0.jpg": FILES[0]})
        store = lk.open_store(tmp_path)
        store.keys()
        make_tar(path, {"0.jpg": FILES[1]})
        with pytest.raises(OSError, match=r"a\.tar has changed since its members were listed: open the store again"):
            store.read("0.jpg")

    def test_that_are_unfinished_missing_or_damaged_are_named(self, tmp_path):
        root = write(STORE, tmp_path / "set", max_count=5)
        manifest = (root / "manifest.json").read_bytes()
        (root / "manifest.json").write_text("{")
        with pytest.raises(ValueError, match=r"manifest.json is no manifest of shards: move it away, or write them"):
            lk.open_store(root)
        (root / "manifest.json").unlink()
        (root / "unfinished").mkdir()
        with pytest.raises(FileNotFoundError, match=r"manifest.json does not exist: run write_shards to its end"):
            lk.open_store(root)
        make_tar(tmp_path / "other.tar", {"0.jpg": FILES[0]})  # which a manifest of this folder has no part in
        (root / "manifest.json").write_bytes(manifest.replace(b"shard-000001.tar", b"../other.tar"))
        with pytest.raises(FileNotFoundError, match=r"set/other\.tar does not exist"):
            lk.open_store(root)
        (root / "manifest.json").write_bytes(manifest)
        (root / "shard-000001.tar").unlink()
        with pytest.raises(FileNotFoundError, match=r"shard-000001\.tar does not exist"):
            lk.open_store(root)

    def test_are_told_from_folders_of_images(self, tmp_path):
        make_tar(tmp_path / "a.tar", {"0.jpg": FILES[0]})
        assert type(lk.open_store(tmp_path)).__name__ == "ShardStore"
        make_tar(tmp_path / "a.tar", listed("note.txt:x"))
        with pytest.raises(FileNotFoundError, match="holds tars without an image"):
            lk.open_store(tmp_path).keys()
        (tmp_path / "cat").mkdir()
        (tmp_path / "cat/1.jpg").write_bytes(FILES[1])
        assert list(lk.open_store(tmp_path).keys()) == ["cat/1.jpg"]

    def test_with_links_and_sparse_files_say_so(self, tmp_path):
        make_tar(tmp_path / "a.tar", [*listed("b.jpg:data c.jpg=b.jpg"), *listed("a.jpg>none.jpg")])
        store = lk.open_store(tmp_path)
        assert (store.read("b.jpg"), store.read("c.jpg")) == (b"data", b"data")
        with pytest.raises(OSError, match=r"'a.jpg' is a link to nothing, or a sparse file"):
            store.read("a.jpg")


def test_the_manifest_of_another_tool_is_no_hindrance(tmp_path):
    make_tar(tmp_path / "a.tar", {"0.jpg": FILES[0]})
    (tmp_path / "manifest.json").write_text(json.dumps({"files": ["a.tar"]}))
    assert list(lk.open_store(tmp_path).keys()) == ["0.jpg"]


# One answer for a tar by its own path, its folder, and what reads it from its start.


def labeled_by_every_door(tar, tmp_path, **options):
    """Label by key, of a data set over the tar, over its folder, of pixels and shards."""
    shards = [lk.read_shards(tar)] if not options else []
    for number, source in enumerate((tar, tar.parent)):
        dataset = lk.ImageDataset(source, return_keys=True, **options)
        yield {key: label for _, label, key in dataset}
        store = lk.PixelStore.build(source, tmp_path / f"{number}.pixels", progress=False, **options)
        yield dict(zip(store.keys, (label for _, label in store), strict=True))
        loader = lk.BatchLoader(source, size=8, return_keys=True, **options)
        yield {key: label for _, labels, keys in loader for label, key in zip(labels, keys, strict=True)}
        shards.append(lk.read_shards(write(source, tmp_path / f"packed{number}", **options)))
    for each in shards:
        keys = [f"{sample['__key__']}.jpg" for sample in each.samples()]
        yield dict(zip(keys, (label for _, label in each), strict=True))


@pytest.mark.parametrize("form", ["cls", "vectors"])
def test_labels_beside_images_in_a_tar_are_the_same_by_every_door(form, tmp_path):
    (tmp_path / "of").mkdir()
    values = {"cls": [0, 2, 1, 1, 0, 2], "vectors": [[n, 0.5] for n in range(6)]}[form]
    keys = [f"{folder}/{number}" for folder in "ab" for number in range(3)]
    suffix = "cls" if form == "cls" else "json"
    # The suffix counts in any case, as for WebDataset.
    names = [f"{key}.{suffix.upper() if number % 2 else suffix}" for number, key in enumerate(keys)]
    members = {name: json.dumps(value).encode() for name, value in zip(names, values, strict=True)}
    members |= {f"{key}.jpg": FILES[number] for number, key in enumerate(keys)}
    tar = make_tar(tmp_path / "of" / "a.tar", {name: members[name] for name in sorted(members)})
    given = {f"{key}.jpg": torch.tensor(value) for key, value in zip(keys, values, strict=True)}
    found = list(labeled_by_every_door(tar, tmp_path))
    assert len(found) == 9
    for labels in found:
        assert labels.keys() == given.keys()
        assert all(torch.equal(torch.as_tensor(labels[key]), given[key]) for key in given)


def test_labels_beside_images_in_a_tar_far_away_are_read(server, tmp_path):
    members = {f"a/{n}.jpg": FILES[n] for n in range(8)} | {f"a/{n}.cls": b"%d" % (7 - n) for n in range(8)}
    server.files["/a.tar"] = make_tar(tmp_path / "a.tar", members).read_bytes()
    dataset = lk.ImageDataset(f"{server.url}/a.tar")
    assert dict(zip(dataset.keys, dataset.labels.tolist(), strict=True)) == {f"a/{n}.jpg": 7 - n for n in range(8)}


# Whatever holds the bytes.


class Keeping:
    """A store that keeps its files in some buffer."""

    def __init__(self, keep, files):
        self.keep, self.files = keep, files

    def keys(self):
        return list(self.files)

    def read(self, key):
        return self.keep(self.files[key])


BUFFERS = {
    "np.void": np.void, "memoryview": memoryview, "array": lambda data: np.frombuffer(data, np.uint8),
}  # fmt: skip


@pytest.mark.parametrize("kept", BUFFERS)
def test_bytes_in_any_buffer_are_the_same_by_every_door(kept, tmp_path):
    files = {f"a/{number}.jpg": data for number, data in enumerate(FILES[:4])}
    plain, store = Keeping(bytes, files), Keeping(BUFFERS[kept], files)
    mapping = {key: BUFFERS[kept](data) for key, data in files.items()}

    def by_every_door(source, folder):
        pixels = lk.PixelStore.build(source, folder / "x.pixels", classes=[], progress=False)
        for dataset in (lk.ImageDataset(source, classes=[]), pixels):
            yield [image.tolist() for image, _ in dataset]
        for options in ({}, {"reads_in_flight": 2}):
            yield [images.tolist() for images, _ in lk.BatchLoader(source, size=8, classes=[], **options)]
        root = write(source, folder / "shards", classes=[])
        yield [(sample["__key__"], sample["jpg"]) for sample in lk.read_shards(root).samples()]

    expected = list(by_every_door(plain, tmp_path / "plain"))
    for number, source in enumerate((store, mapping)):
        assert list(by_every_door(source, tmp_path / str(number))) == expected


@pytest.mark.parametrize("wrong", ["text", None, np.zeros((2, 2, 3), np.uint8), np.zeros(3)])
def test_what_is_no_buffer_of_bytes_is_named(wrong, tmp_path):
    store = Keeping(lambda data: wrong, {"a/1.jpg": b""})
    for read in (
        lambda: lk.ImageDataset(store, classes=[])[0], lambda: list(lk.BatchLoader(store, size=8, classes=[])),
        lambda: list(lk.BatchLoader(store, size=8, classes=[], reads_in_flight=2)),
        lambda: lk.open_store({"a/1.jpg": wrong}).read("a/1.jpg"),
        lambda: write(store, tmp_path / "shards", classes=[]),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"'a/1.jpg' must lead to the bytes of an image file, got") as failure:
            read()
        assert isinstance(failure.value, lk.LabkitError)
    assert not (tmp_path / "shards").exists()
