"""Training the models of a task on its full data set, so that an interrupted run goes on where it was.

After every epoch the model with the state of its optimizer is written to the work directory. What an epoch does depends
on (seed, number of the epoch) alone, so a resumed run sees the same batches as one that was never interrupted. A
finished model is rounded to float16, measured on all test images and exported to the assets; its state is removed.

No image of the test set takes part in a run: the number of epochs is fixed beforehand and the last one counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edge_sdk.errors import ConfigError
from zoo_keras.builders import Architecture, Recipe, architecture
from zoo_keras.data import FullDataset, Images, Labels
from zoo_keras.info import ModelInfo
from zoo_keras.quiet import load_keras
from zoo_keras.tasks import ASSETS, task
from zoo_keras.weights import load_float16, save_float16

SEED = 1
STATE_FILE = "state.json"


@dataclass(frozen=True, kw_only=True)
class EpochReport:
    """One epoch on the training images: mean loss, accuracy 0..1 and wall-clock seconds."""

    loss: float
    accuracy: float
    seconds: float


class Observer(Protocol):
    """Is told how training goes on."""

    def model_started(self, name: str, *, epochs: int, epochs_done: int) -> None:
        """`epochs_done` is above 0 when an interrupted run goes on."""

    def batch_done(self, name: str, *, epoch: int, fraction: float) -> None:
        """`fraction` of the epoch (1-based) is done."""

    def epoch_done(self, name: str, *, epoch: int, report: EpochReport) -> None:
        """The epoch is over and its state is saved."""

    def model_finished(self, info: ModelInfo) -> None:
        """The weights are exported."""


def is_trained(task_name: str, model_name: str, *, assets: Path = ASSETS) -> bool:
    """Whether the assets hold this model's weights."""
    return (assets / task_name / "models" / f"{model_name}.json").exists()


def is_unfinished(task_name: str, model_name: str, *, work_directory: Path) -> bool:
    """Whether a training of this model was interrupted after an epoch and can be gone on with."""
    return (work_directory / task_name / model_name / STATE_FILE).exists()


def train(
    task_name: str,
    model_name: str,
    full: FullDataset,
    *,
    work_directory: Path,
    observer: Observer,
    epochs: int | None = None,
    assets: Path = ASSETS,
) -> ModelInfo:
    """Train one model from scratch, or from where an interrupted run with the same settings stopped, and export it.

    `epochs` overrides the recipe. Raises `ConfigError` for unknown names, or when another process trains this model in
    the same work directory.
    """
    entry = architecture(model_name)
    recipe = entry.recipe if epochs is None else replace(entry.recipe, epochs=epochs)
    directory = work_directory / task_name / model_name
    with _exclusive(directory):
        run = _Run(entry, recipe, full, directory=directory, classes=len(task(task_name).labels))
        observer.model_started(model_name, epochs=recipe.epochs, epochs_done=len(run.reports))
        while len(run.reports) < recipe.epochs:
            report = run.train_epoch(observer)
            observer.epoch_done(model_name, epoch=len(run.reports), report=report)
        info = _export(run, task_name, assets=assets)
    # Only after the export, so that an interruption in between costs nothing but the export.
    shutil.rmtree(directory)
    observer.model_finished(info)
    return info


def epoch_batches(
    images: Images, labels: Labels, *, seed: int, epoch: int
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], Labels]:
    """The training images in the order of that epoch, float32 (N, 28, 28, 1), a random half of them mirrored."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(labels))
    shuffled = images[order].astype(np.float32)
    mirrored = rng.random(len(labels)) < 0.5
    shuffled[mirrored] = shuffled[mirrored, :, ::-1]
    return shuffled, labels[order]


class _Run:
    """One model in training: the compiled model, the reports of the epochs that are done, and their state on disk."""

    def __init__(
        self, entry: Architecture, recipe: Recipe, full: FullDataset, *, directory: Path, classes: int
    ) -> None:
        self.entry = entry
        self.recipe = recipe
        self.full = full
        self.classes = classes
        self.reports: list[EpochReport] = []
        self._directory = directory
        self._state_path = directory / STATE_FILE
        self.keras = load_keras()
        self.keras.utils.set_random_seed(SEED)
        self.model = entry.build(classes)
        self._identity = self._identify()
        self._resume()

    def train_epoch(self, observer: Observer) -> EpochReport:
        """One pass over the training images; returns after its state is on disk."""
        epoch = len(self.reports) + 1
        images, labels = epoch_batches(self.full.train_images, self.full.train_labels, seed=SEED, epoch=epoch)
        steps = -(-len(labels) // self.recipe.batch_size)
        self._seed_dropout(epoch)
        tell = self.keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, **_: observer.batch_done(
                self.entry.name, epoch=epoch, fraction=(batch + 1) / steps
            )
        )
        started = time.monotonic()
        history = self.model.fit(
            images, labels, batch_size=self.recipe.batch_size, shuffle=False, verbose=0, callbacks=[tell]
        ).history
        report = EpochReport(
            loss=float(history["loss"][-1]),
            accuracy=float(history["accuracy"][-1]),
            seconds=time.monotonic() - started,
        )
        self.reports.append(report)
        self._save()
        return report

    def _compile(self) -> None:
        """Attach a fresh optimizer."""
        steps_per_epoch = -(-len(self.full.train_labels) // self.recipe.batch_size)
        warmup_steps = steps_per_epoch // 2
        schedule = self.keras.optimizers.schedules.CosineDecay(
            initial_learning_rate=0.0,
            warmup_target=self.recipe.peak_learning_rate,
            warmup_steps=warmup_steps,
            decay_steps=max(1, steps_per_epoch * self.recipe.epochs - warmup_steps),
        )
        self.model.compile(
            optimizer=self.keras.optimizers.AdamW(schedule, weight_decay=self.recipe.weight_decay),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            jit_compile=False,  # XLA compiles for a minute and then runs convolutions slower on a CPU
        )

    def _seed_dropout(self, epoch: int) -> None:
        """Dropout draws from states that a checkpoint does not hold: set them anew for every epoch."""
        states = [variable for variable in self.model.variables if variable.path.endswith("seed_generator_state")]
        for i, state in enumerate(states):
            state.assign([SEED + i, epoch])

    def _identify(self) -> dict[str, Any]:
        """What must be equal for a saved state to be gone on with."""
        return {
            "architecture_sha256": hashlib.sha256(self.model.to_json().encode()).hexdigest(),
            "recipe": asdict(self.recipe),
            "seed": SEED,
            "train_images_sha256": hashlib.sha256(self.full.train_images.tobytes()).hexdigest(),
        }

    def _save(self) -> None:
        # The state names the checkpoint and is replaced in one step after it: whenever the process dies, the state on
        # disk and the checkpoint it names belong together.
        checkpoint = self._directory / f"epoch-{len(self.reports):03d}.keras"
        self.model.save(checkpoint)
        state = {
            "identity": self._identity,
            "checkpoint": checkpoint.name,
            "epochs": [asdict(report) for report in self.reports],
        }
        temporary = self._state_path.with_suffix(".part")
        temporary.write_text(json.dumps(state, indent=2), encoding="utf-8")
        temporary.replace(self._state_path)
        for old in self._directory.glob("epoch-*.keras"):
            if old != checkpoint:
                old.unlink()

    def _resume(self) -> None:
        state = json.loads(self._state_path.read_text(encoding="utf-8")) if self._state_path.exists() else None
        if state is None or state["identity"] != self._identity:
            self._compile()
            return
        self.model = self.keras.models.load_model(self._directory / state["checkpoint"])
        self.reports = [EpochReport(**report) for report in state["epochs"]]


def _export(run: _Run, task_name: str, *, assets: Path) -> ModelInfo:
    import tensorflow as tf

    directory = assets / task_name / "models"
    name = run.entry.name
    weights_bytes, weights_sha256 = save_float16(run.model, directory / f"{name}.npz")
    shipped = run.entry.build(run.classes)
    load_float16(shipped, directory / f"{name}.npz", sha256=weights_sha256)
    probabilities = shipped.predict(run.full.test_images.astype(np.float32), batch_size=500, verbose=0)
    info = ModelInfo(
        task=task_name,
        name=name,
        family=run.entry.family,
        parameters=shipped.count_params(),
        float_accuracy=float((probabilities.argmax(axis=1) == run.full.test_labels).mean()),
        test_images=len(run.full.test_labels),
        train_accuracy=round(run.reports[-1].accuracy, 4),
        epochs=run.recipe.epochs,
        batch_size=run.recipe.batch_size,
        seed=SEED,
        seconds_per_epoch=round(float(np.mean([report.seconds for report in run.reports])), 1),
        weights_bytes=weights_bytes,
        weights_sha256=weights_sha256,
        keras_version=run.keras.__version__,
        tensorflow_version=tf.__version__,
    )
    info.write(directory / f"{name}.json")
    return info


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Hold the work directory of one model; the lock goes with the process, however it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process trains in {directory}; wait for it, or give another --work-dir"
            ) from None
        yield
