"""Scores, intervals, draws' data: the arithmetic around an allocation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_server.allocation.metrics import accuracy, metric, wilson_interval
from edge_sdk.errors import ConfigError, ModelError


def test_accuracy_is_one_where_the_largest_entry_is_at_the_label() -> None:
    outputs = np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]], np.float32)
    assert accuracy([outputs], np.array([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]
    assert metric("accuracy") is accuracy


def test_an_unknown_metric_is_told() -> None:
    with pytest.raises(ConfigError, match="there is no metric 'dice'; the metrics are: accuracy"):
        metric("dice")


@pytest.mark.parametrize("output", [np.zeros((3, 2, 2)), np.zeros((2, 2)), np.full((3, 2), np.nan)])
def test_outputs_that_cannot_be_scored_are_refused(output: np.ndarray) -> None:
    with pytest.raises(ModelError):
        accuracy([output], np.array([0, 1, 0]))


def test_the_interval_is_wilson_s() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263, and 0 of 20.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


@given(hits=st.integers(0, 500), more=st.integers(0, 500))
def test_the_interval_holds_the_proportion(hits: int, more: int) -> None:
    samples = max(1, hits + more)
    low, high = wilson_interval(hits / samples, samples)
    assert 0.0 <= low <= hits / samples + 1e-12
    assert hits / samples - 1e-12 <= high <= 1.0


def test_no_interval_without_samples() -> None:
    with pytest.raises(ValueError, match="no interval"):
        wilson_interval(0.5, 0)
