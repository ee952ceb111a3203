"""The fastest decoder of these very files."""

import time

import pytest
import torch

import labkit as lk
from labkit.tuning import candidates as field, decoder_choice

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def photos(first_photos):
    store = lk.FolderStore(first_photos(12))
    return lk.ImageDataset(store, transform=lk.make_augment("light", "v2", part="geometry"))


class TestDecoder:
    def test_a_slow_one_is_left(self, photos, monkeypatch):
        def slow_pil(data, decoder):
            time.sleep(0.02 * (decoder == "pil"))
            return torch.zeros(3, 4, 4, dtype=torch.uint8)

        monkeypatch.setattr(decoder_choice, "decode", slow_pil)
        name, frame = decoder_choice.fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=2)
        assert name not in (None, "pil", "pil_draft")
        assert set(frame["variant"]) == set(lk.DECODERS) - {"pil_draft"} - set(lk.missing_decoders())

    def test_one_that_cannot_read_the_files_is_left_out(self, photos, monkeypatch):
        def only_pil(data, decoder):
            if decoder != "pil":
                raise lk.DecodeError("no")
            return torch.zeros(3, 4, 4, dtype=torch.uint8)

        monkeypatch.setattr(decoder_choice, "decode", only_pil)
        assert decoder_choice.fastest_decoder(lk.ImageDataset(photos.store, decoder="pil"), limit_s=1)[0] is None

    def test_other_data_sets_have_none_to_choose(self, photos):
        for dataset in ([0, 1], lk.PILDataset(photos.store)):
            assert decoder_choice.fastest_decoder(dataset, limit_s=1) == (None, None)

    def test_the_data_set_keeps_its_own(self, photos):
        other = field.with_decoder(photos, "pil")
        assert (photos.decoder, other.decoder) == ("turbojpeg", "pil")
        assert torch.equal(lk.decode(photos.store.read(photos.keys[0]), "pil"), _undone(other)[0][0])


def _undone(dataset):
    dataset.transform = None
    return dataset
