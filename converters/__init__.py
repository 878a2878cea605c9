"""From a Keras model to bundles: its graph, its cut points, their memory, an int8 head and a tail.

::

    from converters import Recipe, Workshop, choose_cumulative

    with Workshop(Path("cache")) as workshop:
        outline = workshop.outline(recipe).result()
        choice = choose_cumulative(outline, budget_bytes=8_000_000)
        folder = workshop.build(recipe, choice.k).result()

Importing this package does not load TensorFlow: a :class:`Workshop` does that in processes of its own.
"""

from converters.cuts import CutPoint
from converters.memory import Choice, OperationMemory, choose_cumulative
from converters.outline import Outline
from converters.peak import PeakChoice, choose_peak
from converters.precision import Precision
from converters.recipe import Recipe
from converters.workshop import Workshop

__all__ = [
    "Choice",
    "CutPoint",
    "OperationMemory",
    "Outline",
    "PeakChoice",
    "Precision",
    "Recipe",
    "Workshop",
    "choose_cumulative",
    "choose_peak",
]
