"""What is known of a trained model without loading it: a small JSON file beside its weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_sdk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts of one trained model.

    `float_accuracy` is measured on all `test_images` images of the data set, with the shipped weights, that is after
    they were rounded to float16. `seconds_per_epoch` is the mean wall-clock time on the machine
    that trained it, whatever else ran there.
    """

    task: str
    name: str
    family: str
    parameters: int
    float_accuracy: float
    test_images: int
    train_accuracy: float
    epochs: int
    batch_size: int
    seed: int
    seconds_per_epoch: float
    weights_bytes: int
    weights_sha256: str
    keras_version: str
    tensorflow_version: str

    def write(self, path: Path) -> None:
        """Write as JSON, in one step: a reader never sees half a file."""
        temporary = path.with_suffix(".json.part")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> ModelInfo:
        """Read what `write` wrote; `ConfigError` when the model was not trained yet or the file is damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ConfigError(
                f"the model {path.stem!r} is not trained: {path} does not exist. "
                f"Train it with 'splitfleet zoo train --model {path.stem}'"
            ) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): install the package again") from error
