"""The tails that are served: bundles made by ``splitfleet split`` from models that are made here, kept in a cache.

Weights are random, and batch normalisation is fitted to random inputs, so that answers to different features differ.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.saved_model import SavedModel
from benchmarks.serving.cli import splitfleet
from edge_sdk.bundle import Bundle
from edge_sdk.manifest import CrossingSpec

# As many clients ask about features of their own; further ones repeat them.
FEATURES = 32
# Another engine, or another batch, adds in another order. In proportion to how much answers differ.
TOLERANCE = 2e-3


@dataclass(frozen=True, kw_only=True)
class Tail:
    """One bundle, features (FEATURES, *shape) and what the SavedModel makes of each (FEATURES, outputs)."""

    name: str
    bundle: Bundle
    features: npt.NDArray[np.generic]
    expected: npt.NDArray[np.float32]
    tolerance: float

    @property
    def crossing(self) -> CrossingSpec:
        """Of the one tensor that crosses."""
        (spec,) = self.bundle.manifest.crossing
        return spec


def _tiny(keras: Any) -> tuple[Any, str]:
    image = keras.Input((28, 28, 1), name="image")
    feature = keras.layers.Conv2D(64, 3, 2, "same", activation="relu", name="cut")(image)
    x = keras.layers.Conv2D(64, 3, 1, "same", activation="relu")(feature)
    x = keras.layers.Conv2D(64, 3, 1, "same", activation="relu")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, keras.layers.Dense(100)(x)), "cut"


def _mobilenet(keras: Any) -> tuple[Any, str]:
    model = keras.applications.MobileNetV2(input_shape=(224, 224, 3), weights=None, classifier_activation=None)
    normalisations = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in normalisations:
        layer.momentum = 0.0
    model(np.random.default_rng(0).uniform(-1, 1, (8, 224, 224, 3)).astype(np.float32), training=True)
    # "From its sixth block on": block_6 takes what block_5 adds up.
    return model, "block_5_add"


TAILS: dict[str, Callable[[Any], tuple[Any, str]]] = {"tiny": _tiny, "mobilenet": _mobilenet}


def make(name: str, cache: Path) -> Tail:
    """The tail of that name; what was made before is taken from ``cache``. Raises ``RuntimeError``."""
    from converters.cache import BUILD_FORMAT
    from converters.versions import versions

    definition = json.dumps([inspect.getsource(TAILS[name]), BUILD_FORMAT, versions()], sort_keys=True)
    folder = cache / "bundles" / f"{name}-{hashlib.sha256(definition.encode()).hexdigest()[:12]}"
    if not folder.exists():
        _split(name, folder)
    bundle = Bundle.open(folder)
    bundle.verify()
    (spec,) = bundle.manifest.crossing
    draw = np.random.default_rng(1)
    features = draw.integers(-128, 128, (FEATURES, *spec.shape)).astype(np.int8)
    expected = _expected(bundle.tail_path, features)
    tolerance = TOLERANCE * float(expected.std(axis=0).mean())
    _require_distinct(expected, tolerance)
    return Tail(name=name, bundle=bundle, features=features, expected=expected, tolerance=tolerance)


def _split(name: str, folder: Path) -> None:
    """As a user would; another run of the benchmark may be at it, too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"making the bundle of the tail {name}, about a minute", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        model, bundle, home = (Path(work) / part for part in ("model.keras", "bundle", "home"))
        cut = _run("model", name, model)
        splitfleet("split", model, "--cut", cut, "--calibration", "random", "--precision", "int8", "--out", bundle,
                   "--home", home)  # fmt: skip
        try:
            bundle.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def _expected(tail: Path, features: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    with tempfile.TemporaryDirectory() as work:
        asked, answered = Path(work) / "features.npy", Path(work) / "expected.npy"
        np.save(asked, features)
        _run("expected", tail, asked, answered)
        expected: npt.NDArray[np.float32] = np.load(answered)
        return expected


def _run(*arguments: str | Path) -> str:
    """:func:`_main` in a process of its own, so that TensorFlow is not in this one; the last line it prints."""
    command = [sys.executable, "-m", "benchmarks.serving.tails", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return (done.stdout.splitlines() or [""])[-1]


def _require_distinct(expected: npt.NDArray[np.float32], tolerance: float) -> None:
    """Else nobody would notice when one client got the answer of another."""
    for number, row in enumerate(expected):
        nearest = np.abs(np.delete(expected, number, 0) - row).max(axis=1).min()
        if nearest < 20 * tolerance:
            raise RuntimeError(f"answers differ by {nearest:.2g} only, and {tolerance:.2g} is tolerated")


def _main() -> None:
    match sys.argv[1:]:
        case ["model", name, path]:
            import keras

            keras.utils.set_random_seed(0)
            model, cut = TAILS[name](keras)
            model.save(path)
            print(cut)
        case ["expected", tail, asked, answered]:
            np.save(answered, SavedModel(Path(tail), max_batch=1).run_each(np.load(asked)))


if __name__ == "__main__":
    _main()
