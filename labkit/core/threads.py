"""Limit torch to one thread inside our worker threads."""

import sys
import threading

_lock = threading.Lock()


def use_one_torch_thread() -> None:
    """Limit torch to the calling thread; worker threads that each start more threads would compete for the cores.

    `torch.set_num_threads` sets the number for this thread and for all threads started later, so another thread
    restores the latter. Does nothing if torch is not loaded.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with _lock:
        default = torch.get_num_threads()
        torch.set_num_threads(1)
        restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
        restorer.start()
        restorer.join()
