"""The architectures of the zoo: what each is called, which family it belongs to, how it is built and trained.

Every family has a module of its own with a function `build(classes)`; the table here is the only list of them.
Importing this package does not load Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_sdk.errors import ConfigError
from zoo_keras.builders import (
    densenet,
    inception,
    mlp_mixer,
    mobile,
    plain_cnn,
    residual,
    squeeze_excite,
    vision_transformer,
)

__all__ = ["ARCHITECTURES", "Architecture", "Recipe", "architecture"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one architecture is trained: AdamW, a linear warm-up over half an epoch, then a cosine down to zero."""

    epochs: int
    peak_learning_rate: float
    weight_decay: float = 0.01
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One untrained network. `build(classes)` returns a fresh `keras.Model`."""

    name: str
    family: str
    build: Callable[[int], Any]
    recipe: Recipe


ARCHITECTURES: dict[str, Architecture] = {
    entry.name: entry
    for entry in (
        Architecture(
            name="mobile",
            family="depthwise-separable CNN",
            build=mobile.build,
            recipe=Recipe(epochs=6, peak_learning_rate=4e-3),
        ),
        Architecture(
            name="plain-cnn",
            family="plain CNN",
            build=plain_cnn.build,
            recipe=Recipe(epochs=9, peak_learning_rate=2e-3, weight_decay=0.03),
        ),
        Architecture(
            name="squeeze-excite",
            family="squeeze-and-excitation CNN",
            build=squeeze_excite.build,
            recipe=Recipe(epochs=9, peak_learning_rate=4e-3),
        ),
        Architecture(
            name="residual",
            family="residual CNN",
            build=residual.build,
            recipe=Recipe(epochs=9, peak_learning_rate=4e-3),
        ),
        Architecture(
            name="mlp-mixer",
            family="MLP-Mixer",
            build=mlp_mixer.build,
            recipe=Recipe(epochs=9, peak_learning_rate=3e-3),
        ),
        Architecture(
            name="inception",
            family="inception-style branches",
            build=inception.build,
            recipe=Recipe(epochs=9, peak_learning_rate=4e-3),
        ),
        Architecture(
            name="densenet",
            family="densely connected CNN",
            build=densenet.build,
            recipe=Recipe(epochs=7, peak_learning_rate=4e-3),
        ),
        Architecture(
            name="vision-transformer",
            family="vision transformer",
            build=vision_transformer.build,
            recipe=Recipe(epochs=8, peak_learning_rate=2e-3),
        ),
    )
}


def architecture(name: str) -> Architecture:
    """The architecture of that name; `ConfigError` names those that exist."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise ConfigError(f"the zoo has no model {name!r}; it has: {', '.join(ARCHITECTURES)}", model=name) from None
