"""What `splitfleet verify` runs in its worker: the tail, and the whole model."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import small_models

from converters.comparison import compare
from edge_sdk.errors import BundleError


@pytest.fixture(scope="module")
def cloud_only(flat_model, tmp_path_factory):
    """All of a model with two inputs and three outputs as a tail."""
    from converters.bundles import build_bundle
    from converters.calibration import Calibration
    from converters.model_hash import model_sha256
    from edge_sdk.manifest import ModelRef

    flat = flat_model("two_ends")
    return build_bundle(
        flat,
        0,
        Calibration.of(flat.graph, small_models.samples("two_ends")),
        task="any",
        model=ModelRef(name="two_ends", sha256=model_sha256(flat)),
        folder=tmp_path_factory.mktemp("cloud_only"),
    )


def features_of(bundle):
    from edge_sdk.quantization import quantize

    samples = small_models.samples("two_ends", 40)
    return [
        quantize(samples[given.name], sent.scale, sent.zero_point, sent.dtype)
        for given, sent in zip(bundle.manifest.inputs, bundle.manifest.crossing, strict=True)
    ]


def test_tail_and_whole_agree_in_the_order_of_the_outputs(cloud_only):
    from converters.verification_jobs import tail_outputs, whole_outputs

    samples = small_models.samples("two_ends", 40)
    inputs = [samples[spec.name] for spec in cloud_only.manifest.inputs]
    load = functools.partial(small_models.load, "two_ends")
    sha256, whole = whole_outputs(load, cloud_only.manifest.model.sha256, inputs)
    assert sha256 == cloud_only.manifest.model.sha256
    features = features_of(cloud_only)
    first, second = tail_outputs(cloud_only.path, [features, [feature[:3] for feature in features]])
    assert (
        [output.shape for output in whole] == [first[place].shape for place in range(3)] == [(40, 4), (40, 8), (40, 2)]
    )
    np.testing.assert_allclose(second[2], first[2][:3], rtol=1e-5)
    comparison = compare([first[place] for place in range(3)], whole, classifier=False)
    assert 0 < comparison.relative_error < 0.1


def test_another_model_is_not_run(cloud_only):
    from converters.verification_jobs import whole_outputs

    wanted = cloud_only.manifest.model.sha256
    sha256, whole = whole_outputs(functools.partial(small_models.load, "two_ends", seed=9), wanted, [])
    assert (sha256 != wanted, whole) == (True, None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda output: dataclasses.replace(output, shape=(9,)), "output_0 of shape [32, 9], the tail gave [32, 4]"),
        (None, "output_3 of shape [32, 4], the tail gave none"),
    ],
)
def test_a_tail_that_is_not_what_the_manifest_says_is_told(cloud_only, tmp_path, change, told):
    from converters.verification_jobs import tail_outputs

    first, *others = cloud_only.manifest.outputs
    outputs = (first, *others, first) if change is None else (change(first), *others)
    manifest = dataclasses.replace(cloud_only.manifest, outputs=outputs)
    (tmp_path / "tail").symlink_to(cloud_only.tail_path)
    (tmp_path / "manifest.json").write_bytes(manifest.canonical())
    with pytest.raises(BundleError, match="the manifest promises") as raised:
        tail_outputs(tmp_path, [features_of(cloud_only)])
    assert told in raised.value.message
