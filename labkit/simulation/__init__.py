"""A simulated CUDA device: streams, copies, an allocator and a clock, for machines without a GPU."""
