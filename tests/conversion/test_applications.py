"""Every family of ``keras.applications``, cut at a quarter, a half and three quarters, with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import applications
import pytest

ROOT = Path(__file__).parents[2]
# Noise over signal, by how deep the cut is. Random weights, unlike trained ones, amplify any noise from layer to layer;
# what is wrong, and not merely rounded, is beyond 1 (the zoo's trained models stay within 0.06).
MAX_ERRORS = (0.25, 0.6, 1.0)


def report(family, timeout_s):
    """Made in a process of its own: in one, the models of all families would not fit into memory."""
    done = subprocess.run(
        [sys.executable, applications.__file__, family],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_sound(made):
    assert [cut["k"] for cut in made["cuts"]] == sorted({cut["k"] for cut in made["cuts"]})
    assert made["legal"] >= 0.9 * made["n"] - 1
    for cut, max_error in zip(made["cuts"], MAX_ERRORS, strict=True):
        assert 1 <= cut["crossing"] <= 10
        assert cut["float_difference"] <= 1e-5
        assert cut["tail_difference"] <= 1e-3
        assert cut["head_error"] <= max_error, cut


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", applications.FAMILIES)
def test_each_family(family):
    assert_sound(report(family, 1700))


def test_a_large_model_is_listed_at_once():
    """430 operations: what a user waits for is loading the model. By count of work, as a stopwatch would be flaky."""
    import keras

    from converters.cuts import cut_points
    from converters.flatten import flatten

    model = keras.applications.DenseNet121(weights=None, input_shape=(32, 32, 3))
    steps = 0

    def count(*event):
        nonlocal steps
        steps += event[1] == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        graph = flatten(model).graph
        cuts = cut_points(graph)
    finally:
        sys.setprofile(before)
    assert len(cuts) == graph.n - 1 > 420
    # They take 0.03 s of CPU time (benchmarks/converting.py); 2 s would be some millions.
    assert steps < 300_000, steps
