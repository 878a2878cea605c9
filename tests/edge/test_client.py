"""SplitClient against a scripted peer: results, timing, errors."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from edge_sdk import Bundle, SplitClient
from edge_sdk.errors import (
    ConfigError,
    DeadlineExceededError,
    FeatureMismatchError,
    InvalidInputError,
    PeerUnreachableError,
    ProtocolError,
)
from edge_sdk.head import Head
from edge_sdk.wire import Message, MessageType, Tensor


def test_a_split_gives_all_outputs_in_the_models_order(bundles, start_peer, tail_handler, image):
    peer = start_peer(tail_handler)
    with SplitClient(peer.endpoint, bundle=bundles / "split") as client:
        answer = client.infer(image)
    assert list(answer.outputs) == ["scores", "early"]
    features = Head(Bundle.open(bundles / "split")).run(image)
    (feature,) = features.features
    real = (feature.data.astype(np.float32) - feature.zero_point) * feature.scale
    np.testing.assert_allclose(answer.outputs["scores"], [real.mean(), real.max(), real.min()], rtol=1e-6)
    np.testing.assert_array_equal(answer.outputs["early"], features.outputs["early"])
    assert all(output.dtype == np.float32 for output in answer.outputs.values())
    assert answer.bundle == Bundle.open(bundles / "split").digest


def test_the_timing_adds_up_and_bytes_are_counted(bundles, start_peer, tail_handler, image):
    peer = start_peer(tail_handler)
    with SplitClient(peer.endpoint, bundle=bundles / "split") as client:
        answer = client.infer(image)
    timing = answer.timing
    assert timing.total_s == timing.edge_s + timing.transfer_s + timing.cloud_s
    assert timing.edge_s > 0
    assert timing.transfer_s > 0
    # 64 bytes of features, the preamble and a header with the bundle's digest.
    assert 64 + 8 + 64 < answer.sent_bytes < 400
    assert 12 + 8 + 64 < answer.received_bytes < 400


def test_what_the_server_tells_of_its_time_is_passed_on(bundles, start_peer, tail_handler, image):
    parts = {"queue_s": 0.25, "batch_wait_s": 0.5, "compute_s": 1.0}
    told = iter([parts, {}, {"queue_s": -1.0, "batch_wait_s": "long", "compute_s": 1.0, "later_s": 7.0}])

    def answer(message, peer):
        return replace(tail_handler(message, peer), body={"cloud_s": 0.0} | next(told))

    peer = start_peer(answer)
    with SplitClient(peer.endpoint, bundle=bundles / "split") as client:
        timings = [client.infer(image).timing for _ in range(3)]
    assert [(each.queue_s, each.batch_wait_s, each.compute_s) for each in timings] == [
        (0.25, 0.5, 1.0),
        (None, None, None),
        (None, None, 1.0),
    ]
    assert all(0 < each.encode_s < each.edge_s for each in timings)


def test_a_request_names_its_bundle_its_budget_and_its_quantization(bundles, start_peer, tail_handler, image):
    peer = start_peer(tail_handler)
    with SplitClient(peer.endpoint, bundle=bundles / "split", timeout_s=9.0) as client:
        client.infer(image)
    (request,) = peer.received
    crossing = Bundle.open(bundles / "split").manifest.crossing[0]
    assert request.type is MessageType.INFER
    assert request.bundle == Bundle.open(bundles / "split").digest
    assert 0 < request.budget_s <= 9.0
    assert request.tensors[0].data.shape == (1, 4, 4, 4)
    assert request.tensors[0].data.dtype == np.int8
    assert (request.tensors[0].scale, request.tensors[0].zero_point) == (crossing.scale, crossing.zero_point)


def test_cloud_only_sends_the_quantized_image(bundles, start_peer, tail_handler):
    peer = start_peer(tail_handler)
    image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    with SplitClient(peer.endpoint, bundle=bundles / "raw") as client:
        answer = client.infer(image)
    np.testing.assert_array_equal(peer.received[0].tensors[0].data, image.astype(np.int16)[np.newaxis] - 128)
    np.testing.assert_allclose(answer.outputs["scores"], [31.5, 63.0, 0.0])


def test_edge_only_needs_no_server(bundles, image):
    with SplitClient(bundle=bundles / "whole") as client:
        answer = client.infer(image)
    assert answer.outputs["scores"].shape == (3,)
    assert answer.outputs["scores"].sum() == pytest.approx(1.0, abs=0.02)
    assert answer.timing.transfer_s == answer.timing.cloud_s == 0.0
    assert answer.sent_bytes == answer.received_bytes == 0


def test_a_split_without_a_server_is_refused(bundles):
    with pytest.raises(ConfigError, match="name the server"):
        SplitClient(bundle=bundles / "split")


def test_inputs_by_name(bundles):
    with SplitClient(bundle=bundles / "pair") as client:
        answer = client.infer({"index": np.array([2]), "vector": np.ones(4)})
        again = client.infer({"vector": np.ones((1, 4), np.float32), "index": np.array([[2]], np.int32)})
    np.testing.assert_array_equal(answer.outputs["mix"], again.outputs["mix"])


def test_the_servers_error_comes_back_as_its_class(bundles, start_peer, image):
    def refuse(message, peer):  # noqa: ARG001
        raise FeatureMismatchError("not these", wanted="others")

    peer = start_peer(refuse)
    with (
        SplitClient(peer.endpoint, bundle=bundles / "split") as client,
        pytest.raises(FeatureMismatchError, match="not these") as caught,
    ):
        client.infer(image)
    assert caught.value.details == {"wanted": "others"}


def test_a_silent_server_ends_in_the_clients_own_timeout(bundles, start_peer, image):
    peer = start_peer(lambda *_: None)
    with (
        SplitClient(peer.endpoint, bundle=bundles / "split", timeout_s=0.5) as client,
        pytest.raises(DeadlineExceededError, match=r"0\.5 s"),
    ):
        client.infer(image)


def test_nobody_there(bundles, free_endpoint):
    with pytest.raises(PeerUnreachableError, match="is 'splitfleet serve' running"):
        SplitClient(free_endpoint, bundle=bundles / "split", timeout_s=0.3)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e300, 86401])
def test_a_timeout_that_is_none(bundles, free_endpoint, timeout_s):
    with pytest.raises(ConfigError, match="timeout_s must be above 0 and at most 86400"):
        SplitClient(free_endpoint, bundle=bundles / "split", timeout_s=timeout_s)


def test_a_day_of_patience(bundles, start_peer, tail_handler, image):
    with SplitClient(start_peer(tail_handler).endpoint, bundle=bundles / "split", timeout_s=86400) as client:
        assert list(client.infer(image).outputs) == ["scores", "early"]


@pytest.mark.parametrize("sample", [[[1.0], [1.0, 2.0]], {"image": [[1], [1, 2]]}, "image", None, [{}], object()])
def test_a_sample_that_is_no_array(bundles, sample):
    with SplitClient(bundle=bundles / "whole") as client, pytest.raises(InvalidInputError, match="'image'"):
        client.infer(sample)


def test_a_wrong_sample_never_leaves_the_device(bundles, start_peer, tail_handler):
    peer = start_peer(tail_handler)
    with (
        SplitClient(peer.endpoint, bundle=bundles / "split") as client,
        pytest.raises(InvalidInputError, match=r"expected shape \[8, 8, 1\].*got \[9, 9\]"),
    ):
        client.infer(np.zeros((9, 9)))
    assert peer.received == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"bundle": "f" * 64}, "made by bundle"),
        ({"bundle": None}, "made by bundle"),
        ({"body": {}}, "cloud_s"),
        ({"body": {"cloud_s": -1.0}}, "cloud_s"),
        ({"tensors": ()}, "must hold output_0"),
        ({"tensors": (Tensor(name="output_0", data=np.zeros((1, 4), np.float32)),)}, "must hold output_0"),
        ({"type": MessageType.REPLY}, "expected a RESULT"),
    ],
)
def test_a_result_that_does_not_belong_is_refused(bundles, start_peer, tail_handler, image, changes, complaint):
    def answer(message, peer):
        right = vars(tail_handler(message, peer))
        return Message(**(right | changes))

    peer = start_peer(answer)
    with (
        SplitClient(peer.endpoint, bundle=bundles / "split") as client,
        pytest.raises(ProtocolError, match=complaint),
    ):
        client.infer(image)


def test_threads_share_a_client(bundles, start_peer, tail_handler):
    peer = start_peer(tail_handler)
    results = {}
    with SplitClient(peer.endpoint, bundle=bundles / "raw") as client:

        def work(value):
            results[value] = client.infer(np.full((8, 8, 1), value, np.uint8)).outputs["scores"]

        threads = [threading.Thread(target=work, args=(value,)) for value in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {value: list(scores) for value, scores in results.items()} == {v: [v, v, v] for v in range(20)}
