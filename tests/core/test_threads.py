"""Threads that compute alone change nothing for others."""

import threading

import torch

from labkit.core.threads import use_one_torch_thread


def test_compute_alone_leaves_other_threads_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = {}

        def ask(name):
            seen[name] = torch.get_num_threads()

        def alone():
            use_one_torch_thread()
            ask("alone")

        for name, work in {"alone": alone, "later": lambda: ask("later")}.items():
            thread = threading.Thread(target=work, name=name)
            thread.start()
            thread.join()
        ask("main")
        assert seen == {"alone": 1, "later": 3, "main": 3}
    finally:
        torch.set_num_threads(before)
