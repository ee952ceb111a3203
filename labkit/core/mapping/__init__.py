"""One function over many items: in threads, in processes, or on a Ray cluster."""
