"""The shipped models: loadable, as accurate as their metadata say, small enough to ship."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import zoo_keras
from edge_sdk.errors import ConfigError, IntegrityError, ModelError
from zoo_keras.quiet import load_keras
from zoo_keras.tasks import ASSETS
from zoo_keras.weights import load_float16, save_float16

TASK = zoo_keras.task("fashion-mnist")


@pytest.fixture(scope="module")
def infos():
    return {name: zoo_keras.model_info(TASK.name, name) for name in TASK.models}


@pytest.mark.parametrize("name", TASK.models)
def test_reaches_the_accuracy_of_its_metadata(name, infos):
    model = zoo_keras.load_model(TASK.name, name)
    info = infos[name]
    right = total = 0
    for split in ("validation", "test"):
        samples = TASK.samples(split)
        probabilities = model.predict(samples.inputs["image"].astype(np.float32), batch_size=250, verbose=0)
        right += int((probabilities.argmax(axis=1) == samples.labels).sum())
        total += len(samples)
    # Three standard errors of an accuracy estimated from 2,000 of the 10,000 images.
    tolerance = 3 * (info.float_accuracy * (1 - info.float_accuracy) / total) ** 0.5
    assert right / total == pytest.approx(info.float_accuracy, abs=tolerance)
    assert model.count_params() == info.parameters


def test_metadata_describe_the_real_training(infos):
    for name, info in infos.items():
        assert (info.task, info.name, info.test_images) == (TASK.name, name, 10_000)
        assert info.epochs >= 5
        assert 0 < info.seconds_per_epoch <= 90
    assert sum(info.epochs * info.seconds_per_epoch for info in infos.values()) <= 3600


def test_accuracies_are_spread(infos):
    accuracies = {name: info.float_accuracy for name, info in infos.items()}
    smallest = min(infos.values(), key=lambda info: info.parameters)
    assert 0.84 <= smallest.float_accuracy <= 0.885
    others = [accuracy for name, accuracy in accuracies.items() if name != smallest.name]
    assert min(others) > smallest.float_accuracy + 0.01
    assert sum(accuracy >= 0.91 for accuracy in others) >= 3


def test_weights_are_float16_without_pickle_and_small_together(infos):
    total = 0
    for name in TASK.models:
        path = ASSETS / TASK.name / "models" / f"{name}.npz"
        total += path.stat().st_size
        with np.load(path, allow_pickle=False) as archive:
            assert {archive[key].dtype for key in archive.files} == {np.dtype(np.float16)}
    assert total < 6_000_000
    assert total == sum(info.weights_bytes for info in infos.values())


def test_the_licence_of_the_data_is_shipped():
    notice = (ASSETS / TASK.name / "NOTICE").read_text(encoding="utf-8")
    assert "Zalando SE" in notice
    assert "The MIT License" in notice


def test_names_and_facts_come_without_tensorflow():
    code = (
        "import sys, zoo_keras\n"
        "task = zoo_keras.task(zoo_keras.tasks()[0])\n"
        "task.samples('validation').digest\n"
        "zoo_keras.model_info(task.name, task.models[0])\n"
        "import cloud_server.cli.zoo, zoo_keras.training\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_loading_tensorflow_writes_nothing():
    code = "import zoo_keras.quiet as q; q.load_keras().ops.ones(3) + 1"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_task_names_its_classes():
    assert zoo_keras.tasks() == ("fashion-mnist",)
    assert len(TASK.labels) == 10
    assert TASK.metric == "accuracy"
    assert len(TASK.models) >= 7


def test_unknown_names_list_those_that_exist():
    with pytest.raises(ConfigError, match=r"no task 'mnist'; the tasks are: fashion-mnist"):
        zoo_keras.task("mnist")
    with pytest.raises(ConfigError, match=r"'fashion-mnist' has no model 'lenet'; it has: mobile"):
        zoo_keras.load_model("fashion-mnist", "lenet")
    with pytest.raises(ConfigError, match=r"'fashion-mnist' has no model '\.\./residual'"):
        zoo_keras.model_info("fashion-mnist", "../residual")


class TestDamagedAssets:
    @pytest.fixture
    def assets(self, tmp_path):
        models = tmp_path / TASK.name / "models"
        models.mkdir(parents=True)
        for suffix in ("npz", "json"):
            shutil.copy(ASSETS / TASK.name / "models" / f"mobile.{suffix}", models)
        return tmp_path

    def test_altered_weights(self, assets):
        path = assets / TASK.name / "models" / "mobile.npz"
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(IntegrityError, match=r"mobile\.npz: expected a file of SHA-256"):
            zoo_keras.load_model(TASK.name, "mobile", assets=assets)

    def test_missing_weights(self, assets):
        (assets / TASK.name / "models" / "mobile.npz").unlink()
        with pytest.raises(ConfigError, match=r"mobile\.npz is missing: install"):
            zoo_keras.load_model(TASK.name, "mobile", assets=assets)

    def test_model_that_was_never_trained(self, assets):
        with pytest.raises(ConfigError, match=r"'residual' is not trained.*splitfleet zoo train --model residual"):
            zoo_keras.model_info(TASK.name, "residual", assets=assets)

    @pytest.mark.parametrize("content", ["{", "[]", '{"name": "mobile"}'])
    def test_damaged_facts(self, assets, content):
        (assets / TASK.name / "models" / "mobile.json").write_text(content)
        with pytest.raises(ConfigError, match=r"mobile\.json is damaged"):
            zoo_keras.model_info(TASK.name, "mobile", assets=assets)

    def test_weights_of_another_architecture(self, assets):
        models = assets / TASK.name / "models"
        info = json.loads((models / "mobile.json").read_text())
        shutil.move(models / "mobile.npz", models / "residual.npz")
        (models / "residual.json").write_text(json.dumps(info))
        with pytest.raises(ModelError, match=r"residual\.npz does not belong to the model 'residual'.*--force"):
            zoo_keras.load_model(TASK.name, "residual", assets=assets)


class TestFloat16:
    @pytest.fixture
    def model(self):
        keras = load_keras()
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="dense")], name="tiny")

    def test_round_trip_rounds_once(self, model, tmp_path):
        original = [weight.numpy() for weight in model.weights]
        size, sha256 = save_float16(model, tmp_path / "tiny.npz")
        assert size == (tmp_path / "tiny.npz").stat().st_size
        load_float16(model, tmp_path / "tiny.npz", sha256=sha256)
        for weight, before in zip(model.weights, original, strict=True):
            assert weight.dtype == "float32"
            np.testing.assert_array_equal(weight.numpy(), before.astype(np.float16).astype(np.float32))
        assert save_float16(model, tmp_path / "again.npz") == (size, sha256)

    @pytest.mark.parametrize("value", [np.nan, 1e6])
    def test_a_diverged_training_is_not_exported(self, model, tmp_path, value):
        model.layers[-1].bias.assign([0.0, value, 0.0])
        with pytest.raises(ModelError, match=r"'tiny'.*bias.*float16 cannot hold"):
            save_float16(model, tmp_path / "tiny.npz")
        assert not list(tmp_path.iterdir())
