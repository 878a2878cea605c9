"""Reading the full data set, and saying clearly why it cannot be read."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from edge_sdk.errors import ConfigError
from zoo_keras.data import DEBIAN_DIRECTORY, load_full, read_idx
from zoo_keras.quiet import load_keras


def _idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def _small_set() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte.gz": rng.integers(0, 256, (6, 28, 28)),
        "train-labels-idx1-ubyte.gz": rng.integers(0, 10, 6),
        "t10k-images-idx3-ubyte.gz": rng.integers(0, 256, (4, 28, 28)),
        "t10k-labels-idx1-ubyte.gz": rng.integers(0, 10, 4),
    }


def test_reads_the_four_files_of_a_directory(tmp_path):
    arrays = _small_set()
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(_idx(array))
    full = load_full(tmp_path)
    np.testing.assert_array_equal(full.train_images[..., 0], arrays["train-images-idx3-ubyte.gz"])
    np.testing.assert_array_equal(full.test_labels, arrays["t10k-labels-idx1-ubyte.gz"])
    assert full.test_images.shape == (4, 28, 28, 1)
    assert full.train_labels.dtype == np.int64


def test_without_the_directory_it_is_downloaded(tmp_path, monkeypatch):
    arrays = [array.astype(np.uint8) for array in _small_set().values()]
    monkeypatch.setattr(
        load_keras().datasets.fashion_mnist, "load_data", lambda: ((arrays[0], arrays[1]), (arrays[2], arrays[3]))
    )
    full = load_full(tmp_path / "absent")
    assert full.train_images.shape == (6, 28, 28, 1)
    assert full.test_labels.dtype == np.int64


def test_neither_directory_nor_connection(tmp_path, monkeypatch):
    def fail() -> None:
        raise Exception("URL fetch failure: no route to host")  # the class that keras raises

    monkeypatch.setattr(load_keras().datasets.fashion_mnist, "load_data", fail)
    with pytest.raises(ConfigError, match=r"absent.*no route to host.*apt-get install dataset-fashion-mnist"):
        load_full(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not gzip", "cannot be read as a gzipped idx file"),
        (gzip.compress(bytes(100))[:-20], "cannot be read as a gzipped idx file"),
        (gzip.compress(b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00"), "expected an idx file of uint8"),
        (gzip.compress(b"\x00\x00\x08\x03\x00\x00"), "expected an idx file of uint8"),
        (gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05\x00"), r"announces shape \(5,\), but 1 bytes follow"),
    ],
    ids=["no-gzip", "truncated-gzip", "other-type", "truncated-header", "too-short"],
)
def test_a_damaged_file_is_named(tmp_path, content, reason):
    path = tmp_path / "damaged.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"damaged\.gz.*{reason}"):
        read_idx(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte\.gz cannot be read"):
        load_full(tmp_path)


@pytest.mark.skipif(not DEBIAN_DIRECTORY.is_dir(), reason="the full data set is not installed")
def test_the_real_set_has_its_published_size():
    full = load_full()
    assert full.train_images.shape == (60_000, 28, 28, 1)
    assert np.bincount(full.test_labels).tolist() == [1_000] * 10
