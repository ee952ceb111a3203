"""Code for CUDA on the simulated device: what it computes, when, and what goes wrong where it would on a GPU."""

import contextlib
import copy
import time
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import labkit as lk
from labkit import course
from labkit.simulation.tensor import SimulatedTensor

MIB = 2**20
SLOW = course.SimulatedDevice(
    pcie_bytes_per_s=MIB, staging_bytes_per_s=MIB / 2, launch_s=0.0, kernel_s=1.0, clock_hz=1000.0
)  # a second for each MiB copied and for each kernel


@pytest.fixture
def slow():
    with lk.simulated_cuda(SLOW) as simulation:
        yield simulation


def mib(value: float = 0.0) -> torch.Tensor:
    return torch.full((MIB // 4,), value)


class TestValues:
    """The same as on the CPU."""

    CASES: ClassVar = {
        "elementwise": lambda x: x.mul(2).add_(1).sqrt(),
        "reduced": lambda x: x.sum(0),
        "views": lambda x: x.view(4, 3).t()[1:].contiguous(),
        "split": lambda x: torch.cat(x.split(2, dim=1)[::-1], dim=1),
        "indexed": lambda x: x[torch.tensor([2, 0], device=x.device)],
        "indexed from the host": lambda x: x[torch.tensor([2, 0])],
        "written into": lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), x[0]),
        "a slice set": lambda x: setitem(x.clone()),
        "masked": lambda x: x[x > 4],
        "nonzero": lambda x: (x > 4).nonzero(),
        "matmul": lambda x: x @ x.T,
        "one_hot": lambda x: nn.functional.one_hot(x.long()[0], 12),
        "interpolated": lambda x: nn.functional.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        "where": lambda x: torch.where(x > 4, x, 0.0),
        "new": lambda x: x.new_zeros(2, 2) + x.new_tensor([1.0, 2.0]),
        "factory": lambda x: torch.arange(12.0, device=x.device).view(3, 4) + x,
        "out": lambda x: torch.add(x, x, out=torch.empty(3, 4, device=x.device)),
        "dtype": lambda x: x.to(torch.uint8),
        "channels last": lambda x: x.view(1, 3, 2, 2).to(memory_format=torch.channels_last) + 1,
        "float64 scalar": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
        "sorted": lambda x: x.flip(1).sort(dim=1)[0],
        "several results": lambda x: torch.stack(torch.var_mean(x, dim=1)),
        "complex": lambda x: torch.view_as_real(torch.fft.fft(x)),
        "normalised": lambda x: nn.functional.batch_norm(x, None, None, training=True),
        "empty": lambda x: x[:0] + 1,
        "viewed in place": lambda x: (x + 1).unsqueeze_(0).transpose_(1, 2) * 2,
        "colors": lambda x: v2.functional.adjust_hue(x.view(1, 3, 2, 2).to(torch.uint8), 0.2),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_of_operators(self, name):
        expected = self.CASES[name](torch.arange(12.0).view(3, 4))
        with lk.simulated_cuda() as simulation:
            found = self.CASES[name](torch.arange(12.0).view(3, 4).cuda())
            assert isinstance(found, SimulatedTensor)
            assert found.device == torch.device("cuda", 0)
            assert found.is_cuda
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found.cpu(), expected)
            assert simulation.races == []

    def test_of_training(self):
        def train(device):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
            ).to(device)  # fmt: skip
            optimizer = torch.optim.AdamW(model.parameters())
            images, labels = torch.randn(8, 3, 14, 14).to(device), torch.arange(8).to(device)
            losses = []
            for _ in range(3):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, {name: value.cpu() for name, value in model.state_dict().items()}

        losses, state = train("cpu")
        with lk.simulated_cuda() as simulation:
            found, found_state = train("cuda")
            assert simulation.races == []
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(found_state[name], value)

    def test_no_gradient_is_lost_between_host_and_device(self, slow):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        with pytest.raises(RuntimeError, match=r"carries no gradients .* make the tensor on the device"):
            x.cuda()
        on_device = x.detach().cuda().requires_grad_()
        (on_device**2).sum().backward()
        assert on_device.grad.tolist() == [2.0, 4.0]

    def test_random_numbers_are_the_devices_own(self):
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        with lk.simulated_cuda():
            torch.cuda.manual_seed(5)
            first = torch.rand(4, device="cuda").cpu()
            assert torch.equal(torch.rand(3), expected)
            torch.cuda.manual_seed(5)
            assert torch.equal(torch.rand(4, device="cuda").cpu(), first)

    def test_copies_and_texts(self, slow):
        x = torch.tensor([1.0, 2.0], device="cuda")
        assert repr(x) == "tensor([1., 2.], device='cuda:0')"
        assert x.tolist() == copy.deepcopy(x).tolist() == [1.0, 2.0]
        assert x.numpy(force=True).tolist() == [1.0, 2.0]
        assert (float(x[1]), bool(x[0])) == (2.0, True)


def setitem(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:3] = x[:, :2] + 10
    return x


class TestTime:
    def test_a_kernel_runs_beside_the_host(self, slow):
        x = torch.zeros(4, device="cuda")
        _ = x + 1
        assert slow.now_s == time.perf_counter() == 0
        torch.cuda.synchronize()
        assert slow.now_s == 2

    def test_kernels_take_what_they_compute_and_what_they_move(self):
        device = course.SimulatedDevice(flops_per_s=1e6, memory_bytes_per_s=1e6, launch_s=0.0, min_kernel_s=0.0)
        with lk.simulated_cuda(device) as simulation:
            a, b = torch.empty(100, 50, device="cuda"), torch.empty(50, 10, device="cuda")
            _ = a @ b
            torch.cuda.synchronize()
            assert simulation.now_s == pytest.approx(2 * 100 * 50 * 10 / 1e6)
            _ = a + 1
            torch.cuda.synchronize()
            assert simulation.now_s == pytest.approx(0.1 + 2 * 4 * 100 * 50 / 1e6)

    def test_the_host_is_busy_with_launching(self):
        with lk.simulated_cuda(course.SimulatedDevice(launch_s=0.5)) as simulation:
            x = torch.zeros(4, device="cuda")
            x.view(2, 2)  # no kernel
            _ = x + 1
            assert simulation.now_s == 1.0

    @pytest.mark.parametrize(
        ("pinned", "non_blocking", "waited_s", "done_s"),
        [(False, False, 2, 2), (False, True, 2, 2), (True, False, 1, 1), (True, True, 0, 1)],
    )
    def test_of_copies(self, slow, pinned, non_blocking, waited_s, done_s):
        source = mib(3.0).pin_memory() if pinned else mib(3.0)
        copied = source.to("cuda", non_blocking=non_blocking)
        assert slow.now_s == waited_s
        torch.cuda.synchronize()
        assert slow.now_s == done_s
        assert torch.equal(copied.cpu(), source)

    def test_a_pageable_copy_waits_for_the_stream_first(self, slow):
        torch.cuda._sleep(5000)
        mib().to("cuda", non_blocking=True)
        assert slow.now_s == 7

    def test_copies_overlap_with_kernels_on_another_stream_only(self, slow):
        source = mib().pin_memory()
        for stream, total_s in ((None, 4), (torch.cuda.Stream(), 3)):
            begun = slow.now_s
            torch.cuda._sleep(3000)
            with torch.cuda.stream(stream):
                source.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            assert slow.now_s - begun == total_s

    def test_to_the_host(self, slow):
        x = torch.zeros(MIB // 4, device="cuda")
        x.cpu()
        assert slow.now_s == 2
        later = (x + 1).to("cpu", non_blocking=True)
        assert later.is_pinned()
        assert slow.now_s == 2
        torch.cuda.synchronize()
        assert (later == 1).all()

    def test_events(self, slow):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(3000)
        end.record()
        assert not end.query()
        with pytest.raises(RuntimeError, match="not ready"):
            start.elapsed_time(end)
        end.synchronize()
        assert (start.elapsed_time(end), slow.now_s) == (3000.0, 3.0)
        with pytest.raises(ValueError, match="enable_timing"):
            start.elapsed_time(torch.cuda.Event())
        with pytest.raises(RuntimeError, match="not ready"):
            start.elapsed_time(torch.cuda.Event(enable_timing=True))

    def test_streams_wait_for_each_other(self, slow):
        side = torch.cuda.Stream()
        torch.cuda._sleep(4000)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1000)
        assert slow.now_s == 0
        side.synchronize()
        assert slow.now_s == 5
        assert torch.cuda.current_stream() == torch.cuda.default_stream() != side

    def test_the_timeline(self, slow):
        mib().pin_memory().to("cuda", non_blocking=True)
        slow.work(0.5, "load")
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        rows = slow.timeline()[["lane", "kind", "start_s", "end_s"]].to_numpy().tolist()
        assert sorted(rows) == [
            ["compute", "sleep", 1.0, 2.0], ["copy to device", "copy to device", 0.0, 1.0],
            ["host", "load", 0.0, 0.5], ["host", "wait", 0.5, 2.0],
        ]  # fmt: skip
        assert slow.timeline().simulated.all()

    def test_a_callers_durations(self):
        with lk.simulated_cuda(SLOW, duration=lambda name, seconds: {"add": 7.0}.get(name, seconds)) as simulation:
            _ = torch.zeros(1, device="cuda") + 1
            torch.cuda.synchronize()
            assert simulation.now_s == 8


class TestRaces:
    def test_a_kernel_that_does_not_wait_for_the_copy_sees_what_was_there(self, slow):
        side, source = torch.cuda.Stream(), mib(1.0).pin_memory()
        with torch.cuda.stream(side):
            copied = source.to("cuda", non_blocking=True)
        total = copied.sum()
        assert total.item() == 0  # the bytes had not come
        assert [(race.first, race.second) for race in slow.races] == [("copy to device", "sum")]

    def test_a_race_is_found_though_all_went_well(self, slow):
        side, source = torch.cuda.Stream(), mib(1.0).pin_memory()
        with torch.cuda.stream(side):
            copied = source.to("cuda", non_blocking=True)
        slow.work(10.0)
        assert copied.sum().item() == MIB // 4
        assert len(slow.races) == 1

    def test_memory_of_a_stream_is_given_away_under_another_ones_kernels(self, slow):
        side, sources = torch.cuda.Stream(), [mib(float(n)).pin_memory() for n in range(2)]
        sums = []
        for source in sources:
            with torch.cuda.stream(side):
                copied = source.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda._sleep(5000)
            sums.append(copied.sum())
            del copied
        assert [total.item() for total in sums] == [MIB // 4, MIB // 4]  # the first is of the second batch
        assert [(race.first, race.second) for race in slow.races] == [("sum", "copy to device")]


class TestOfTheContext:
    def test_torch_is_as_before_afterwards(self):
        owners = (torch.Tensor, torch.cuda, torch.accelerator, torch, time)
        before = [dict(vars(owner)) for owner in owners]
        with contextlib.suppress(ZeroDivisionError), lk.simulated_cuda():
            assert torch.cuda.is_available()
            raise ZeroDivisionError
        for owner, names in zip(owners, before, strict=True):
            assert {name for name in names if vars(owner).get(name) is not names[name]} == set()
        assert "to" not in vars(torch.Tensor)

    def test_what_is_left_of_it_says_so(self):
        with lk.simulated_cuda():
            x = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"no simulated device is active.*move results to the host there"):
            x + 1

    def test_one_at_a_time(self, slow):
        with pytest.raises(RuntimeError, match="active already"), lk.simulated_cuda():
            pass

    def test_a_second_device_and_other_kinds(self, slow):
        with pytest.raises(RuntimeError, match="'cpu' and 'cuda:0', got 'cuda:1'"):
            torch.zeros(1, device="cuda").to("cuda:1")
        with pytest.raises(RuntimeError, match="'cpu' and 'cuda:0', got 'cuda:1'"):
            torch.zeros(1).to("cuda:1")
        with pytest.raises(RuntimeError, match="'cpu' and 'cuda:0', got 'meta'"):
            torch.zeros(1, device="cuda").to("meta")

    def test_mistakes_that_cuda_refuses(self, slow):
        x = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"same device.*cuda:0 and cpu"):
            x + torch.zeros(3)
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.numpy()
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            x.pin_memory()

    def test_waiting_can_be_forbidden(self, slow):
        x = torch.zeros(3, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        for waits in (lambda: x[0].item(), lambda: x.cpu(), lambda: x.nonzero(), lambda: torch.zeros(2).cuda()):
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                waits()

    def test_pinned_views_and_what_is_not(self, slow):
        whole = torch.arange(6).view(2, 3).pin_memory()
        assert whole[1].is_pinned()
        assert whole.pin_memory() is whole
        assert not whole.clone().is_pinned()
        assert not whole[:0].is_pinned()
        assert torch.arange(6).view(2, 3).t().pin_memory().stride() == (1, 3)

    def test_a_dataloader_pins(self, slow):
        loader = DataLoader([(torch.full((4,), n), n) for n in range(4)], batch_size=2, pin_memory=True)
        batches = list(loader)
        assert all(part.is_pinned() for batch in batches for part in batch)
        assert torch.equal(batches[1][0], torch.tensor([[2] * 4, [3] * 4]))

    @pytest.mark.parametrize(("field", "value"), [("flops_per_s", 0), ("launch_s", -1.0), ("clock_hz", float("nan"))])
    def test_figures_that_cannot_be(self, field, value):
        with pytest.raises(ValueError, match=f"{field} must be"):
            course.SimulatedDevice(**{field: value})
