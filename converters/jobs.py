"""What a worker process does: load a model, outline it, build a bundle of it, each only if it was not done before."""

from __future__ import annotations

from pathlib import Path

from converters.cache import Cache, Known, bundle_key
from converters.precision import Precision
from converters.recipe import Recipe
from edge_sdk.errors import ModelError, SplitfleetError
from edge_sdk.manifest import ModelRef


def outline(cache: Cache, recipe: Recipe) -> Known:
    """What a recipe holds. Raises :class:`SplitfleetError`."""
    return _Loaded(cache, recipe).known


def build(
    cache: Cache,
    recipe: Recipe,
    k: int,
    precision: Precision,
    max_error: float | None,
    *,
    int8_failed: str = "",
    tail_tflite_failed: str = "",
) -> Path:
    """The folder of the bundle of a recipe's model cut after operation ``k``. Raises :class:`SplitfleetError`.

    ``int8_failed`` says how int8 ended another process: ``auto`` then begins after it. ``tail_tflite_failed`` says so
    of ``tail.tflite``, which the bundle then lacks.
    """
    from converters.bundles import build_bundle

    loaded = _Loaded(cache, recipe)
    model = ModelRef(name=recipe.model_name, sha256=loaded.known.outline.model_sha256)
    return cache.make_bundle(
        bundle_key(recipe, loaded.known, k, precision, max_error),
        lambda folder: build_bundle(
            loaded.flat,
            k,
            loaded.calibration,
            task=recipe.task,
            model=model,
            folder=folder,
            precision=precision,
            max_error=max_error,
            int8_failed=int8_failed,
            tail_tflite_failed=tail_tflite_failed,
        ),
    )


class _Loaded:
    """A recipe's model and calibration data, and the hashes of both."""

    def __init__(self, cache: Cache, recipe: Recipe) -> None:
        from converters.calibration import Calibration, random_calibration
        from converters.flatten import flatten
        from converters.keras_backend import load_keras
        from converters.model_hash import model_sha256
        from converters.outline import Outline
        from converters.peak import all_peaks

        # Keras numbers unnamed layers per process; begun anew, a model has the same names whatever was loaded before.
        load_keras().backend.clear_session()
        try:
            model = recipe.load()
            samples = None if recipe.calibration is None else recipe.calibration()
        except SplitfleetError:
            raise
        except Exception as error:  # whatever the recipe's functions raise
            raise ModelError(
                f"model {recipe.model_name!r} or its calibration data cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        self.flat = flatten(model)
        if samples is None:
            samples = random_calibration(self.flat)
        self.calibration = Calibration.of(self.flat.graph, samples)
        self.known = Known(
            outline=Outline.of(self.flat.graph, model_sha256(self.flat), all_peaks(self.flat)),
            calibration_sha256=self.calibration.sha256,
        )
        cache.remember(recipe, self.known)
