"""Users' model files: what is taken, and what is refused, with the reason and a way out."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import zipfile

import numpy as np
import pytest
import user_kinds

from converters.loading import load_model
from edge_sdk.errors import ConfigError, ModelError, UnsupportedModelError


@pytest.fixture(scope="module")
def keras():
    from converters.keras_backend import load_keras

    return load_keras()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of one model, by suffix."""
    folder = tmp_path_factory.mktemp("models")
    model = user_kinds.load("dense_net")
    for suffix in (".keras", ".h5", ".hdf5"):
        model.save(folder / f"model{suffix}")
    return {path.suffix: path for path in folder.iterdir()}, model


def small(keras, layer=None):
    image = keras.Input((8, 8, 3), name="image")
    x = keras.layers.Conv2D(2, 3)(image)
    x = layer(x) if layer else x
    return keras.Model(image, keras.layers.Dense(2)(keras.layers.Flatten()(x)), name="small")


def rewritten(path, target, change):
    """A copy of the ``.keras`` file ``path`` whose configuration went through ``change``."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        for name in source.namelist():
            data = source.read(name)
            copy.writestr(name, json.dumps(change(json.loads(data))) if name == "config.json" else data)
    return target


@pytest.mark.parametrize("suffix", [".keras", ".h5", ".hdf5"])
def test_each_format_of_keras_is_read(saved, suffix):
    files, model = saved
    loaded = load_model(files[suffix])
    images = user_kinds.samples(model)["image"]
    assert np.array_equal(loaded(images, training=False), model(images, training=False))


def test_it_can_be_sent_to_a_worker(saved):
    load = pickle.loads(pickle.dumps(functools.partial(load_model, saved[0][".keras"], input_shapes=(8, 8, 3))))
    assert load().input_shape == (None, 8, 8, 3)


def test_a_suffix_that_lies_about_a_legacy_file_is_no_obstacle(saved, tmp_path):
    path = tmp_path / "model.keras"
    path.write_bytes(saved[0][".h5"].read_bytes())
    assert load_model(path).name == saved[1].name


class TestOtherFormats:
    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("model.tflite", "TensorFlow Lite model, which holds no layers"),
            ("model.onnx", "an ONNX model"),
            ("model.pt", "a PyTorch model"),
            ("model.pkl", "a pickle, which runs code"),
            ("model.json", "an architecture without weights"),
            ("model", "of no known format"),
        ],
    )
    def test_are_named_with_a_way_out(self, tmp_path, name, says):
        (tmp_path / name).write_bytes(b"whatever")
        with pytest.raises(UnsupportedModelError, match=rf"{says}.*expected a \.keras or a legacy .*model\.save\("):
            load_model(tmp_path / name)

    def test_a_saved_model(self, tmp_path):
        (tmp_path / "saved_model.pb").touch()
        with pytest.raises(UnsupportedModelError, match=r"is a TensorFlow SavedModel; .*save it with model\.save"):
            load_model(tmp_path)

    @pytest.mark.parametrize("name", ["model.weights.h5", "weights.h5"])
    def test_weights_alone(self, tmp_path, name):
        user_kinds.load("one_dimension").save_weights(tmp_path / "model.weights.h5")
        path = (tmp_path / "model.weights.h5").rename(tmp_path / name)
        with pytest.raises(UnsupportedModelError, match=r"holds weights only .*load_weights"):
            load_model(path)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(ModelError, match="cannot be read: No such file"):
            load_model(tmp_path / "model.keras")


class TestDamagedFiles:
    @pytest.mark.parametrize("suffix", [".keras", ".h5"])
    @pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
    def test_truncated(self, saved, tmp_path, suffix, share):
        data = saved[0][suffix].read_bytes()
        path = tmp_path / f"model{suffix}"
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ModelError, match="is damaged: it is truncated or no"):
            load_model(path)

    def test_a_flipped_bit(self, saved, tmp_path):
        data = bytearray(saved[0][".keras"].read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "model.keras").write_bytes(data)
        with pytest.raises(ModelError, match="is damaged"):
            load_model(tmp_path / "model.keras")

    @pytest.mark.parametrize(
        ("config", "says"),
        [
            (b"{", "truncated or no .keras file"),
            (b"[]", "describes no model"),
            (b"{}", "cannot be loaded by Keras"),
            (b"[" * 100_000, "truncated or no .keras file"),
            (b'{"class_name": "Functional", "config": {"layers": 3}, "module": "keras"}', "cannot be loaded by Keras"),
        ],
    )
    def test_a_configuration_of_nothing(self, tmp_path, config, says):
        with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
            archive.writestr("config.json", config)
        with pytest.raises(ModelError, match=says):
            load_model(tmp_path / "model.keras")

    def test_no_configuration(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
            archive.writestr("readme.txt", "hello")
        with pytest.raises(ModelError, match=r"holds a config\.json, this one has \['readme\.txt'\]"):
            load_model(tmp_path / "model.keras")

    def test_a_bomb_is_not_unpacked(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("config.json", b" " * (65 * 1024 * 1024))
        with pytest.raises(ModelError, match="larger than"):
            load_model(tmp_path / "model.keras")

    def test_weights_of_another_model(self, keras, saved, tmp_path):
        def wider(config):
            for layer in config["config"]["layers"]:
                if layer["config"].get("name") == "stem":
                    layer["config"]["filters"] = 5
            return config

        path = rewritten(saved[0][".keras"], tmp_path / "model.keras", wider)
        with pytest.raises(ModelError, match=rf"\(written by Keras .*\) cannot be loaded by Keras {keras.__version__}"):
            load_model(path)

    def test_random_bytes_in_place_of_any_others(self, saved, tmp_path):
        """Whatever is overwritten, the file is refused with a ModelError or loads; nothing else is raised."""
        rng = np.random.default_rng(0)
        for suffix in (".keras", ".h5"):
            original = saved[0][suffix].read_bytes()
            for _ in range(15):
                data = bytearray(original)
                start = int(rng.integers(0, len(data) - 64))
                data[start : start + 64] = rng.bytes(64)
                path = tmp_path / f"model{suffix}"
                path.write_bytes(data)
                with contextlib.suppress(ModelError):
                    load_model(path)


class TestHostileFiles:
    def test_code_is_not_run_unless_allowed(self, keras, tmp_path):
        model = small(keras, keras.layers.Lambda(lambda x: x * 2.0, name="twice"))
        for name in ("model.keras", "model.h5"):
            model.save(tmp_path / name)
            with pytest.raises(UnsupportedModelError) as caught:
                load_model(tmp_path / name)
            for part in ("'twice' (Lambda)", "run, with your rights, whatever the author", "--unsafe"):
                assert part in caught.value.message
            images = np.ones((1, 8, 8, 3), np.float32)
            loaded = load_model(tmp_path / name, unsafe=True)
            assert np.allclose(loaded(images), model(images))

    @pytest.mark.parametrize(
        ("module", "kind"),
        [
            ("os", "system"),
            ("subprocess", "Popen"),
            ("keras.src.utils.file_utils", "get_file"),
            ("keras.utils", "get_file"),
        ],
    )
    def test_other_callables_are_not_called(self, saved, tmp_path, module, kind):
        def swapped(config):
            config["config"]["layers"][1] |= {"module": module, "class_name": kind, "config": {"command": "touch x"}}
            return config

        path = rewritten(saved[0][".keras"], tmp_path / "model.keras", swapped)
        with pytest.raises(ModelError) as caught:
            load_model(path)
        assert not list(tmp_path.glob("x"))
        assert "--custom-objects" not in caught.value.message

    def test_the_reason_is_not_buried_in_pages_of_configuration(self, saved, tmp_path):
        def spoilt(config):
            config["config"]["layers"][-1]["config"]["units"] = -5
            return config

        path = rewritten(saved[0][".keras"], tmp_path / "model.keras", spoilt)
        with pytest.raises(ModelError, match=r"\(written by Keras 3.*\) cannot be loaded by Keras 3.*: .*units=-5$"):
            load_model(path)

    def test_layers_that_call_other_files(self, saved, tmp_path):
        def swapped(config):
            config["config"]["layers"][1]["class_name"] = "TFSMLayer"
            return config

        path = rewritten(saved[0][".keras"], tmp_path / "model.keras", swapped)
        with pytest.raises(UnsupportedModelError, match=r"\(TFSMLayer\) holds Python code or calls for another file"):
            load_model(path)

    def test_a_member_outside_of_the_archive_is_not_written(self, saved, tmp_path):
        path = tmp_path / "deep" / "model.keras"
        path.parent.mkdir()
        path.write_bytes(saved[0][".keras"].read_bytes())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("../escaped.txt", "out")
        load_model(path)
        assert not (tmp_path / "escaped.txt").exists()


class TestCustomObjects:
    @pytest.fixture
    def path(self, keras, tmp_path):
        from user_layers import Scale

        small(keras, Scale(factor=3.0, name="scale")).save(tmp_path / "own.keras")
        return tmp_path / "own.keras"

    def test_are_found_by_module_and_name(self, path):
        model = load_model(path, custom_objects=["user_layers:Scale"])
        assert model.get_layer("scale").factor == 3.0

    def test_are_asked_for(self, path):
        told = r"what its author made: Scale \(user_layers\); .* --custom-objects user_layers:Scale$"
        with pytest.raises(UnsupportedModelError, match=told):
            load_model(path)

    def test_all_that_are_missing_are_named(self, saved, tmp_path):
        def swapped(config):
            first, second, *_ = config["config"]["layers"]
            first |= {"module": "my.layers", "class_name": "Gate", "registered_name": "mine>Gate"}
            second |= {"module": "__main__", "class_name": "Plain", "registered_name": None}
            return config

        path = rewritten(saved[0][".keras"], tmp_path / "model.keras", swapped)
        with pytest.raises(UnsupportedModelError) as caught:
            load_model(path)
        told = "Gate (my.layers), Plain (__main__); name where it is with"
        assert f"{told} --custom-objects my.layers:Gate --custom-objects MODULE:Plain" in caught.value.message

    def test_functions_are_asked_for(self, keras, tmp_path):
        from user_layers import halved

        for name in ("model.keras", "model.h5"):
            image = keras.Input((4,))
            model = keras.Model(image, keras.layers.Dense(2, activation=halved)(image))
            model.save(tmp_path / name)
            with pytest.raises(UnsupportedModelError, match=r"what its author made: halved; .*MODULE:halved$"):
                load_model(tmp_path / name)
            loaded = load_model(tmp_path / name, custom_objects=["user_layers:halved"])
            assert np.allclose(loaded(np.ones((1, 4))), model(np.ones((1, 4))))

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("Scale", "expected 'module:attribute'"),
            ("user_layers:", "expected 'module:attribute'"),
            ("no_such_module:Scale", "cannot be imported .*PYTHONPATH"),
            ("user_layers:Skale", "has no 'Skale'"),
        ],
    )
    def test_must_exist(self, path, name, says):
        with pytest.raises(ConfigError, match=says):
            load_model(path, custom_objects=[name])

    def test_in_a_legacy_file(self, keras, tmp_path):
        from user_layers import Scale

        small(keras, Scale(factor=3.0, name="scale")).save(tmp_path / "own.h5")
        assert load_model(tmp_path / "own.h5", custom_objects=["user_layers:Scale"]).get_layer("scale").factor == 3.0
        with pytest.raises(UnsupportedModelError, match=r"what its author made: .*Scale; .*MODULE:Scale$"):
            load_model(tmp_path / "own.h5")


class TestShapes:
    @pytest.fixture
    def free(self, keras, tmp_path):
        image = keras.Input((None, None, 3), name="image")
        x = keras.layers.Conv2D(4, 3, name="conv")(image)
        x = keras.layers.GlobalAveragePooling2D()(keras.ops.relu(x) * 2.0)
        keras.Model(image, keras.layers.Dense(2, name="scores")(x), name="free").save(tmp_path / "free.keras")
        return tmp_path / "free.keras"

    def test_free_dimensions_are_asked_for(self, free):
        with pytest.raises(
            UnsupportedModelError, match=r"'image' has free dimensions, \(\?, \?, 3\); .*--input-shape 96"
        ):
            load_model(free)

    @pytest.mark.parametrize("shapes", [(12, 10, 3), {"image": (12, 10, 3)}])
    def test_and_fixed(self, keras, free, shapes):
        from converters.flatten import flatten

        model = load_model(free, input_shapes=shapes)
        graph = flatten(model).graph
        assert graph.tensors[graph.inputs[0]].shape == (12, 10, 3)
        assert graph.operations[0].name == "conv"
        assert graph.tensors[graph.operations[0].outputs[0]].shape == (10, 8, 4)
        images = np.random.default_rng(0).normal(size=(2, 12, 10, 3)).astype(np.float32)
        assert np.allclose(model(images), keras.saving.load_model(free)(images))

    @pytest.mark.parametrize(
        ("shapes", "says"),
        [
            ((12, 10), r"has shape \(\?, \?, 3\), got \(12, 10\)"),
            ((12, 10, 4), r"got \(12, 10, 4\)"),
            ((0, 10, 3), r"got \(0, 10, 3\)"),
            ({"picture": (12, 10, 3)}, "has no input 'picture'; expected one of image"),
        ],
    )
    def test_that_do_not_fit_are_refused(self, free, shapes, says):
        with pytest.raises(ConfigError, match=says):
            load_model(free, input_shapes=shapes)

    def test_too_small_for_the_layers(self, free):
        with pytest.raises(UnsupportedModelError, match=r"does not run on inputs of the shape image \(1, 1, 3\)"):
            load_model(free, input_shapes=(1, 1, 3))

    def test_several_inputs_need_names(self, keras, tmp_path):
        left, right = keras.Input((None, 2), name="left"), keras.Input((None, 2), name="right")
        shared = keras.layers.Conv1D(2, 1)
        joined = keras.layers.Concatenate(axis=-1)([shared(left), shared(right)])
        keras.Model([left, right], keras.layers.GlobalMaxPooling1D()(joined)).save(tmp_path / "pair.keras")
        with pytest.raises(ConfigError, match="has 2 inputs: give a shape by name for left, right"):
            load_model(tmp_path / "pair.keras", input_shapes=(5, 2))
        with pytest.raises(UnsupportedModelError, match=r"--input-shape right=96,2"):
            load_model(tmp_path / "pair.keras", input_shapes={"left": (5, 2)})
        model = load_model(tmp_path / "pair.keras", input_shapes={"left": (5, 2), "right": (5, 2)})
        assert [tuple(tensor.shape) for tensor in model.inputs] == [(None, 5, 2), (None, 5, 2)]

    def test_a_sequential_model_that_was_never_built(self, keras, tmp_path):
        keras.Sequential([keras.layers.Conv2D(2, 3), keras.layers.Flatten()], name="open").save(tmp_path / "open.keras")
        with pytest.raises(
            UnsupportedModelError, match="'open' does not tell its input shape; give it with --input-shape 96"
        ):
            load_model(tmp_path / "open.keras")
        assert load_model(tmp_path / "open.keras", input_shapes=(6, 6, 1)).output_shape == (None, 32)
        with pytest.raises(UnsupportedModelError, match=r"does not take the shape \[6\]"):
            load_model(tmp_path / "open.keras", input_shapes=(6,))

    def test_a_fixed_batch_is_freed(self, keras, tmp_path):
        image = keras.Input(batch_shape=(4, 6, 6, 1), name="image")
        keras.Model(image, keras.layers.Flatten()(keras.layers.Conv2D(2, 3)(image))).save(tmp_path / "four.keras")
        assert load_model(tmp_path / "four.keras").output_shape == (None, 32)


def test_a_subclassed_model_is_refused_by_name(keras, tmp_path):
    import user_layers

    class Handwritten(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = Handwritten(name="by_hand")
    model(np.zeros((1, 3), np.float32))
    Handwritten.__module__ = "user_layers"
    model.save(tmp_path / "by_hand.keras")
    with pytest.raises(UnsupportedModelError, match="--custom-objects user_layers:Handwritten"):
        load_model(tmp_path / "by_hand.keras")
    user_layers.Handwritten = Handwritten
    try:
        with pytest.raises(UnsupportedModelError, match=r"is a subclassed model .*Functional or Sequential"):
            load_model(tmp_path / "by_hand.keras", custom_objects=["user_layers:Handwritten"])
    finally:
        del user_layers.Handwritten


def test_masks_survive_being_saved(tmp_path):
    from converters.flatten import flatten

    model = user_kinds.load("masked_nested")
    model.save(tmp_path / "masked.keras")
    graph = flatten(load_model(tmp_path / "masked.keras")).graph
    by_name = {operation.name: operation for operation in graph.operations}
    assert by_name["not_equal"].outputs[0] in by_name["encoder/gru"].inputs
