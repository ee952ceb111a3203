"""Links of listing pages: those to images and folders below, each once, and no others."""

import pytest

from labkit import HttpStore
from tests.scripted_server import Handler, status

LISTING = """
<html><head><link href="style.jpg"></head><body>
<a href="../">up</a> <a href="/">top</a> <a href="/other/x.jpg">elsewhere</a> <a href="/p">here</a> <a href="./">.</a>
<a href="?C=N;O=D">sort</a> <a href="#top">top</a> <a name="anchor">none</a> <a href>none</a> <a href="">none</a>
<a href="http://other.host/p/foreign.jpg">foreign</a> <a href="//other.host/p/foreign.jpg">foreign</a>
<a href="mailto:a@b.jpg">mail</a> <a href="javascript:void(0).jpg">code</a> <a href="ftp://127.0.0.1/p/f.jpg">ftp</a>
<a href="plain.jpg">1</a> <A HREF='single.jpg'>2</A> <a class=x href=bare.jpg>3</a> <a href="plain.jpg">again</a>
<a href="/p/absolute.jpg">4</a> <a href="HOST/p/full.jpg">5</a> <a href="a%20b.jpg">6</a>
<a href="a&amp;b.jpg?x=1#y">7</a> <a href="/%70/encoded.jpg">8</a>
<a href="sub/">folder</a> <a href="bare/">folder</a> <a href="notes.txt">text</a> <a href="LICENSE">text</a>
<a href="http://[bad">bad</a> <a href="//127.0.0.1">out</a> <a href="%2e%2e/escape.jpg">out</a>
<a href="sub/../../p/inside.jpg">in</a> <a href=".hidden.jpg">hidden</a> <a href=".cache/">hidden</a>
</body></html>
"""


def test_links_of_a_listing(server):
    server.files["/p/"] = LISTING.replace("HOST", server.url).encode()
    server.files["/p/sub/"] = (
        b'<a href="../">up</a><a href="one.jpg">1</a><a href="deep/">2</a><a href="../sub/">here</a>'
    )
    server.files["/p/sub/deep/"] = b'<a href="two.png">2</a><a href="/p/">top</a>'
    server.files["/p/bare/"] = b'<a href="three.webp">3</a>'
    assert list(HttpStore(f"{server.url}/p").keys()) == sorted([
        "plain.jpg", "single.jpg", "bare.jpg", "absolute.jpg", "full.jpg", "a b.jpg", "a&b.jpg", "inside.jpg",
        "encoded.jpg",
        "sub/one.jpg", "sub/deep/two.png", "bare/three.webp",
    ])  # fmt: skip
    asked = [path for path, _ in server.asked]
    assert len(asked) == len(set(asked))
    assert all(path.startswith("/p/") for path in asked)


def test_a_link_back_ends(server):
    server.files["/p/"] = b'<a href="loop/">1</a><a href="a.jpg">a</a>'
    server.files["/p/loop/"] = (
        b'<a href="/p/">1</a><a href="/p/loop">2</a><a href="../loop/">3</a><a href="b.jpg">b</a>'
    )
    assert list(HttpStore(f"{server.url}/p").keys()) == ["a.jpg", "loop/b.jpg"]
    assert len(server.asked) < 6


def test_folders_without_end_are_an_error(server, monkeypatch):
    """Each page leads one folder deeper, as a link to its own folder makes it."""
    monkeypatch.setattr(
        Handler, "answer", lambda self, data: self.say(200, b'<a href="x/">x</a>', Content_Type="text/html")
    )
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:\d+/p/.* without end.* HttpStore\(url, keys="):
        HttpStore(f"{server.url}/p").keys()
    assert len(server.asked) < 200


def test_a_folder_that_cannot_be_listed_is_an_error(server):
    """Half the keys would be worse than none."""
    server.files["/p/"] = b'<a href="a.jpg">a</a><a href="sub/">sub</a>'
    server.script["/p/sub/"] = [status(403)]
    with pytest.raises(OSError, match=r"/p/sub/: access denied \(403\)"):
        HttpStore(f"{server.url}/p").keys()
