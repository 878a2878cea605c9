"""The full data set of a task, as its publisher ships it: 60,000 images to train on and 10,000 to test with.

It is needed for training only; what an evaluation needs is shipped (see `zoo_keras.samples`). Fashion-MNIST is read
from Debian's package `dataset-fashion-mnist` where that is installed, else `keras.datasets` downloads it once.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_sdk.errors import ConfigError
from zoo_keras.quiet import load_keras

DEBIAN_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class FullDataset:
    """Images are uint8 (N, 28, 28, 1), pixels 0..255; labels int64 (N,)."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels


def load_full(directory: Path = DEBIAN_DIRECTORY) -> FullDataset:
    """All of Fashion-MNIST, from the four idx files in `directory`, or by download when it does not exist.

    Raises `ConfigError` when a file is damaged, or when there is neither the directory nor a connection.
    """
    if directory.is_dir():
        return FullDataset(
            train_images=_as_images(read_idx(directory / "train-images-idx3-ubyte.gz")),
            train_labels=read_idx(directory / "train-labels-idx1-ubyte.gz").astype(np.int64),
            test_images=_as_images(read_idx(directory / "t10k-images-idx3-ubyte.gz")),
            test_labels=read_idx(directory / "t10k-labels-idx1-ubyte.gz").astype(np.int64),
        )
    keras = load_keras()
    try:
        (train_images, train_labels), (test_images, test_labels) = keras.datasets.fashion_mnist.load_data()
    except Exception as error:  # keras raises a bare Exception when a download fails
        raise ConfigError(
            f"the data set Fashion-MNIST is not at hand: there is no {directory}, and the download failed ({error}). "
            "Install it with 'apt-get install dataset-fashion-mnist', or connect to the internet and try again"
        ) from error
    return FullDataset(
        train_images=_as_images(train_images),
        train_labels=train_labels.astype(np.int64),
        test_images=_as_images(test_images),
        test_labels=test_labels.astype(np.int64),
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of bytes in a gzipped idx file: two zero bytes, type 8 (uint8), rank, big-endian sizes, data."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read as a gzipped idx file: {error}") from error
    if content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * content[3]:
        raise ConfigError(f"{path}: expected an idx file of uint8, received the header {content[:4].hex()!r}")
    rank = content[3]
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=rank, offset=4))
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if data.size != math.prod(shape):
        raise ConfigError(f"{path}: its header announces shape {shape}, but {data.size} bytes follow")
    return data.reshape(shape)


def _as_images(array: npt.NDArray[np.uint8]) -> Images:
    return array[..., np.newaxis]
