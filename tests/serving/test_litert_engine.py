"""The engine that runs ``tail.tflite``: any batch, outputs of its own, clear refusals."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from cloud_server.engines.litert_engine import LitertEngine
from edge_sdk.errors import BundleError, RuntimeUnavailableError


@pytest.fixture
def bundle(make_bundle, saved_models, tail_tflites):
    return make_bundle(tail=saved_models["good"], tail_tflite=tail_tflites["good"])


def expected(features):
    return (0.1 * (features.astype(np.float32) - 3.0)).reshape(len(features), -1)


def drawn(batch, seed=0):
    return np.random.default_rng(seed).integers(-128, 128, (batch, 2, 3), np.int8)


@pytest.mark.parametrize("threads", [1, 2])
def test_batches_of_any_size_after_one_another(bundle, threads):
    engine = LitertEngine.load(bundle, threads)
    assert (engine.name, engine.threads) == ("litert", threads)
    for seed, batch in enumerate([1, 3, 8, 8, 1, 256, 2]):
        features = drawn(batch, seed)
        outputs = engine.run({"feature_0": features})
        assert outputs.keys() == {"output_0"}
        np.testing.assert_allclose(outputs["output_0"], expected(features), rtol=1e-6)
    engine.close()


def test_it_takes_no_more_at_a_time_than_a_batch_has(bundle, monkeypatch):
    engine = LitertEngine.load(bundle, most=8)
    for batch in (1, 2):
        engine.warm({"feature_0": drawn(batch)})
    sizes = []
    resize = engine._interpreter.resize
    monkeypatch.setattr(engine._interpreter, "resize", lambda batch: (sizes.append(batch), resize(batch)))
    for batch in (21, 8, 3):
        outputs = engine.run({"feature_0": drawn(batch)})
        np.testing.assert_allclose(outputs["output_0"], expected(drawn(batch)), rtol=1e-6)
    # Twice 8, then what is left; the same size again needs no resizing.
    assert sizes == [8, 5, 8, 3]


def test_outputs_do_not_change_with_the_next_run(bundle):
    engine = LitertEngine.load(bundle)
    features = drawn(2)
    first = engine.run({"feature_0": features})["output_0"]
    engine.run({"feature_0": drawn(2, seed=1)})
    np.testing.assert_allclose(first, expected(features), rtol=1e-6)


def test_a_batch_that_failed_does_not_fail_the_next(bundle):
    engine = LitertEngine.load(bundle)
    engine.warm({"feature_0": drawn(2)})
    with pytest.raises(RuntimeUnavailableError, match="failed to run it"):
        engine.run({"feature_0": np.zeros((2, 7), np.int8)})
    np.testing.assert_allclose(engine.run({"feature_0": drawn(2)})["output_0"], expected(drawn(2)), rtol=1e-6)


def test_read_only_features_are_taken(bundle):
    features = drawn(2)
    features.flags.writeable = False
    outputs = LitertEngine.load(bundle).run({"feature_0": features})
    np.testing.assert_allclose(outputs["output_0"], expected(features), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("other_input", r"it takes image int8 \[2, 3\], the manifest's features are feature_0 int8 \[2, 3\]"),
        ("other_dtype", r"it takes feature_0 float32 \[2, 3\], the manifest's features are feature_0 int8 \[2, 3\]"),
    ],
)
def test_the_tail_of_another_bundle_is_refused(make_bundle, saved_models, tail_tflites, kind, says):
    with pytest.raises(BundleError, match=says):
        LitertEngine.load(make_bundle(tail=saved_models["good"], tail_tflite=tail_tflites[kind]))


def test_what_is_no_such_file_is_refused(make_bundle):
    with pytest.raises(BundleError, match=r"tail\.tflite: litert .* cannot load it"):
        LitertEngine.load(make_bundle(tail_tflite=b"not a model"))


def test_a_bundle_without_one_says_why(make_bundle):
    with pytest.raises(BundleError, match=r"has no tail\.tflite: no kernel for this"):
        LitertEngine.load(make_bundle(tail_tflite_reason="no kernel for this"))


def test_it_is_quiet_and_needs_no_tensorflow(bundle):
    program = (
        "import sys\n"
        "from edge_sdk.bundle import Bundle\n"
        "from cloud_server.engines.litert_engine import LitertEngine\n"
        "import numpy as np\n"
        "engine = LitertEngine.load(Bundle.open(sys.argv[1]))\n"
        "engine.warm({'feature_0': np.zeros((1, 2, 3), np.int8)})\n"
        "engine.close()\n"
        "print('tensorflow' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(bundle.path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == ""
    assert done.stderr == "False\n"
