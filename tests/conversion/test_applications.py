"""Every family of ``keras.applications``, cut at a quarter, a half and three quarters, with random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import applications
import pytest

ROOT = Path(__file__).parents[2]
# The error of an int8 head over that of the same half in float with each tensor rounded to int8. The converter rounds
# other tensors (a filter is one with its normalization, a layer without a kernel of its own becomes several) and the
# weights too. Found: 0.4 to 1.4.
MAX_RATIO = 1.5
# With weights that make more noise than this of roundings, the bound above would let anything pass.
MAX_ROUNDING = 0.25


def report(family, timeout_s):
    """Made in a process of its own: in one, the models of all families would not fit into memory."""
    done = subprocess.run(
        [sys.executable, applications.__file__, family],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/edge/library", "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_sound(made):
    assert [cut["k"] for cut in made["cuts"]] == sorted({cut["k"] for cut in made["cuts"]})
    assert len(made["cuts"]) == 3
    assert made["legal"] >= 0.9 * made["n"] - 1
    # Other images, other answers: else any two tails would agree.
    assert made["variation"] > 0.01
    for cut in made["cuts"]:
        assert 1 <= len(cut["roundings"]) <= 10
        assert cut["float_difference"] <= 1e-5
        assert cut["tail_difference"] <= 1e-4
        assert max(cut["roundings"]) <= MAX_ROUNDING, cut
        limits = [MAX_RATIO * rounding for rounding in cut["roundings"]]
        for errors in cut["errors"].values():
            assert all(error <= limit for error, limit in zip(errors, limits, strict=True)), cut
        # What the bound is for it would find.
        for limit, mistakes in zip(limits, cut["mistakes"], strict=True):
            assert {"scale", "zero point", "sample", "channels"} <= set(mistakes)
            assert min(mistakes.values()) > limit, cut


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", applications.FAMILIES)
def test_each_family(family):
    assert_sound(report(family, 1700))


def test_no_family_is_missing():
    import keras

    builders = [value for name, value in vars(keras.applications).items() if name[0].isupper()]
    assert len(builders) >= 38
    assert {builder.__module__.rpartition(".")[2] for builder in builders} == set(applications.FAMILIES)
    for family, (name, _) in applications.FAMILIES.items():
        assert getattr(keras.applications, name).__module__.endswith(f".{family}")


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
