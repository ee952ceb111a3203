"""Whoever does what an error of the simulated GPU advises gets what it promises."""

import numpy as np
import pytest
import torch

import labkit as lk


def told(call) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


def test_results_are_moved_to_the_host_within_the_block():
    with lk.simulated_cuda():
        left = torch.arange(3, device="cuda")
        moved = left.cpu()
    assert "keep work with its tensors and streams inside of `with lk.simulated_cuda():`, and move results to" in told(
        lambda: left + 1
    )
    assert (moved + 1).tolist() == [1, 2, 3]


def test_one_simulation_ends_before_the_next_begins():
    with lk.simulated_cuda():
        assert "leave its `with` statement first" in told(lambda: lk.simulated_cuda().__enter__())
    with lk.simulated_cuda():
        assert torch.ones(2, device="cuda").sum().item() == 2


def test_a_tensor_with_a_gradient_is_made_on_the_device_or_detached():
    weights = torch.ones(3, requires_grad=True)
    with lk.simulated_cuda():
        said = told(lambda: weights.to("cuda"))
        assert "make the tensor on the device, or move `tensor.detach()`" in said
        own = torch.ones(3, device="cuda", requires_grad=True)
        (own * 2).sum().backward()
        assert own.grad.cpu().tolist() == [2.0] * 3
        assert weights.detach().to("cuda").cpu().tolist() == [1.0] * 3


def test_numpy_reads_a_copy_on_the_host_and_events_are_timed_when_asked():
    with lk.simulated_cuda():
        tensor = torch.arange(3, device="cuda")
        assert "Use Tensor.cpu() to copy it to the host" in told(tensor.numpy)
        assert np.array_equal(tensor.cpu().numpy(), [0, 1, 2])
        plain = [torch.cuda.Event() for _ in range(2)]
        timed = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for events in (plain, timed):
            events[0].record()
            torch.cuda._sleep(1000)
            events[1].record()
        torch.cuda.synchronize()
        assert "enable_timing=True" in told(lambda: plain[0].elapsed_time(plain[1]))
        assert timed[0].elapsed_time(timed[1]) > 0
