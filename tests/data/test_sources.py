"""Sources that are no places of image files: mappings, tables of Hugging Face and Parquet, folders of shards."""

import io
import json
import os
import pickle
import resource
import warnings

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch
import webdataset

import labkit as lk
from labkit import course
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


@pytest.fixture(params=["mapping", "Dataset", "Dataset with a transform", "Parquet", "shards"])
def source(request, place):
    """Each source of the same ten images, in the same order."""
    return {
        "mapping": STORE.files, "Dataset": table_of(), "Parquet": str(place / "set.parquet"),
        "Dataset with a transform": table_of().with_transform(lambda rows: 1 / 0), "shards": place / "shards",
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

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("method", ["fork", "forkserver"])
    def test_gives_data_sets_their_images_and_labels(self, source, num_workers, method):
        if num_workers == 0 and method == "forkserver":
            pytest.skip("there is nothing to start")
        dataset = lk.ImageDataset(source, decoder="pil")
        options = {"start_method": method, "oversubscribe": True} if num_workers else {}
        [(images, labels)] = lk.make_loader(dataset, num_workers=num_workers, **options)
        expected = [np.asarray(PIL.Image.open(io.BytesIO(data))) for data in FILES]
        assert (images.permute(0, 2, 3, 1).numpy() == np.stack(expected)).all()
        assert labels.tolist() == LABELS
        assert (dataset.classes, dataset.labels.tolist()) == (CLASSES, LABELS)

    @pytest.mark.parametrize("options", [{}, {"reads_in_flight": 4}], ids=str)
    def test_feeds_batch_loader(self, source, options):
        loader = lk.BatchLoader(source, size=32, batch_size=5, num_threads=4, **options)
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
        disk = course.SimulatedStore(source, wait=False)
        assert disk.read(disk.keys()[3]) == FILES[3]


class TestMappings:
    def test_may_be_of_any_kind_and_hold_any_kind_of_bytes(self):
        files = pd.Series({"b": bytearray(FILES[0]), "a.jpg": memoryview(FILES[1]), "c.GIF": b""}).to_dict()
        store = lk.open_store(files, ignore=".gif")
        assert list(store.keys()) == ["a.jpg", "b"]
        assert read_all(store) == [FILES[1], FILES[0]]

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
    def test_are_in_the_order_of_their_rows_whatever_was_selected(self):
        table = table_of().shuffle(seed=3).select([7, 2, 5])
        store = lk.open_store(table)
        plain = table.cast_column("image", datasets.Image(decode=False))
        assert read_all(store) == [row["image"]["bytes"] for row in plain]
        assert list(store.labels) == table["label"][:]

    def test_in_another_order_are_other_images(self, tmp_path):
        """For pixels that were built before, and for a training that goes on, although the keys are the same."""
        tables = [datasets.Dataset.from_dict({"image": cells(files)}).cast_column("image", datasets.Image())
                  for files in (FILES, FILES[::-1])]  # fmt: skip
        first, other = (lk.BatchLoader(table, size=8, batch_size=2, classes=[]) for table in tables)
        sizes = [len(data) for data in FILES]
        assert [lk.open_store(table).sizes().tolist() for table in tables] == [sizes, sizes[::-1]]
        next(iter(first))
        with pytest.raises(ValueError, match="the state was taken with keys_crc32"):
            other.load_state_dict(first.state_dict())
        lk.PixelStore.build(tables[0], tmp_path / "p", classes=[], progress=False)
        with pytest.raises(lk.LabkitError, match="is of other images"):
            lk.PixelStore.build(tables[1], tmp_path / "p", classes=[], progress=False)

    @pytest.mark.parametrize("kind", ["Dataset", "Parquet"])
    def test_have_the_suffixes_of_their_paths_or_bytes(self, kind, tmp_path):
        small = PIL.Image.new("RGB", (4, 4))
        files = []
        for format_ in ("JPEG", "PNG", "WEBP", "PNG"):
            small.save(buffer := io.BytesIO(), format_)
            files.append(buffer.getvalue())
        images = [{"bytes": data, "path": None} for data in files] + [None]
        images[3]["path"] = "named.JPG"
        table = table_of({"image": datasets.Image()}, image=images)
        if kind == "Parquet":
            table.to_parquet(tmp_path / "set.parquet")
        store = lk.open_store(table if kind == "Dataset" else tmp_path / "set.parquet")
        assert list(store.keys()) == ["000000.jpg", "000001.png", "000002.webp", "000003.jpg", "000004"]
        assert list(map(store.read, store.keys()[:4])) == files
        assert (store.labels, store.classes) == (None, None)
        with pytest.raises(KeyError, match=r"'000004' of .* has no image: its row holds none"):
            store.read("000004")

    @pytest.mark.parametrize("kind", ["Dataset", "Parquet"])
    @pytest.mark.parametrize("column", ["bytes", "struct"])
    def test_of_plain_bytes_are_read(self, kind, column, tmp_path):
        if column == "bytes":
            images = pyarrow.array(FILES, pyarrow.large_binary() if kind == "Parquet" else pyarrow.binary())
        else:
            images = pyarrow.array(cells(), pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
        made = pyarrow.table({"jpeg": images, "label": ["b", "a"] * 5, "other": [1.5] * 10})
        parquet.write_table(made, tmp_path / "set.parquet", row_group_size=3)
        table = tmp_path / "set.parquet" if kind == "Parquet" else datasets.Dataset(made)
        store = lk.open_store(table)
        assert read_all(store) == FILES
        dataset = lk.ImageDataset(table)
        assert (dataset.classes, dataset.labels.tolist()) == (["a", "b"], [1, 0] * 5)

    def test_that_hold_paths_alone_read_the_files(self, tmp_path):
        for number, data in enumerate(FILES[:3]):
            (tmp_path / f"{number}.jpg").write_bytes(data)
        paths = [str(tmp_path / f"{number}.jpg") for number in range(3)]
        store = lk.open_store(table_of({"image": datasets.Image()}, image=paths))
        assert read_all(store) == FILES[:3]
        (tmp_path / "1.jpg").unlink()
        with pytest.raises(FileNotFoundError):
            store.read(store.keys()[1])

    def test_leave_out_what_is_ignored_with_its_labels(self, tmp_path):
        images = cells(FILES[:2]) + [{"bytes": FILES[2], "path": "a.gif"}] + cells(FILES[3:4])
        table = table_of(image=images, label=[0, 1, 0, 1])
        with pytest.raises(ValueError, match=r"1 image with suffixes that labkit does not read \(1 .gif"):
            lk.open_store(table).keys()
        store = lk.open_store(table, ignore=".gif")
        assert list(store.keys()) == ["000000.jpg", "000001.jpg", "000003.jpg"]
        assert list(store.labels) == [0, 1, 1]
        assert store.read("000003.jpg") == FILES[3]

    @pytest.mark.parametrize("kind", ["Dataset", "Parquet"])
    def test_with_several_columns_need_a_name(self, kind, tmp_path):
        two = {"fine": datasets.ClassLabel(names=CLASSES), "coarse": datasets.ClassLabel(names=["x"])}
        columns = {"fine": LABELS, "coarse": [0] * 10, "n": list(range(10))}
        features = {"photo": datasets.Image(), "mask": datasets.Image(), **two, "n": datasets.Value("int64")}
        table = table_of(features, photo=cells(), mask=cells(FILES[::-1]), **columns)
        if kind == "Parquet":
            table.to_parquet(tmp_path / "set.parquet")
        source = table if kind == "Dataset" else tmp_path / "set.parquet"
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

    def test_of_images_and_bytes_give_the_images_unless_the_bytes_are_asked_for(self):
        features = {"image": datasets.Image(), "thumbnail": datasets.Value("binary")}
        table = table_of(features, image=cells(), thumbnail=FILES[::-1])
        assert read_all(lk.open_store(table)) == FILES
        assert read_all(lk.open_store(table, image_column="thumbnail")) == FILES[::-1]

    def test_without_labels_say_so_as_folders_without_classes_do(self):
        unlabeled = table_of(image=cells(), label=[-1] * 10)  # as in test sets
        with pytest.warns(LabelWarning, match="all labels are 0"):
            assert lk.ImageDataset(unlabeled).labels.tolist() == [0] * 10
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lk.ImageDataset(unlabeled, classes=[])

    def test_for_validation_take_the_classes_of_the_training(self):
        val = lk.ImageDataset(table_of(), classes=["b", "x", "a"])
        assert val.labels.tolist() == [2 if label == 0 else 0 for label in LABELS]

    def test_that_are_splits_or_streams_are_refused(self):
        splits = datasets.DatasetDict({"train": table_of(), "test": table_of()})
        for opened in (lk.open_store, lk.ImageDataset, lk.BatchLoader):
            with pytest.raises(TypeError, match=r"several splits \(train, test\): pass one, such as .*'train'"):
                opened(splits)
            with pytest.raises(TypeError, match="a streaming data set has no rows by number: load it without"):
                opened(table_of().to_iterable_dataset())
        with pytest.raises(TypeError, match="image_column is for a Hugging Face Dataset or a Parquet file, got dict"):
            lk.open_store({}, image_column="image")
        with pytest.raises(TypeError, match="mod: only object storage takes options"):
            lk.open_store(table_of(), mod=1)

    @pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1 and more, and PAR1"])
    def test_files_that_are_no_parquet_are_named(self, data, tmp_path):
        (tmp_path / "a.parquet").write_bytes(data)
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

    @pytest.mark.parametrize("labels", [
        [f"photo {number} of a cat" for number in range(10)], [0.5 * number for number in range(10)],
        [[number, 1] for number in range(10)],
    ], ids=["texts", "floats", "vectors"])  # fmt: skip
    def test_have_labels_of_any_kind(self, labels, tmp_path):
        root = write(STORE, tmp_path / "set", labels=labels, classes=[])
        store = lk.open_store(root)
        assert list(store.labels) == labels
        dataset = lk.ImageDataset(root, labels=store.labels, classes=[])
        assert [label.tolist() if isinstance(label, torch.Tensor) else label for _, label in dataset] == labels

    def test_of_captions_have_no_classes(self, tmp_path):
        make_tar(tmp_path / "a.tar", {"0.jpg": FILES[0], "0.txt": "a câble".encode(), "0.json": b"{}"})  # img2dataset's
        store = lk.open_store(tmp_path)
        assert (list(store.labels), store.classes) == (["a câble"], [])
        for classes in (None, []):
            dataset = lk.ImageDataset(tmp_path, classes=classes)
            assert (list(dataset.labels), dataset.classes) == (["a câble"], [])

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

    def test_without_labels_have_the_classes_of_their_folders(self, tmp_path):
        make_tar(tmp_path / "a.tar", {"cat/1.jpg": FILES[1], "dog/2.jpg": FILES[2]})
        make_tar(tmp_path / "b.tar", {"cat/3.jpg": FILES[3]})
        dataset = lk.ImageDataset(tmp_path)
        assert (dataset.classes, dataset.labels.tolist()) == (["cat", "dog"], [0, 0, 1])

    @pytest.mark.parametrize(("files", "said"), [
        ({"0.jpg": b"", "0.cls": b"1", "1.jpg": b""}, r"1 image of 2 in .*, such as '1.jpg', have no .cls member"),
        ({"0.jpg": b"", "0.cls": b"cat"}, r"a.tar has b'cat' as the .cls member of '0.jpg', which is no label: pass"),
        ({"0.jpg": b"", "0.txt": b"\xff"}, r"which is no label"),
        ({"0.jpg": b"", "0.json": b"{"}, r"which is no label"),
        ({"0.jpg": b"", "0.seg.png": b"", "0.cls": b"1"}, "'0.jpg' and '0.seg.png' in .* are images of one sample"),
    ])  # fmt: skip
    def test_with_broken_labels_are_refused_where_these_are_used(self, files, said, tmp_path):
        make_tar(tmp_path / "a.tar", files)
        with pytest.raises(ValueError, match=said):
            lk.ImageDataset(tmp_path)
        if any(name.endswith(".cls") for name in files):  # captions are no classes, and so are wanted
            lk.ImageDataset(tmp_path, classes=[])
        lk.ImageDataset(tmp_path, labels=[0] * len(lk.open_store(tmp_path).keys()))

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


def test_more_shards_may_be_read_than_files_may_be_open(tmp_path):
    for number in range(40):
        make_tar(tmp_path / f"{number:02}.tar", {f"{number:02}.jpg": FILES[0]})
    store = lk.open_store(tmp_path)
    store.keys()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 10, before[1]))
    try:
        assert read_all(store) == FILES[:1] * 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_manifest_of_another_tool_is_no_hindrance(tmp_path):
    make_tar(tmp_path / "a.tar", {"0.jpg": FILES[0]})
    (tmp_path / "manifest.json").write_text(json.dumps({"files": ["a.tar"]}))
    assert list(lk.open_store(tmp_path).keys()) == ["0.jpg"]
