"""The reference engine on real SavedModels, alone and behind the server."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from cloud_server.engines.tensorflow_engine import TensorFlowEngine, import_tensorflow
from edge_sdk.errors import BundleError
from edge_sdk.protocol import LoadTail, UnloadTail
from edge_sdk.repository_client import RepositoryClient
from edge_sdk.wire import Tensor


@pytest.fixture
def bundle(make_bundle, saved_models):
    return make_bundle(tail=saved_models["good"])


def expected(features):
    return (0.1 * (features.astype(np.float32) - 3.0)).reshape(len(features), -1)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_batch_is_computed(bundle, batch):
    engine = TensorFlowEngine.load(bundle)
    features = np.random.default_rng(0).integers(-128, 128, (batch, 2, 3), np.int8)
    engine.warm({"feature_0": features})
    outputs = engine.run({"feature_0": features})
    assert outputs.keys() == {"output_0"}
    np.testing.assert_allclose(outputs["output_0"], expected(features), rtol=1e-6)
    engine.close()


def test_tensors_of_many_names_are_not_mixed_up(make_bundle, tmp_path):
    tf = import_tensorflow()
    names = [f"feature_{number}" for number in range(11)]

    class Tail(tf.Module):
        @tf.function
        def __call__(self, features):
            # As many outputs, in the opposite order of their names.
            return {
                f"output_{number}": (number + 1) * tf.cast(features[f"feature_{number}"], tf.float32)
                for number in reversed(range(11))
            }

    tail = Tail()
    specs = {name: tf.TensorSpec((None, 2, 3), tf.int8, name=name) for name in names}
    flat = tf.function(lambda **features: tail(features)).get_concrete_function(**specs)
    folder = tmp_path / "tail"
    tf.saved_model.save(tail, str(folder), signatures={"serving_default": flat})
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    engine = TensorFlowEngine.load(make_bundle(tail=files, features=11))
    draw = np.random.default_rng(3)
    features = {name: draw.integers(-9, 9, (4, 2, 3)).astype(np.int8) for name in reversed(names)}
    outputs = engine.run(features)
    assert outputs.keys() == {f"output_{number}" for number in range(11)}
    for number in range(11):
        assert np.array_equal(outputs[f"output_{number}"], (number + 1.0) * features[f"feature_{number}"])
    engine.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("other_input", r"takes \['image'\], the manifest's features are \['feature_0'\]"),
        ("unsigned", r"no signature 'serving_default', only \['x'\]"),
    ],
)
def test_a_saved_model_that_is_no_tail_of_this_bundle_is_refused(make_bundle, saved_models, kind, reason):
    with pytest.raises(BundleError, match=reason):
        TensorFlowEngine.load(make_bundle(tail=saved_models[kind]))


def test_files_that_are_no_saved_model_are_refused(make_bundle, saved_models):
    with pytest.raises(BundleError, match="cannot load this SavedModel"):
        TensorFlowEngine.load(make_bundle("a", tail={"saved_model.pb": b"not a graph"}))
    incomplete = {name: data for name, data in saved_models["good"].items() if "variables" not in name}
    with pytest.raises(BundleError, match="cannot load this SavedModel"):
        TensorFlowEngine.load(make_bundle("b", tail=incomplete))
    with pytest.raises(BundleError, match="cannot load this SavedModel"):
        TensorFlowEngine.load(make_bundle("c", tail={"something.txt": b""}))


def test_load_infer_unload_over_the_wire(start, bundle):
    running = start(load_engine=TensorFlowEngine.load)
    from edge_sdk.channel import Channel

    with Channel(running.endpoint) as channel:
        RepositoryClient(channel).put_bundle(bundle)
        loaded = channel.call(LoadTail(bundle=bundle.digest), timeout_s=60.0)
        assert loaded.body["engine"] == "tensorflow"
        peer = running.peer()
        asked = {}
        for number in range(20):
            features = np.random.default_rng(number).integers(-128, 128, (1 + number % 3, 2, 3), np.int8)
            asked[peer.begin_infer(bundle.digest, Tensor(name="feature_0", data=features))] = features
        for request_id, features in asked.items():
            result = peer.end_of(request_id)
            np.testing.assert_allclose(result.arrays()["output_0"], expected(features), rtol=1e-6)
        assert channel.call(UnloadTail(bundle=bundle.digest), timeout_s=60.0).body == {"unloaded": True}


def test_tensorflow_is_quiet_from_the_first_import(bundle):
    program = (
        "import sys\n"
        "from edge_sdk.bundle import Bundle\n"
        "from cloud_server.engines.tensorflow_engine import TensorFlowEngine\n"
        "import numpy as np\n"
        "engine = TensorFlowEngine.load(Bundle.open(sys.argv[1]))\n"
        "engine.warm({'feature_0': np.zeros((1, 2, 3), np.int8)})\n"
        "engine.close()\n"
        "print('done', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(bundle.path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == ""
    assert done.stderr == "done\n"
