"""What labkit's loaders give to Fabric, the Trainer of transformers, timm and torchdata: each tried once."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import labkit as lk
from tests.frameworks.samples import loader_of, rows
from tests.paths import REPO

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return lk.FolderStore(lk.make_photos(tmp_path_factory.mktemp("photos"), 12, progress=False))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fabric_gives_the_loaders_own_batches(num_workers):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    loader, own = fabric.setup_dataloaders(loader_of(num_workers)), loader_of()
    assert [rows(loader) for _ in range(2)] == [rows(own) for _ in range(2)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdatas_stateful_loader_over_its_parts_gives_its_batches_and_resumes_exactly(num_workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    def stateful():
        made = loader_of()
        return StatefulDataLoader(made.dataset, batch_sampler=made.batch_sampler, num_workers=num_workers)

    own, whole = loader_of(), stateful()
    expected = [rows(own) for _ in range(2)]
    assert [rows(whole) for _ in range(2)] == expected
    begun, resumed = stateful(), stateful()
    rows(begun)
    iterator = iter(begun)
    taken = list(itertools.islice(iterator, 2))
    resumed.load_state_dict(begun.state_dict())
    assert rows(taken + list(resumed)) == expected[1]


TRAINER = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from tests.frameworks.samples import Drawn, loader_of, rows

seen = []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        seen.extend(map(tuple, x.tolist()))
        return {"loss": self.layer(torch.ones(1, 1)).sum()}

def collate(samples):
    return {"x": torch.stack(samples)}

class Ours(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(loader_of(int(sys.argv[1]), collate_fn=collate))

if __name__ == "__main__":
    arguments = TrainingArguments(
        "out", num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, remove_unused_columns=False,
    )
    Ours(Model(), arguments, train_dataset=Drawn()).train()
    own, epochs = loader_of(), [seen[:24], seen[24:]]
    assert [sorted(epoch) for epoch in epochs] == [sorted(rows(own)) for _ in range(2)], epochs
    assert [index for index, _ in epochs[0]] != [index for index, _ in epochs[1]]
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_trainer_of_transformers_gets_the_loaders_own_draws_in_an_order_of_accelerates(tmp_path, num_workers):
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(TRAINER)
    command = [sys.executable, "train.py", str(num_workers)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_timms_loader_takes_the_data_set(photos):
    """timm makes its own loader of a data set; its PIL transforms go with `PILDataset`."""
    data = pytest.importorskip("timm.data")
    dataset = lk.PILDataset(photos)
    loader = data.create_loader(
        dataset, input_size=(3, 32, 32), batch_size=4, is_training=True, use_prefetcher=False, num_workers=0
    )
    images, labels = next(iter(loader))
    assert images.shape == (4, 3, 32, 32)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_loader_over_read_shards_differs_by_epoch(tmp_path, photos, num_workers):
    lk.write_shards(photos, tmp_path / "shards", max_count=4, progress=False)
    dataset = lk.read_shards(tmp_path / "shards", shuffle=12, transform=lambda image: image[:, :8, :8].float().mean())
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers)
    epochs = [[value.item() for values, _ in loader for value in values] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
