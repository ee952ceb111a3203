"""What a data set of shards reads, undecoded."""


def samples(dataset) -> list[tuple[str, bytes, bytes]]:
    """Key, label and image of each sample, in their order."""
    return [(sample["__key__"], sample["cls"], sample["jpg"]) for sample in dataset.samples()]
