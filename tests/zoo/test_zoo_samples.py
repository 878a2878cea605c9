"""The shipped labelled sets: balanced, disjoint, and exactly what their seed draws from the full data set."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import zoo_keras
from edge_sdk.errors import ConfigError
from zoo_keras.data import DEBIAN_DIRECTORY, load_full
from zoo_keras.samples import SPLITS, Samples, draw_samples, load_samples

SIZES = {"calibration": 500, "validation": 1000, "test": 1000}


@pytest.mark.parametrize("split", SPLITS)
def test_shape_type_and_balance(split):
    samples = zoo_keras.task("fashion-mnist").samples(split)
    count = SIZES[split]
    assert len(samples) == count
    assert set(samples.inputs) == {"image"}
    image = samples.inputs["image"]
    assert (image.dtype, image.shape) == (np.uint8, (count, 28, 28, 1))
    assert samples.labels.dtype == np.int64
    assert np.bincount(samples.labels, minlength=10).tolist() == [count // 10] * 10
    assert image.max() > 200


@pytest.mark.parametrize("split", SPLITS)
def test_order_mixes_the_classes(split):
    labels = zoo_keras.task("fashion-mnist").samples(split).labels
    assert len(set(labels[:50])) >= 8, "a prefix must be a fair sample too"


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SPLITS, 2)))
def test_no_image_is_in_two_sets(one, other):
    task = zoo_keras.task("fashion-mnist")
    images = [{image.tobytes() for image in task.samples(split).inputs["image"]} for split in (one, other)]
    assert not images[0] & images[1]


@pytest.mark.skipif(not DEBIAN_DIRECTORY.is_dir(), reason="the full data set is not installed")
def test_shipped_sets_are_what_the_seed_draws():
    drawn = draw_samples(load_full())
    for split in SPLITS:
        assert zoo_keras.task("fashion-mnist").samples(split).digest == drawn[split][0].digest


def test_digest_tells_sets_apart():
    image = np.zeros((2, 28, 28, 1), np.uint8)
    labels = np.array([0, 1])
    one = Samples(inputs={"image": image}, labels=labels)
    assert one.digest == Samples(inputs={"image": image.copy()}, labels=labels.copy()).digest
    assert one.digest != Samples(inputs={"image": image}, labels=labels[::-1]).digest
    assert one.digest != Samples(inputs={"picture": image}, labels=labels).digest
    assert one.digest != Samples(inputs={"image": image.reshape(2, 784)}, labels=labels).digest


def test_unknown_split_names_those_that_exist():
    with pytest.raises(ConfigError, match=r"no split 'train'.*calibration, validation, test"):
        zoo_keras.task("fashion-mnist").samples("train")


def test_missing_set_says_where_and_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"test\.npz is missing: install"):
        load_samples(tmp_path, "test")
