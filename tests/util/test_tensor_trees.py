"""`labkit.util.tensor_trees`: batches of every kind keep their types and all that they hold beside tensors."""

import copy

import pytest
import torch

from labkit.util.tensor_trees import iter_tensors, map_tensors, move_tensors
from tests.batch_kinds import KINDS, OF_TRANSFORMERS, Built, Fields, Named, circle, labeled
from tests.encodings import Encoding

of_every_kind = pytest.mark.parametrize(
    ("make", "find"),
    [
        *(pytest.param(*kind, id=name) for name, kind in KINDS.items()),
        *(pytest.param(*kind, id=name, marks=pytest.mark.frameworks) for name, kind in OF_TRANSFORMERS.items()),
    ],
)


def attributes(batch):
    return {name: value for name, value in getattr(batch, "__dict__", {}).items() if isinstance(value, str | int)}


@of_every_kind
def test_tensors_are_moved_and_the_batch_stays_as_it_is(make, find):
    batch = make(torch.arange(3.0))
    before = copy.copy(attributes(batch))
    moved = move_tensors(batch, "meta")
    assert type(moved) is type(batch)
    assert find(moved).is_meta
    assert find(batch).flatten()[:3].tolist() == [0, 1, 2]
    assert attributes(moved) == attributes(batch) == before


@pytest.mark.parametrize(("make", "find"), [kind for name, kind in KINDS.items() if name != "hiding"])
def test_each_tensor_is_found_and_mapped_once(make, find):
    batch, seen = make(torch.arange(3.0)), []

    def add_one(tensor):
        seen.append(tensor)
        added = tensor.clone()
        added.add_(1)
        return added

    mapped = map_tensors(batch, add_one)
    assert type(mapped) is type(batch)
    assert find(mapped).flatten().tolist() == [1, 2, 3] * (find(mapped).numel() // 3)
    assert find(batch).flatten().tolist() == [0, 1, 2] * (find(batch).numel() // 3)
    assert {id(tensor) for tensor in seen} == {id(tensor) for tensor in iter_tensors(batch)}
    assert len({id(tensor) for tensor in seen}) == len(seen)


def test_other_attributes_of_a_batch_are_kept():
    image = torch.ones(3)
    batches = [Fields({"a": image}, image=image, name="n"), Encoding({"image": image}, n_sequences=2)]
    batches += [Named("n", [image]), circle(image), labeled(image), Built("n", image)]
    fields, encoding, named, again, pair, built = map_tensors(batches, torch.clone)
    assert (fields.name, named.name, pair.name, built.name, encoding.n_sequences) == ("n", "n", "n", "n", 2)
    assert fields["a"] is fields.image  # the same tensor twice is copied once
    assert pair.weights is pair.image
    assert again["again"][0] is again["image"]
    assert again["again"][1] is again


def test_what_holds_a_file_is_neither_copied_nor_closed(tmp_path):
    class Archive(dict):
        def __del__(self):
            self.closed = True

    archive = Archive(image=torch.ones(1))
    assert map_tensors([archive], torch.clone)[0] is archive
