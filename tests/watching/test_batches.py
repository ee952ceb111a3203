"""What `watch` says of a batch: its tensors and bytes, what pinning it takes, and what to change of it."""

from collections import namedtuple
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.data import DataLoader

import labkit as lk
from labkit.watching.loaders import look_at
from labkit.watching.report import SHARES
from tests.watching.trained import watched_while

DEAR, CHEAP = ({"compute": 1 - share, "hand-over": share} for share in (0.2, 0.01))
Named = namedtuple("Named", "x y")


@dataclass
class Held:
    x: torch.Tensor
    more: list


def sample(number):
    """114 tensors: 1 of 40,000 float32, 3 of an int64, and 110 of 100 float64, in all kinds of nests."""
    small = [torch.full((100,), float(number), dtype=torch.float64) for _ in range(110)]
    label = torch.tensor(number)
    return {
        "image": torch.rand(40_000), "labels": (label, Named(label + 1, "no tensor")),
        "held": Held(label + 2, small[:55]), "more": {"deep": [small[55:], 7]},
    }  # fmt: skip


def first(samples):
    return samples[0]


def report_of(loader, **changed):
    return replace(watched_while(loader).report(), n_batches=100, **changed)


def shares(**given):
    return dict.fromkeys(SHARES, 0.0) | given


class TestABatch:
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_of_a_loader_is_counted_in_all_kinds_of_nests(self, num_workers):
        data = [sample(number) for number in range(30)]
        report = report_of(DataLoader(data, 1, collate_fn=first, num_workers=num_workers), shares=shares(**DEAR))
        dtypes = {"float32": 4 * 40_000, "int64": 3 * 8, "float64": 110 * 800}
        expected = {
            "n_tensors": 114, "n_bytes": sum(dtypes.values()), "dtypes": dtypes, "n_on_host": 114, "n_pinned": None,
            "n_small": 113, "n_strided": 0, "n_bytes_as_uint8": sum(dtypes.values()), "pin_s": None,
        }  # fmt: skip
        assert report.to_dict()["batch"] == expected
        amount, *stack = report.batch_sentences
        assert amount == "A batch is 114 tensors, 248 kB: float32 160 kB, float64 88 kB, int64 24 bytes."
        told = "113 of its tensors are smaller than 64 kB, and each is sent from its worker on its own"
        assert stack == [f"{told}: stack them in collate_fn."] * (num_workers > 0)
        assert set(report.batch_sentences) <= set(report.details)
        assert replace(report, shares=shares(**CHEAP)).batch_sentences == [amount], "what costs nothing needs no change"

    @pytest.mark.parametrize(
        ("images", "n_fitting"),
        [
            (torch.randint(256, (8, 3, 32, 32)) / 255, 1), (torch.randint(256, (8, 32, 32, 3)) / 255 * 4.4 - 2.1, 1),
            (torch.randint(2, (1, 64, 64)).float(), 1), (torch.randint(256, (4, 32, 32, 1)).float(), 1),
            (torch.rand(8, 1, 32, 32), 0),  # depths
            (torch.randint(256, (8, 4, 32, 32)).float(), 0), (torch.randint(256, (8, 3, 32, 32)), 0),
            (torch.randint(256, (8, 3, 4, 4)).float(), 0), (torch.zeros(0, 3, 32, 32), 0),
            (torch.full((3, 32, 32), torch.nan), 0),
        ],
    )  # fmt: skip
    def test_could_be_bytes_if_its_images_have_the_values_of_bytes(self, images, n_fitting):
        facts = look_at({"image": images, "label": torch.zeros(8)})
        saved = 3 * images.numel() * n_fitting
        assert (facts.n_bytes, facts.n_bytes_as_uint8) == (images.nbytes + 32, images.nbytes + 32 - saved)
        [said] = facts.sentences(is_dear=True, pin_share=0.0, has_workers=False, pins=False)
        assert ("as uint8 it would be" in said) == bool(n_fitting)

    def test_has_gaps_where_elements_do_not_lie_side_by_side(self):
        tensor = torch.zeros(4, 3, 8, 8)
        dense = [tensor, tensor.mT, tensor.to(memory_format=torch.channels_last), tensor[:2], torch.zeros(0, 3)[:, :1]]
        gaps = [tensor[:, :2], tensor[..., ::2]]
        others = [torch.eye(3).to_sparse(), torch.zeros(1, 3).expand(4, 3)]
        facts = look_at([*dense, *gaps, *others])
        assert (facts.n_tensors, facts.n_strided) == (9, 2)
        said = [*facts.sentences(is_dear=True, pin_share=0.0, has_workers=False, pins=False)]
        assert "2 tensors of a batch have gaps between elements: .contiguous() in collate_fn saves a copy." in said

    def test_that_cannot_be_looked_at_is_let_be(self):
        class Odd(dict):
            def values(self):
                raise RuntimeError("not for you")

        report = report_of(DataLoader([Odd(x=torch.zeros(4)) for _ in range(30)], 1, collate_fn=first))
        assert report.batch is None
        assert report.batch_sentences == []
        assert look_at(7).n_tensors == 0


class TestPinning:
    """On a simulated device, by its clock."""

    @pytest.fixture(autouse=True)
    def device(self):
        with lk.simulated_cuda() as device:
            torch.zeros(1, device="cuda")
            yield device

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_is_timed_as_a_whole_where_torch_does_it(self, num_workers, monkeypatch, device):
        pin = torch.Tensor.pin_memory
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *args: device.work(1.0) or pin(self, *args))
        data = [[torch.zeros(4), {"y": torch.zeros(2)}, "no tensor"] for _ in range(30)]
        report = report_of(DataLoader(data, 1, collate_fn=first, pin_memory=True, num_workers=num_workers))
        assert (report.batch.n_on_host, report.batch.n_pinned) == (2, 2)
        assert report.batch.pin_s == pytest.approx(2.0, rel=1e-3)
        report = replace(report, costs=replace(report.costs, together=8.0))
        where = ", in a thread beside the step" if num_workers else ""
        assert f"; pinning it takes 2,000 ms{where}, 25% of the time of a batch." in report.batch_sentences[0]

    def test_that_misses_tensors_of_a_class_of_ones_own_is_told(self):
        held = [Held(torch.zeros(4), [torch.zeros(4)]) for _ in range(30)]
        report, plain = (report_of(DataLoader(held, 1, collate_fn=first, pin_memory=pins)) for pins in (True, False))
        assert (report.batch.n_on_host, report.batch.n_pinned) == (2, 0)
        told = report.batch_sentences[-1]
        assert told.startswith("pin_memory=True pins 0 of the 2 tensors of a batch: torch looks for")
        assert plain.batch_sentences == ["A batch is 2 tensors, 32 bytes of float32; it is not pinned."]
