"""Lightning makes the loader again for several devices, with a sampler of its own; it resumes from its checkpoints."""

import itertools
import json
import os
import subprocess
import sys

import pytest

import labkit as lk
from tests.frameworks.samples import loader_of, rows
from tests.paths import REPO

pytestmark = pytest.mark.frameworks
lightning = pytest.importorskip("lightning")

FIT = """
import json, os, sys
import torch, lightning as L, labkit as lk
from tests.frameworks.samples import Drawn, loader_of

settings = json.loads(sys.argv[1])
seen = []

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        batch = batch[0] if isinstance(batch, (tuple, list)) else batch
        values = batch.flatten(1).double().sum(1) if batch.ndim > 2 else batch
        seen.append((self.current_epoch, values.tolist()))
        if settings.get("stop") == [self.current_epoch, number]:
            self.trainer.save_checkpoint("mid.ckpt")
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

def make():
    if settings["kind"] == "BatchLoader":
        return lk.BatchLoader(lk.FolderStore(settings["photos"]), size=32, batch_size=3)
    if settings["kind"] == "sampler":
        sampler = torch.utils.data.DistributedSampler(range(24), 2, int(os.environ.get("LOCAL_RANK", 0)))
        return loader_of(settings["num_workers"], shuffle=False, sampler=sampler)
    return loader_of(settings["num_workers"])

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu", devices=settings["devices"], max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **settings.get("trainer", {}),
    )
    trainer.fit(Model(), make(), ckpt_path="mid.ckpt" if settings.get("resume") else None)
    with open(f"{trainer.global_rank}.json", "w") as file:
        json.dump(seen, file)
"""


def fit(folder, *, kind="make_loader", num_workers=0, devices=1, **settings):
    """What each rank's training steps got: rank -> epoch -> batches."""
    (folder / "fit.py").write_text(FIT)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    given = json.dumps({"kind": kind, "num_workers": num_workers, "devices": devices, **settings})
    done = subprocess.run(
        [sys.executable, "fit.py", given], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(devices)]
    return [[[batch for epoch, batch in seen if epoch == number] for number in range(2)] for seen in ranks]


def samples(batches):
    return [tuple(row) for batch in batches for row in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_device_gets_the_loaders_own_batches(tmp_path, num_workers):
    [epochs] = fit(tmp_path, num_workers=num_workers)
    own = loader_of()
    assert [samples(epoch) for epoch in epochs] == [rows(own) for _ in range(2)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_device_resumes_exactly_from_a_checkpoint_in_mid_epoch(tmp_path, num_workers):
    [whole] = fit(tmp_path, num_workers=num_workers, stop=[1, 2])
    [resumed] = fit(tmp_path, num_workers=num_workers, resume=True)
    assert samples(whole[1])[-len(samples(resumed[1])) :] == samples(resumed[1])
    assert len(resumed[1]) in (3, 4)  # whether Lightning saves before it counts the step


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("injects", [True, False])
def test_two_devices_share_out_each_epoch(tmp_path, num_workers, injects):
    """By the sampler that Lightning injects, or without one by labkit; each sample is drawn as on one device."""
    trainer = {"strategy": "ddp", "use_distributed_sampler": injects}
    ranks = fit(tmp_path, num_workers=num_workers, devices=2, trainer=trainer)
    own = loader_of()
    for first, second in zip(*ranks, strict=True):
        assert len(samples(first)) == len(samples(second)) == 12
        assert sorted(samples(first) + samples(second)) == sorted(rows(own))
    assert samples(ranks[0][0]) != samples(ranks[0][1])


def test_two_devices_take_a_sampler_of_the_trainings_own(tmp_path):
    ranks = fit(tmp_path, kind="sampler", devices=2, trainer={"strategy": "ddp"})
    own = loader_of()
    for first, second in zip(*ranks, strict=True):
        assert sorted(samples(first) + samples(second)) == sorted(rows(own))


def test_two_devices_share_out_the_images_of_batch_loader(tmp_path):
    photos = lk.FolderStore(lk.make_photos(tmp_path / "photos", 12, progress=False))
    ranks = fit(tmp_path, kind="BatchLoader", photos=str(photos.root), devices=2, trainer={"strategy": "ddp"})
    whole = lk.BatchLoader(photos, size=32, batch_size=3)
    for first, second in zip(*ranks, strict=True):
        expected = [image.double().sum().item() for images, _ in whole for image in images]
        assert sorted(itertools.chain(*first, *second)) == sorted(expected)
