"""The C library's allocator: have the process keep the memory that it frees."""

_LARGEST_BLOCK_BYTES = 32 * 2**20 - 2**16  # glibc learns from blocks of at most 32 MiB, header and rounding included


def keep_freed_memory() -> None:
    """Free one large block, which was never touched: from then on, glibc keeps most memory that the process frees.

    glibc gives large freed blocks back to the system, and the next image then pays a page fault for every 4 KB. What is
    large, it learns from the blocks that are freed: the limits rise up to 32 MiB for a block and 64 MiB for the end of
    the heap, and stay there (M_MMAP_THRESHOLD in mallopt(3)). A long run gets there sooner or later. A new process is
    below, and PIL's rate on large photos then depends, twofold and more, on what ran before. Forked processes inherit
    the limits. Limits set by hand stay as they are, and so do other allocators.

    Taught in: notebooks/02_read_image.ipynb
    """
    import numpy as np

    np.empty(_LARGEST_BLOCK_BYTES, np.uint8)
