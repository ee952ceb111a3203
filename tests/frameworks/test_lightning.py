"""Lightning makes the loader again for several devices, with a sampler of its own; it resumes from its checkpoints."""

import json

import pytest

from tests.frameworks.samples import LOADERS, assert_shared_out, loader_of, rows, run_script

pytestmark = pytest.mark.frameworks
lightning = pytest.importorskip("lightning")

FIT = """
import json, os, sys
import torch, lightning as L
from tests.frameworks.samples import LOADERS, loader_of, rows, save

settings = json.loads(sys.argv[1])
seen = [[], []]

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        seen[self.current_epoch] += rows([batch])
        if settings.get("stop") == [self.current_epoch, number]:
            self.trainer.save_checkpoint("mid.ckpt")
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

def make():
    if settings["kind"] == "sampler":
        sampler = torch.utils.data.DistributedSampler(range(24), 2, int(os.environ.get("LOCAL_RANK", 0)))
        return loader_of(settings["num_workers"], shuffle=False, sampler=sampler)
    return LOADERS[settings["kind"]](settings["num_workers"], settings.get("photos"))

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **{"devices": 1, **settings["trainer"]},
    )
    trainer.fit(Model(), make(), ckpt_path="mid.ckpt" if settings.get("resume") else None)
    save(seen)
"""
DDP = {"devices": 2, "strategy": "ddp"}


def fit(folder, *, kind="make_loader", num_workers=0, trainer=(), **settings):
    """What each rank's training steps got: rank -> epoch -> samples."""
    given = {"kind": kind, "num_workers": num_workers, "trainer": dict(trainer), **settings}
    return [[[*map(tuple, epoch)] for epoch in seen] for seen in run_script(folder, FIT, json.dumps(given))]


def test_one_device_gets_the_loaders_batches_and_resumes_in_mid_epoch(tmp_path):
    own = loader_of()
    [epochs] = fit(tmp_path, num_workers=2, stop=[1, 2])
    assert epochs == [rows(own) for _ in range(2)]
    [(before, rest)] = fit(tmp_path, num_workers=2, resume=True)
    assert (before, epochs[1][-len(rest) :]) == ([], rest)
    assert len(rest) in (12, 16)  # whether Lightning saves before it counts the step


def test_batch_loader_resumes_exactly_in_mid_epoch_too(tmp_path, first_photos):
    given = {"kind": "BatchLoader", "photos": str(first_photos(12))}
    [epochs] = fit(tmp_path, stop=[1, 1], **given)
    [(before, rest)] = fit(tmp_path, resume=True, **given)
    assert before == []
    assert 0 < len(rest) < len(epochs[1])
    assert epochs[1][-len(rest) :] == rest


@pytest.mark.parametrize(
    ("kind", "num_workers", "injects"),
    [("make_loader", 1, True), ("make_loader", 0, False), ("sampler", 0, True), ("BatchLoader", 0, True)],
)
def test_two_devices_share_out_each_epoch(tmp_path, first_photos, kind, num_workers, injects):
    """By the sampler that Lightning injects, the training's own, or none; each sample is drawn as on one device."""
    trainer, photos = {**DDP, "use_distributed_sampler": injects}, str(first_photos(12))
    ranks = fit(tmp_path, kind=kind, num_workers=num_workers, trainer=trainer, photos=photos)
    assert_shared_out(ranks, LOADERS["make_loader" if kind == "sampler" else kind](0, photos))
    assert kind != "make_loader" or ranks[0][0] != ranks[0][1]
