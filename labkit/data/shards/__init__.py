"""WebDataset shards: written, listed, read."""
