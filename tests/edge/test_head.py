"""The head: what samples it takes, what it makes of them, and which files it refuses."""

import dataclasses
import hashlib

import numpy as np
import pytest

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, IntegrityError, InvalidInputError, RuntimeUnavailableError
from edge_sdk.head import Head, prepare_input
from edge_sdk.manifest import FileEntry, InputSpec, SelfCheck
from edge_sdk.quantization import dequantize, quantize
from edge_sdk.runtime import Interpreter


def rewrite(folder, **changes):
    """Change the manifest of a bundle on disk."""
    changed = dataclasses.replace(Bundle.open(folder).manifest, **changes)
    (folder / "manifest.json").write_bytes(changed.canonical())
    return Bundle.open(folder)


def test_features_and_outputs_are_those_of_the_interpreter(prebuilt_bundles, image):
    bundle = Bundle.open(prebuilt_bundles / "split")
    (spec,) = bundle.manifest.inputs
    interpreter = Interpreter(bundle.head_path)
    raw = interpreter.run({"input_0": quantize(image[np.newaxis], spec.scale, spec.zero_point, np.int8)})
    result = Head(bundle).run(image)
    (feature,) = result.features
    np.testing.assert_array_equal(feature.data, raw["feature_0"])
    assert feature.data.shape == (1, 4, 4, 4)
    output = bundle.manifest.outputs[1]
    np.testing.assert_array_equal(
        result.outputs["early"], dequantize(raw["output_1"][0], output.scale, output.zero_point)
    )


def test_results_do_not_change_with_the_next_run(prebuilt_bundles, image):
    head = Head(Bundle.open(prebuilt_bundles / "split"))
    first = head.run(image).features[0].data
    before = first.copy()
    head.run(1 - image)
    np.testing.assert_array_equal(first, before)


@pytest.mark.parametrize(
    "same",
    [
        lambda x: x[np.newaxis],
        lambda x: x.astype(np.float64),
        lambda x: {"image": x},
        lambda x: x.tolist(),
        lambda x: np.asfortranarray(x),
        lambda x: x[::-1][::-1],
    ],
)
def test_ways_to_say_the_same(prebuilt_bundles, image, same):
    head = Head(Bundle.open(prebuilt_bundles / "split"))
    np.testing.assert_array_equal(head.run(same(image)).features[0].data, head.run(image).features[0].data)


def test_a_uint8_image_is_cast_to_floats(prebuilt_bundles):
    head = Head(Bundle.open(prebuilt_bundles / "split"))
    image = np.random.default_rng(0).integers(0, 2, (8, 8, 1)).astype(np.uint8)
    np.testing.assert_array_equal(head.run(image).features[0].data, head.run(image.astype(np.float32)).features[0].data)


@pytest.mark.parametrize(
    ("dtype", "value", "complaint"),
    [
        ("float32", np.zeros((8, 8)), r"expected shape \[8, 8, 1\].*got \[8, 8\]"),
        ("float32", np.zeros((2, 8, 8, 1)), r"got \[2, 8, 8, 1\]"),
        ("float32", np.full((8, 8, 1), np.nan), "finite numbers, got NaN"),
        ("float32", np.full((8, 8, 1), np.inf), "finite numbers, got infinity"),
        ("float32", np.full((8, 8, 1), 1e300), "finite numbers, got infinity"),
        ("float32", np.full((8, 8, 1), "a"), "expected float32, got <U1"),
        ("float32", np.full((8, 8, 1), None), "expected float32, got object"),
        ("float32", np.zeros((8, 8, 1), complex), "expected float32, got complex128"),
        ("uint8", np.full((8, 8, 1), 0.5), "expected uint8, got float64"),
        ("uint8", np.full((8, 8, 1), 256), "expected uint8, got int64 with values from 256 to 256"),
        ("uint8", np.full((8, 8, 1), -1), "with values from -1 to -1"),
        ("bool", np.full((8, 8, 1), 1), "expected bool, got int64"),
    ],
)
def test_wrong_inputs_say_what_was_expected_and_what_came(dtype, value, complaint):
    spec = InputSpec(name="image", shape=(8, 8, 1), dtype=dtype)
    with pytest.raises(InvalidInputError, match=f"input 'image': .*{complaint}"):
        prepare_input(value, spec, np.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", np.full(3, 255)),
        ("int32", np.full(3, 9, np.int64)),
        ("float32", np.full(3, True)),
        ("int8", [1, 2, 3]),
    ],
)
def test_casts_that_lose_nothing(dtype, value):
    prepared = prepare_input(value, InputSpec(name="x", shape=(3,), dtype=dtype), np.dtype(dtype))
    assert prepared.dtype == np.dtype(dtype)
    assert prepared.shape == (1, 3)
    np.testing.assert_array_equal(prepared[0], value)


def test_wrong_names(prebuilt_bundles, image):
    head = Head(Bundle.open(prebuilt_bundles / "split"))
    with pytest.raises(InvalidInputError, match="expected inputs 'image'; got 'picture'"):
        head.run({"picture": image})
    pair = Head(Bundle.open(prebuilt_bundles / "pair"))
    with pytest.raises(
        InvalidInputError, match="2 inputs: expected arrays by name for 'vector', 'index', got one ndarray"
    ):
        pair.run(image)
    with pytest.raises(InvalidInputError, match="got 'vector'"):
        pair.run({"vector": np.zeros(4)})


def test_two_inputs_one_of_them_an_index(prebuilt_bundles):
    head = Head(Bundle.open(prebuilt_bundles / "pair"))
    outputs = [head.run({"vector": np.full(4, 0.5), "index": np.array([i])}).outputs["mix"] for i in range(5)]
    assert len({tuple(output) for output in outputs}) == 5


def test_a_float_head_gets_its_features_quantized(prebuilt_bundles, image, monkeypatch):
    """A head that emits floats though the features cross as int8: the manifest's scale is applied here."""
    bundle = Bundle.open(prebuilt_bundles / "split")
    crossing = bundle.manifest.crossing[0]
    head = Head(bundle)
    as_int8 = head.run(image).features[0].data
    run = Interpreter.run

    def as_floats(self, inputs):
        raw = run(self, inputs)
        return raw | {"feature_0": dequantize(raw["feature_0"], crossing.scale, crossing.zero_point)}

    monkeypatch.setattr(Interpreter, "run", as_floats)
    np.testing.assert_array_equal(head.run(image).features[0].data, as_int8)


def test_a_changed_file_is_never_loaded(bundles):
    path = bundles / "split" / "head.tflite"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"head\.tflite: SHA-256 is"):
        Head(Bundle.open(bundles / "split"))


def test_a_file_that_is_no_head_is_refused(bundles):
    data = b"not a flatbuffer at all, but of some length"
    (bundles / "split" / "head.tflite").write_bytes(data)
    files = [
        FileEntry(path="head.tflite", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)),
        *(entry for entry in Bundle.open(bundles / "split").manifest.files if entry.path != "head.tflite"),
    ]
    with pytest.raises(RuntimeUnavailableError, match="cannot load it"):
        Head(rewrite(bundles / "split", files=tuple(files)))


def test_a_manifest_that_contradicts_the_file_is_refused(bundles):
    (spec,) = Bundle.open(bundles / "split").manifest.inputs
    wrong = dataclasses.replace(spec, shape=(9, 9, 1))
    with pytest.raises(BundleError, match=r"promises input_0 of shape \[1, 9, 9, 1\], the file has \[1, 8, 8, 1\]"):
        Head(rewrite(bundles / "split", inputs=(wrong,)))
    unscaled = dataclasses.replace(spec, scale=None, zero_point=None)
    with pytest.raises(BundleError, match="quantized in the file, not in the manifest"):
        Head(rewrite(bundles / "split", inputs=(unscaled,)))


def test_a_head_that_computes_something_else_fails_its_self_check(bundles):
    right = Bundle.open(bundles / "split").manifest.self_check
    off = {key: tuple(value + 30 for value in values) for key, values in right.expected.items()}
    with pytest.raises(BundleError, match=r"self check failed.*off by up to 30"):
        Head(rewrite(bundles / "split", self_check=SelfCheck(seed=right.seed, expected=off)))
    near = {key: tuple(value + 2 for value in values) for key, values in right.expected.items()}
    Head(rewrite(bundles / "split", self_check=SelfCheck(seed=right.seed, expected=near)))


def test_cloud_only_has_no_runtime(prebuilt_bundles):
    head = Head(Bundle.open(prebuilt_bundles / "raw"))
    assert (head.runtime, head.runtime_version) == ("none", "")
    result = head.run(np.full((8, 8, 1), 200, np.uint8))
    assert result.outputs == {}
    np.testing.assert_array_equal(result.features[0].data, np.full((1, 8, 8, 1), 72, np.int8))
