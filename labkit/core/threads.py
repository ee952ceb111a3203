"""Threads of ours that compute alone, without threads of torch's under them."""

import sys
import threading

_setting_threads = threading.Lock()


def use_one_torch_thread() -> None:
    """Let torch compute in the calling thread only: threads that each start threads of their own wait for one another.

    `torch.set_num_threads` is meant for a whole process: it sets this thread's number, and that of all threads to
    come. So another thread puts the latter back. Where torch is not loaded, there is nothing to do.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with _setting_threads:
        of_others = torch.get_num_threads()
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(of_others,))
        restoring.start()
        restoring.join()
