"""`--steps` and `--replay`: what is done with the batches of an observed training, apart from noting them.

In comes each batch, from `Record`, which asks a `Control` before it and tells it after it. Out goes the call that ends
the script or reports, once there are enough; and of a replay, batches from memory and `Record.loader_s`.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from labkit.watching.loaders import REPLAY, Control, SeenLoader
from labkit.watching.record import Record

KEPT = 4  # batches to replay
_LEAST = 8  # batches in each part
UNSETTLED = 8  # batches before the figures begin
_LEAST_EPOCH = 48  # batches: of them 20 are observed and settled, and 20 replayed
_MOST_REST_S = 30.0
_PATIENCE = 10  # times the batches to see: a loop without gradients that goes on for so long is no validation
REPLAY_STEPS = 60  # to observe, where nobody says how many


class Steps(Control):
    """Counts batches of the training, and acts when there are enough, or when their epoch ends before that.

    A training need not use torch's optimizers, nor step in each epoch: as long as none of them has stepped between two
    batches of any loader, a loop with gradients is taken for one, and any loop that goes on for long.

    Args:
        record: Of the process that trains.
        n_steps: Batches to see, besides the first ones.
        then: Called once, after the last of them.
        at_end: Whether the end of an epoch of the training also calls it, and what would save a file.
    """

    def __init__(self, record: Record, n_steps: int, then: Callable[[], None], *, at_end: bool = True):
        self._record, self._n_steps, self._then = record, n_steps, then
        self._at_end, self._is_over = at_end, False

    def next(self, seen: SeenLoader, give: Callable[[], Any]) -> Callable[[], Any]:
        if self._is_training(seen) and seen.n_batches >= self._n_steps + UNSETTLED:
            self._end_without_steps(seen)
        return give

    def saving(self, loaders: list[SeenLoader]) -> None:
        n_batches = sum(loader.n_batches for loader in loaders) or self._record.loop.n_steps
        if self._at_end and n_batches:
            self._note(f"The script ends where it would save by torch.save, after {n_batches} batches of its loaders.")
            self._then()

    def looped(self, loop: Any) -> None:
        is_enough = loop.n_steps >= self._n_steps + UNSETTLED and not self._is_over
        if is_enough and not any(loader.trains for loader in self._record.loaders):
            self._is_over = True
            self._end_loop(loop.name)

    def _end_loop(self, name: str) -> None:
        self._then()

    def _is_training(self, seen: SeenLoader) -> bool:
        if any(loader.trains for loader in self._record.loaders):
            return seen.trains
        return seen.has_gradients or seen.n_batches >= _PATIENCE * (self._n_steps + UNSETTLED)

    def _end_without_steps(self, seen: SeenLoader) -> None:
        """Act, and say so if nothing but the number of batches tells that they were a training's."""
        if not seen.trains and not self._is_over:
            self._record.main = seen
            self._note(
                f"The batches of {seen.kind} {seen.number} were taken for the training's, although neither "
                f"backward() nor an optimizer of torch ran between {seen.n_batches} of them."
            )
        self._is_over = True
        self._then()

    def _note(self, said: str) -> None:
        self._record.failed.append(said)

    def ended(self, seen: SeenLoader) -> None:
        if self._at_end and self._is_training(seen):
            self._end_without_steps(seen)


class Replay(Steps):
    """After the observed steps, kept batches again in the script's own loop: the step alone; then the loader alone.

    An epoch must hold all of it, so that the loop does not end, nor a schedule of the learning rate. `then` must end
    the script.
    """

    def __init__(self, record: Record, n_steps: int, then: Callable[[], None]):
        super().__init__(record, n_steps, then)
        self._n_replayed = 0
        self._of: SeenLoader | None = None
        self.kept = list[Any]()

    def next(self, seen: SeenLoader, give: Callable[[], Any]) -> Callable[[], Any]:
        is_training = self.phase == "training" and self._is_training(seen)
        if is_training and seen.n_batches >= self._n_observed(seen) + UNSETTLED:
            self.phase, self._of = "keep", seen
        if seen is not self._of:
            return give
        if self.phase == "keep" and len(self.kept) == KEPT:
            self.phase = REPLAY
            _rest(seen)
        if self.phase == REPLAY and self._n_replayed == self._n_observed(seen) + 2:
            self._load_alone(seen, give)
            self._end_without_steps(seen)
        return self._kept_batch if self.phase == REPLAY else give

    def received(self, seen: SeenLoader, data: Any) -> None:
        if self.phase == "keep" and seen is self._of:
            self.kept.append(_copied(data))

    def _end_loop(self, name: str) -> None:
        self._note(f"--replay repeats batches of loaders that are known, and nothing is known of that of {name}.")
        super()._end_loop(name)

    def ended(self, seen: SeenLoader) -> None:
        """It ends with the epoch, since a script may save after it."""
        if self._is_training(seen) and self.phase == "training":
            self._note(
                f"--replay ends with the first epoch, whose {len(seen.epochs[-1].batches)} batches are too few for it: "
                f"{_LEAST_EPOCH} are enough, as by a smaller batch size."
            )
        super().ended(seen)

    def _kept_batch(self) -> Any:
        self._n_replayed += 1
        return _copied(self.kept[self._n_replayed % KEPT])

    def _load_alone(self, seen: SeenLoader, give: Callable[[], Any]) -> None:
        """Seconds per batch, without those that it had ready; None at the end of the epoch."""
        began_s, times_s = time.perf_counter(), list[float]()
        with suppress(StopIteration):
            for _ in range(self._n_observed(seen)):
                give()
                times_s.append(time.perf_counter())
        later = times_s[len(times_s) // 2 :]
        if len(later) > 1:
            self._record.loader_s = (later[-1] - later[0]) / (len(later) - 1)
        elif times_s:
            self._record.loader_s = (times_s[-1] - began_s) / len(times_s)

    def _n_observed(self, seen: SeenLoader) -> int:
        """Steps to observe, and again to replay: fewer if the epoch is short."""
        if seen.traits.n_batches is None:
            return self._n_steps
        return max(_LEAST, min(self._n_steps, (seen.traits.n_batches - UNSETTLED - KEPT - 4) // 2))


def _copied(batch: Any) -> Any:
    """The batch in new containers with tensors of its own: a step may take items out of it, and write into them."""
    from labkit.util.tensor_trees import map_tensors

    return map_tensors(batch, lambda tensor: tensor.clone())


def _rest(seen: SeenLoader) -> None:
    """Let workers fill their queue: working ahead would slow down what is timed."""
    batches = seen.epochs[-1].batches
    a_batch_s = (batches[-1].received_s - batches[0].received_s) / max(1, len(batches) - 1)
    time.sleep(min(_MOST_REST_S, 1.3 * n_ahead(seen) * a_batch_s))


def n_ahead(seen: SeenLoader) -> int:
    """Batches that workers have ready at most; one of a loader that does not say."""
    traits = seen.traits
    return 1 if traits.num_workers is None else traits.num_workers * (traits.prefetch_factor or 2)
