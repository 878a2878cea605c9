"""Fixtures of the conversion tests: small models, made once a session."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# For the tests and, since a spawned process inherits the path, for the workers.
HERE = Path(__file__).parent
sys.path += [str(HERE / "library"), str(HERE.parent / "edge/library")]


@pytest.fixture(scope="session")
def flat_model() -> Callable[[str], Any]:
    """The flat form of a kind of `small_models`."""
    import small_models

    from converters.flatten import flatten

    return functools.cache(lambda kind: flatten(small_models.load(kind)))


@pytest.fixture(scope="session")
def zoo_model() -> Callable[[str], Any]:
    """The flat form of a zoo architecture, with random weights: what it computes matters here, not how well."""
    import numpy as np

    from converters.flatten import flatten
    from zoo_keras.builders import architecture

    @functools.cache
    def load(name: str) -> Any:
        import keras

        keras.utils.set_random_seed(3)
        model = architecture(name).build(10)
        rng = np.random.default_rng(3)
        for variable in model.weights:
            if "moving_" in variable.path:
                low, high = (0.2, 1.5) if variable.path.endswith("variance") else (-0.2, 0.2)
                variable.assign(rng.uniform(low, high, variable.shape).astype(np.float32))
        return flatten(model)

    return load
