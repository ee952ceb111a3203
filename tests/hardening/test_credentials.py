"""Passwords, tokens and signatures: in no message, log, frame, file or file name, whether things go well or not."""

import base64
import logging
import os
import traceback
from pathlib import Path

import fsspec
import nbformat
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import labkit as lk
from labkit.app.doctor import findings
from labkit.app.notebooks import Notebook, execute
from labkit.errors import ItemErrors, VariantError
from labkit.measure.frames import load_frame, make_frame
from labkit.util.redact import redact, strip_credentials
from tests.hardening.inputs import image_bytes
from tests.scripted_server import Handler, cut, serve_script
from tests.tars import make_tar

USER, PASSWORD, SIGNATURE = "someone", "hush%2Fhush", "hu5h5ignature"
BASIC = base64.b64encode(b"someone:hush/hush").decode()
SECRETS = ("someone", "hush", "hu5h", BASIC)
QUERY = f"X-Amz-Signature={SIGNATURE}&token={SIGNATURE}"
JPEG = image_bytes(kind="JPEG")


class Guarded(Handler):
    """Answers those who know user, password and signature; `/broken/` is cut, others fail."""

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if self.headers["Authorization"] != f"Basic {BASIC}" or query != QUERY:
            self.say(403)
        elif status := {"/failing/": 500}.get(path[: path.find("/", 1) + 1]):
            self.say(status)
        elif path.startswith("/broken/") and path in self.server.files:
            cut(self)
        else:
            self.answer(self.server.files.get(path))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Has a folder of images, a tar, and shards, each also under `/broken/`."""
    root = tmp_path_factory.mktemp("served")
    (root / "set").mkdir()
    (root / "set" / "a.jpg").write_bytes(JPEG)
    make_tar(root / "x.tar", {"d/a.jpg": JPEG})
    lk.write_shards(lk.FolderStore(root / "set"), root / "shards", classes=[], engine="threads", progress=False)
    with serve_script(Guarded) as server:
        for path in filter(Path.is_file, root.rglob("*")):
            for folder in ("", "/broken"):
                server.files[f"{folder}/{path.relative_to(root)}"] = path.read_bytes()
        server.tags = dict.fromkeys(server.files, '"1"')
        yield server


@pytest.fixture
def guarded(server, tmp_path, monkeypatch):
    """Makes addresses with credentials in them."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return lambda path, host=server.url[7:]: f"http://{USER}:{PASSWORD}@{host}/{path}?{QUERY}"


class Told:
    """All that could be read afterwards: of errors, their whole traceback."""

    def __init__(self):
        self.texts: list[str] = []

    def __call__(self, *values: object) -> None:
        self.texts += [text for value in values for text in (repr(value), str(value))]

    def failing(self, function, *arguments, **options):
        with pytest.raises(Exception) as failure:
            function(*arguments, **options)
        self("".join(traceback.format_exception(failure.value)), failure.value)
        return failure.value

    def secrets(self) -> list[tuple[str, str]]:
        return [(secret, text) for secret in SECRETS for text in self.texts if secret in text]


@pytest.fixture
def told(tmp_path, caplog, capfd):
    """Checks at the end what was said, logged, printed and stored."""
    caplog.set_level(logging.DEBUG)
    told = Told()
    yield told
    assert told.texts
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        told(str(path.relative_to(tmp_path)), path.read_bytes().decode("latin-1"))
    told(*(record.getMessage() for record in caplog.get_records("call")), *capfd.readouterr())
    assert told.secrets() == []


def test_what_works_keeps_credentials_to_itself(guarded, told, tmp_path):
    folder = lk.HttpStore(guarded("set"), keys=["a.jpg"])
    tar, shards = lk.open_store(guarded("x.tar")), lk.read_shards(guarded("shards/shard-000000.tar"))
    for store in (folder, tar):
        assert store.read(store.keys()[0]) == JPEG
        told(store)
    assert len(list(tmp_path.glob("home/tar_index/*"))) == 1
    assert len(list(shards)) == 1
    told(shards, shards.order, next(iter(shards.samples()))["__url__"])
    lk.write_shards(folder, tmp_path / "shards", classes=[], engine="threads", progress=False)
    told(lk.PixelStore.build(tar, tmp_path / "x.pixels", progress=False))


@pytest.mark.parametrize("path", ["missing/", "failing/", "broken/"])
def test_what_fails_names_no_credentials(guarded, told, path):
    folder = lk.HttpStore(guarded(f"{path}set"), keys=["a.jpg"], retries=1)
    told.failing(folder.read, "a.jpg")
    told.failing(lk.map_items, folder.read, ["a.jpg"], engine="threads", progress=False)
    told.failing(lk.HttpStore(guarded(f"{path}set"), retries=0).keys)
    for place in ("x.tar", "shards", "shards/shard-000000.tar"):
        url = guarded(f"{path}{place}").replace(QUERY, "token=hush")  # the server knows another one
        told.failing(lambda url=url: lk.TarStore(url).keys())
        told.failing(lambda url=url: list(lk.read_shards(url)))


@pytest.mark.parametrize("scheme", ["htp:", "gopher:"])
def test_a_wrong_scheme_names_no_credentials(guarded, told, scheme):
    url = guarded("x").replace("http:", scheme)
    told.failing(lk.open_store, url)
    told.failing(lk.HttpStore, url)


def test_a_chained_url_names_no_credentials(guarded, tmp_path):
    """What fsspec itself logs, for whoever asks for its debug messages, is not looked at."""
    told, url = Told(), guarded("x").replace("http:", "simplecache::http:")
    store = lk.open_store(url, simplecache={"cache_storage": str(tmp_path)})
    told.failing(store.keys)
    told.failing(lambda: repr(store))
    told.failing(lk.HttpStore, url)
    assert told.secrets() == []


@pytest.mark.parametrize("host", ["[bad", "127.0.0.1:9", "127.0.0.1:notaport"])
def test_an_address_that_leads_nowhere_names_no_credentials(guarded, told, host):
    told.failing(lambda: lk.HttpStore(guarded("set", host), keys=["a.jpg"], retries=0).read("a.jpg"))


# Object storage: other libraries' words.


class Leaky(MemoryFileSystem):
    """Says all that it knows, as some libraries do."""

    protocol = "leaky"

    def __init__(self, *, says=None, **options):
        super().__init__()
        self.says, self.options = says, options

    def _fail(self, *arguments, **options):
        if self.says:
            raise FileNotFoundError(self.says)
        try:
            raise ConnectionError(f"GET http://{USER}:hush@host/?X-Amz-Credential=hu5h failed with {self.options}")
        except ConnectionError as error:
            raise PermissionError("refused") from error

    cat_file = info = find = _fail


def test_errors_of_object_storage_name_no_credentials(told, monkeypatch):
    fsspec.register_implementation("leaky", Leaky, clobber=True)
    options = {"secret": "hu5h-secret", "client_kwargs": {"aws_session_token": "hush-token"}, "endpoint_url": "x"}
    store = lk.ObjectStore("leaky://bucket", **options)
    for act in (store.keys, lambda: store.read("a.jpg"), lambda: lk.TarStore("leaky://bucket/x.tar", **options).keys()):
        assert isinstance(told.failing(act), PermissionError)
    told.failing(lambda: lk.read_shards("leaky://bucket/shards", storage_options=options))
    told(lk.read_shards("leaky://bucket/x.tar", storage_options=options).order)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hu5h-of-the-environment")
    told.failing(lk.ObjectStore("leaky://bucket", says="signed with hu5h-of-the-environment").keys)
    told(findings())


# Frames and reports.


def test_frames_hold_addresses_without_credentials_and_all_else_as_it_is(guarded, told, recorded_frames):
    url = guarded("set")
    frame = lk.compare(
        {url: lambda: [3], "b": lambda: [3]}, baseline="b", rounds=1, warmups=0, progress=False,
        experiment=f"from {url}", factors={"storage": {url: url, "b": "a folder"}, "note": url},
    )  # fmt: skip
    told(frame.to_csv(), frame["variant"].tolist())
    [path] = recorded_frames.glob("*.csv")
    assert f"{strip_credentials(url)}?..." in load_frame(path)["storage"].tolist()
    frame = make_frame([{"variant": "a", "n_images": 3, "share": 0.5, "rung": False}], storage="s3://bucket/x")
    values = frame.loc[0, ["variant", "n_images", "share", "rung", "storage"]].tolist()
    assert values == ["a", 3, 0.5, False, "s3://bucket/x"]


@pytest.mark.parametrize("link", [None, "__cause__"], ids=["its own text", "a cause"])
def test_errors_of_a_variant_and_of_an_item_keep_all_but_credentials(guarded, told, link):
    error = ConnectionError(f"no answer from {guarded('set')}")
    for text in ("failed", "failed again") if link else ():
        earlier, error = error, OSError(text)
        setattr(error, link, earlier)

    def failing(_=None):
        raise error

    found = told.failing(lk.compare, {"a": failing}, baseline="a", rounds=1, warmups=0, progress=False)
    assert (type(found), found.__cause__) == (VariantError, None)
    assert ("failed again" if link else "no answer from http://127.0.0.1") in str(found)
    assert isinstance(told.failing(lk.map_items, failing, [1], engine="threads", progress=False), ItemErrors)


@pytest.mark.exhaustive
def test_a_notebook_that_was_run_holds_no_credentials(guarded, told, tmp_path_factory, caplog):
    caplog.set_level(logging.INFO, "traitlets")  # else nbclient logs all that the kernel says
    code = "import os; print('read', os.environ['URL']); raise OSError(os.environ['URL'])"
    path = tmp_path_factory.mktemp("notebooks") / "00_x.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), path)
    done = execute(Notebook(path, "", ""), environment={**os.environ, "URL": guarded("set")})
    outputs = done.node.cells[0].outputs
    assert [output.output_type for output in outputs] == ["stream", "error"]
    told(done.error, *outputs)


# Texts.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://u:p@h:80/a/b.jpg?x=1#f", "http://h:80/a/b.jpg"),
        ("http://u:p/w@h/a", "http://h/a"),
        ("http://u:p?w@h:80/a", "http://h:80/a"),
        ("http://u:p@w@h/a", "http://h/a"),
        ("http://h:8080/a:b@2x.jpg", "http://h:8080/a:b@2x.jpg"),
        ("simplecache::s3://k:s@b/x.tar?v=1", "simplecache::s3://b/x.tar"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("https://u:p@host/a?b#c?d", "https://host/a"),
    ],
)
def test_what_is_shown_of_an_address(url, said):
    assert strip_credentials(url) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see http://h/x, and 'http://u:p@h/y?t=1'.", "see http://h/x, and 'http://h/y?...'."),
        ("3 tokens; batch=4 @ 2.5 images/s?", "3 tokens; batch=4 @ 2.5 images/s?"),
        ("X-Amz-Security-Token=abc&x=1 sig=abc secret=abc", "X-Amz-Security-Token=...&x=1 sig=... secret=..."),
    ],
)
def test_what_is_left_of_a_text(text, said):
    assert redact(text) == said
