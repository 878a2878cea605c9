"""What a worker process does: load a model, outline it, build a bundle of it, each only if it was not done before."""

from __future__ import annotations

from pathlib import Path

from converters.cache import Cache, Known, bundle_key
from converters.precision import Attempt
from converters.recipe import Recipe
from edge_sdk.errors import ConversionError, ModelError, SplitfleetError
from edge_sdk.manifest import ModelRef


def outline(cache: Cache, recipe: Recipe) -> Known:
    """What a recipe holds. Raises :class:`SplitfleetError`."""
    return _Loaded(cache, recipe).known


def build(cache: Cache, recipe: Recipe, attempt: Attempt, tail_tflite_failed: str = "") -> Path:
    """The folder of the bundle of a recipe's model, cut and in the precision as ``attempt`` says.

    ``tail_tflite_failed`` says how ``tail.tflite``, which the bundle then lacks, ended another process. Raises
    :class:`SplitfleetError`.
    """
    from converters.bundles import build_bundle

    loaded = _Loaded(cache, recipe)
    key = bundle_key(recipe, loaded.known, attempt)
    if refusal := cache.refusal(key):
        raise ConversionError(refusal)
    model = ModelRef(name=recipe.model_name, sha256=loaded.known.outline.model_sha256)
    try:
        return cache.make_bundle(
            key,
            lambda folder: build_bundle(
                loaded.flat,
                attempt.k,
                loaded.calibration,
                task=recipe.task,
                model=model,
                folder=folder,
                precision=attempt.precision,
                max_error=attempt.max_error,
                before=attempt.before,
                tail_tflite_failed=tail_tflite_failed,
            ),
        )
    except ConversionError as error:
        # Another time there may be more memory; all else stays as it is.
        if not isinstance(error.__cause__, MemoryError):
            cache.refuse(key, error.message)
        raise


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
