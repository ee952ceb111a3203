"""What labkit's loaders give to Fabric, the Trainer of transformers, timm and torchdata: each tried once."""

import itertools

import pytest
import torch

import labkit as lk
from tests.frameworks.samples import loader_of, rows, run_script

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]


def test_fabric_gives_the_loaders_own_batches():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    loader, own = fabric.setup_dataloaders(loader_of(2)), loader_of()
    assert [rows(loader) for _ in range(2)] == [rows(own) for _ in range(2)]


def test_torchdatas_stateful_loader_over_its_parts_resumes_exactly():
    from torchdata.stateful_dataloader import StatefulDataLoader

    def stateful():
        made = loader_of()
        return StatefulDataLoader(made.dataset, batch_sampler=made.batch_sampler, num_workers=2)

    own, begun, resumed = loader_of(), stateful(), stateful()
    expected = [rows(own) for _ in range(3)]
    assert [rows(begun) for _ in range(2)] == expected[:2]
    iterator = iter(begun)
    taken = list(itertools.islice(iterator, 2))
    resumed.load_state_dict(begun.state_dict())
    assert rows(taken + list(resumed)) == expected[2]


TRAINER = """
import sys
import torch
from transformers import Trainer, TrainingArguments
from tests.frameworks.samples import Drawn, loader_of, save

seen = []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        seen.extend(x.tolist())
        return {"loss": self.layer(torch.ones(1, 1)).sum()}

class Ours(Trainer):
    def get_train_dataloader(self):
        collate = lambda samples: {"x": torch.stack(samples)}
        return self.accelerator.prepare(loader_of(int(sys.argv[1]), collate_fn=collate))

arguments = TrainingArguments(
    "out", num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
    disable_tqdm=True, remove_unused_columns=False,
)
Ours(Model(), arguments, train_dataset=Drawn()).train()
save([seen[:24], seen[24:]])
"""


def test_the_trainer_of_transformers_gets_the_loaders_own_draws(tmp_path):
    pytest.importorskip("transformers")
    [epochs], own = run_script(tmp_path, TRAINER, 1), loader_of()
    assert [sorted(map(tuple, epoch)) for epoch in epochs] == [sorted(rows(own)) for _ in range(2)]
    assert [index for index, _ in epochs[0]] != [index for index, _ in epochs[1]]


def test_timms_loader_takes_the_data_set(first_photos):
    """timm makes its own loader of a data set; its PIL transforms go with `PILDataset`."""
    data = pytest.importorskip("timm.data")
    options = {"is_training": True, "use_prefetcher": False, "num_workers": 0}
    loader = data.create_loader(lk.PILDataset(first_photos(12)), input_size=(3, 32, 32), batch_size=4, **options)
    images, labels = next(iter(loader))
    assert (images.shape, labels.dtype) == ((4, 3, 32, 32), torch.int64)
