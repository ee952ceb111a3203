"""A simulated CUDA device: streams, copies, an allocator and a clock, for machines without a GPU.

Its tensors are a wrapper subclass, beside a dispatch mode for what makes new ones; streams and copies are a
discrete-event model in Python. What else was considered: torch's open registration (PrivateUse1, with an example that
simulates a device in C++) makes a true backend, but needs a compiler, and code for "cuda" would have to be changed.
FakeTensorMode runs CUDA code without a device, but has neither values nor time. A subclass whose C++ device is CUDA, as
FakeTensor's, leaves autograd to a device thread that is not there once a process has started without it.
torch.cuda._sanitizer finds races by the same vector clocks, on a real device only.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
