"""What others have published and a plan may start from: training rates, storages, the cores of rented machines.

None of these figures is labkit's; each is given with its source. What is only theory says so.
"""

import math
from dataclasses import dataclass

from labkit.data.simulated_disks import OBJECT_LATENCY_MS
from labkit.errors import ArgumentError
from labkit.planning.formulas import Estimate
from labkit.util.arguments import require_choice


@dataclass(frozen=True)
class PublishedTraining:
    """A training rate that somebody published, with the theoretical rate of the device's bus.

    Args:
        images_per_s: Of one device.
        pcie_bytes_per_s: One direction, 16 lanes, by the generation of the device's bus; real copies are slower.
        source: Of the training rate.
        url: Where it is published.
        is_tuned: Made for a benchmark: an upper bound for other trainings.
        emulated: A lower rate that MLPerf Storage emulates for the same training (batch / computation_time), and the
            name of its configuration.
    """

    images_per_s: float
    pcie_bytes_per_s: float
    source: str
    url: str = ""
    is_tuned: bool = False
    emulated: tuple[float, str] | None = None

    def step_s(self, batch_size: int = 64) -> float:
        """Seconds of a step at this rate."""
        return batch_size / self.images_per_s


_RESULTS = "https://github.com/mlcommons/training_results_v4.0/tree/main/Dell/results"
_MLPERF = "MLPerf Training v4.0, Dell's results (MXNet and DALI, tuned: an upper bound)"
_EXAMPLES = (
    "NVIDIA DeepLearningExamples, ResNet-50 v1.5 for PyTorch, README (AMP)",
    "https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/ConvNets/resnet50v1.5/README.md",
)
_TIMM = (
    "timm, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv",
    "https://github.com/huggingface/pytorch-image-models/blob/main/results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv",
)
_GEN3, _GEN4, _GEN5 = 16e9, 32e9, 64e9

#: Published images/s of one GPU in training, by `model, GPU`, each with its source: what `plan` takes for a `gpu`.
PUBLISHED_TRAINING = {
    "ResNet-50, H100 SXM": PublishedTraining(
        7150, _GEN5, _MLPERF, f"{_RESULTS}/XE9680x8H100-SXM-80GB/resnet", True, (1786, "resnet50_h100")
    ),
    "ResNet-50, A100 80GB": PublishedTraining(2470, _GEN4, *_EXAMPLES, emulated=(920, "resnet50_a100")),
    "ResNet-50, L40S": PublishedTraining(2180, _GEN4, _MLPERF, f"{_RESULTS}/R760xax4L40S/resnet", True),
    "ResNet-50, V100 16GB": PublishedTraining(1200, _GEN3, *_EXAMPLES),
    "ResNet-18, RTX 3090": PublishedTraining(3482, _GEN4, *_TIMM),
    "ResNet-50, RTX 3090": PublishedTraining(1218, _GEN4, *_TIMM),
    "ViT-B/16, RTX 3090": PublishedTraining(393, _GEN4, *_TIMM),
    "ConvNeXt-T, RTX 3090": PublishedTraining(819, _GEN4, *_TIMM),
}

_STORAGE_URL = "https://github.com/mlcommons/storage/blob/main/storage-conf/workload"

# GPU -> (vCPUs and GB of local NVMe disks a GPU, instance)
_RENTED = {"H100 SXM": (24, 3840, "p5.48xlarge"), "A100 80GB": (12, 1000, "p4de.24xlarge")}
_INSTANCES = "https://aws.amazon.com/ec2/instance-types/"


def find_training(gpu: str, model: str) -> str:
    """The key in `PUBLISHED_TRAINING` of a model on a GPU, by a name such as "h100" or "RTX 3090".

    Raises:
        ValueError: none is published; says which are.
    """
    gpus = list(dict.fromkeys(key.split(", ")[1] for key in PUBLISHED_TRAINING))
    wanted = _simple(gpu)
    found = [each for each in gpus if wanted and wanted in _simple(each)]
    if len(found) != 1:
        raise ArgumentError(
            f"gpu must name one of {', '.join(gpus)}, got {gpu!r}: for others no training rate was found to cite, so "
            "enter the images/s that you measured"
        )
    models = [key.split(", ")[0] for key in PUBLISHED_TRAINING if key.endswith(f", {found[0]}")]
    return f"{require_choice('model', model, models)}, {found[0]}"


def _simple(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")


def published_inputs(key: str, gpus_per_node: float) -> dict[str, Estimate]:
    """Rate and bus of a published training, and the cores of a rented machine with such GPUs, if they were found."""
    training = PUBLISHED_TRAINING[key]
    rate = training.images_per_s
    low, why = 0.8 * rate, "20 % less assumed possible"
    if training.emulated:
        low, name = training.emulated
        why = f"low: what MLPerf Storage emulates, {_STORAGE_URL}/{name}.yaml"
    value, high, more = rate, 1.1 * rate, ", and 10 % more"
    if training.is_tuned:  # a record is the most that anyone reaches, not what to expect
        value, high, more = (low * rate) ** 0.5, rate, f"; high: the record of {rate:,.0f}"
    source = f"{key}: {training.source}, {training.url}; {why}{more}"
    found = {
        "images_per_s_per_gpu": Estimate(value, low, high, source, "published"),
        "pcie_gb_per_s": pcie(training.pcie_bytes_per_s),
    }
    if rented := _RENTED.get(key.split(", ")[1]):
        vcpus, disk_gb, instance = rented
        of = f"a GPU as in {instance}, {_INSTANCES}"
        found["cores_per_node"] = cores_of(vcpus * gpus_per_node, f"{vcpus} {of}", "published")
        found["disk_gb_per_node"] = Estimate(disk_gb * gpus_per_node, source=f"{disk_gb} GB {of}", kind="published")
    return found


def pcie(bytes_per_s: float = _GEN4) -> Estimate:
    """GB/s of one GPU's bus, by the theoretical rate of its generation."""
    generation = {_GEN3: "Gen3", _GEN4: "Gen4", _GEN5: "Gen5"}[bytes_per_s]
    rate = bytes_per_s / 1e9
    source = (
        f"PCIe {generation} x16, one direction, {rate:.0f} GB/s in theory (https://pcisig.com/specifications); "
        "copies assumed at 60 % to 100 % of it"
    )
    return Estimate(0.8 * rate, 0.6 * rate, rate, source, "theory")


def cores_of(vcpus: float, source: str = "entered", kind: str = "entered") -> Estimate:
    """Cores that a number of vCPUs are worth."""
    why = (
        "a vCPU is a thread of a core (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-optimize-cpu.html),"
        " so half a core; two threads together do up to 30 % more than one (Marr et al., Intel Technology Journal 6, "
        "2002)"
    )
    return Estimate(0.5 * vcpus, 0.5 * vcpus, 0.65 * vcpus, f"{vcpus:g} vCPUs, {source}; {why}", kind)


IMAGENET_KB = Estimate(
    114.66, source=f"ImageNet's mean record, {_STORAGE_URL}/resnet50_h100.yaml (record_length)", kind="published"
)
IMAGENET_IMAGES = Estimate(
    1_281_167, source="ImageNet-1k's training set, https://www.image-net.org/challenges/LSVRC/2012/", kind="published"
)


_S3 = "https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance"
_S3_SMALL = (
    "https://docs.aws.amazon.com/whitepapers/latest/s3-optimizing-performance-best-practices/"
    "timeouts-and-retries-for-latency-sensitive-applications.html"
)
_SSD = (
    "as announced for the Samsung 980 PRO (an upper bound), "
    "https://techbriefly.com/2020/08/31/samsung-980-pro-the-fastest-ssd-on-the-market"
)
REQUEST_MB = Estimate(11.3, 8, 16, f"ranges of 8 to 16 MB, {_S3}-design-patterns.html", "published")

# Storage -> what it gives, as inputs of a plan: a local one on each node, S3 to all. What is left out has no limit, or
# costs nothing.
STORAGES: dict[str, dict[str, Estimate]] = {
    "s3": {
        "latency_ms": Estimate(
            math.prod(OBJECT_LATENCY_MS) ** 0.5, *OBJECT_LATENCY_MS,
            f"for small objects AWS says 100 to 200 ms, {_S3}.html, and tens of milliseconds, {_S3_SMALL}", "published",
        ),
        "request_cpu_ms": Estimate(
            2, 1.6, 2.5, "s3fs without TLS: 1.6 to 2 ms, busy 2.5 (labkit's records, Far storage)", "assumed"
        ),
        "mb_per_s_per_request": Estimate(
            87.5, 85, 90, f"85 to 90 MB/s a request, {_S3}-design-patterns.html", "published"
        ),
        "requests_per_s": Estimate(5500, source=f"GET requests a prefix, {_S3}.html", kind="published"),
        "n_prefixes": Estimate(1, source="all images under one prefix", kind="assumed"),
    },
    "nvme": {
        "latency_ms": Estimate(0.1, 0.05, 0.2, "0.05 to 0.2 ms", "assumed"),
        "mb_per_s_per_request": Estimate(2500, 1000, 5000, "one reader gets a part of the disk's rate", "assumed"),
        "requests_per_s": Estimate(500_000, 200_000, 1_000_000, f"1,000,000 reads/s of 4 KB, {_SSD}", "published"),
        "storage_mb_per_s": Estimate(5000, 3000, 7000, f"7000 MB/s in sequence, {_SSD}", "published"),
    },
    "memory": {},  # the page cache
}  # fmt: skip
