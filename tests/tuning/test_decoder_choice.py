"""The fastest decoder of these very files."""

import time

import pytest
import torch

import labkit as lk
from labkit import course
from labkit.watching import tune as decoder_choice
from labkit.watching.tune import fastest_decoder, with_decoder

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def photos(first_photos):
    store = lk.FolderStore(first_photos(12))
    return lk.ImageDataset(store, transform=lk.make_augment("light", "v2", part="geometry"))


@pytest.fixture
def decoding(monkeypatch):
    """`decoding(how)` calls `how(decoder)` instead of decoding."""

    def replace(how):
        image = torch.zeros(3, 4, 4, dtype=torch.uint8)
        monkeypatch.setattr(decoder_choice, "decode", lambda data, decoder: (how(decoder), image)[1])

    return replace


@pytest.mark.exhaustive
def test_a_slow_one_is_left(photos, decoding):
    decoding(lambda decoder: time.sleep(0.02 * (decoder == "pil")))
    name, frame = fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=2)
    assert name not in (None, "pil", "pil_draft")
    assert set(frame["variant"]) == set(lk.DECODERS) - {"pil_draft"} - set(course.missing_decoders())


def test_one_that_cannot_read_the_files_is_left_out(photos, decoding):
    def only_pil(decoder):
        if decoder != "pil":
            raise lk.DecodeError("no")

    decoding(only_pil)
    assert fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=1)[0] is None


def test_other_data_sets_have_none_to_choose(photos):
    for dataset in ([0, 1], lk.PILDataset(photos.store)):
        assert fastest_decoder(dataset, limit_s=1) == (None, None)


def test_the_data_set_keeps_its_own(photos):
    other = with_decoder(photos, "pil")
    other.transform = None
    assert (photos.decoder, other.decoder) == ("turbojpeg", "pil")
    assert torch.equal(lk.decode(photos.store.read(photos.keys[0]), "pil"), other[0][0])
