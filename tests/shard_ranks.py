"""What each rank and worker reads: run by torchrun from tests/data/shards/test_read.py.

python -m torch.distributed.run --nproc-per-node 2 tests/shard_ranks.py FOLDER...
"""

import json
import os
import sys
from pathlib import Path

from torch.utils.data import DataLoader

from labkit import read_shards


def main(folders: list[str]) -> None:
    rank, found = int(os.environ["RANK"]), {}
    for folder in folders:
        dataset = read_shards(folder, shuffle=4)
        loader = DataLoader(dataset, batch_size=3, num_workers=2, persistent_workers=True)
        for epoch in range(2):
            dataset.set_epoch(epoch)
            batches = [(image[:, 0, 0, 0] + 256 * image[:, 1, 0, 0].int(), label) for image, label in loader]
            found[f"{Path(folder).name} {epoch}"] = [number.item() for numbers, _ in batches for number in numbers]
    (Path(folders[0]).parent / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
