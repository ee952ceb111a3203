"""Threads that compute alone change nothing for others."""

import threading

import torch

from labkit.util.process import use_one_torch_thread


def test_compute_alone_leaves_other_threads_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = []
        for work in (use_one_torch_thread, int):  # alone, and later
            thread = threading.Thread(target=lambda work=work: work() or seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert [*seen, torch.get_num_threads()] == [1, 3, 3]
    finally:
        torch.set_num_threads(before)
