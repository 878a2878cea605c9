"""Training: what an interruption costs, and what it does not change."""

from __future__ import annotations

import dataclasses
import fcntl
import json

import numpy as np
import pytest
from click.testing import CliRunner

from cloud_server.cli import zoo as zoo_command
from edge_sdk.errors import ConfigError
from zoo_keras import training
from zoo_keras.builders import ARCHITECTURES
from zoo_keras.data import FullDataset
from zoo_keras.quiet import load_keras
from zoo_keras.tasks import load_model


class Interrupted(Exception):
    """Stands for a killed process."""


class Recorder:
    """Remembers what it was told; raises after the epoch `stop_after`."""

    def __init__(self, *, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.started: list[tuple[str, int, int]] = []
        self.fractions: list[float] = []
        self.epochs: list[int] = []
        self.finished: list[str] = []

    def model_started(self, name, *, epochs, epochs_done):
        self.started.append((name, epochs, epochs_done))

    def batch_done(self, _name, *, fraction, **_):
        self.fractions.append(fraction)

    def epoch_done(self, _name, *, epoch, **_):
        self.epochs.append(epoch)
        if epoch == self.stop_after:
            raise Interrupted

    def model_finished(self, info):
        self.finished.append(info.name)


@pytest.fixture(scope="module")
def tiny() -> FullDataset:
    """256 images whose brightness is their label; 100 to test with."""
    rng = np.random.default_rng(0)

    def draw(count: int):
        labels = rng.integers(0, 10, count)
        noise = rng.integers(0, 10, (count, 28, 28, 1))
        return (labels[:, None, None, None] * 24 + noise).astype(np.uint8), labels

    train_images, train_labels = draw(256)
    test_images, test_labels = draw(100)
    return FullDataset(
        train_images=train_images, train_labels=train_labels, test_images=test_images, test_labels=test_labels
    )


@pytest.fixture(autouse=True)
def _small_mobile(monkeypatch):
    """Put a network that trains in no time in the place of one; its dropout has a state that no checkpoint holds."""

    def build(classes):
        keras = load_keras()
        image = keras.Input((28, 28, 1), name="image")
        x = keras.layers.Rescaling(1 / 255, name="rescale")(image)
        x = keras.layers.Flatten(name="flatten")(keras.layers.MaxPooling2D(7, name="pool")(x))
        x = keras.layers.Dropout(0.5, name="dropout")(x)
        x = keras.layers.Dense(classes, activation="softmax", name="probabilities")(x)
        return keras.Model(image, x, name="mobile")

    monkeypatch.setitem(ARCHITECTURES, "mobile", dataclasses.replace(ARCHITECTURES["mobile"], build=build))


def _train(tiny, tmp_path, recorder, *, epochs=2, assets="assets"):
    return training.train(
        "fashion-mnist",
        "mobile",
        tiny,
        work_directory=tmp_path / "work",
        observer=recorder,
        epochs=epochs,
        assets=tmp_path / assets,
    )


def test_a_resumed_run_ends_with_the_same_weights(tiny, tmp_path):
    straight = _train(tiny, tmp_path, Recorder(), assets="straight")

    with pytest.raises(Interrupted):
        _train(tiny, tmp_path, Recorder(stop_after=1))
    assert not training.is_trained("fashion-mnist", "mobile", assets=tmp_path / "assets")
    assert training.is_unfinished("fashion-mnist", "mobile", work_directory=tmp_path / "work")
    recorder = Recorder()
    resumed = _train(tiny, tmp_path, recorder)

    assert recorder.started == [("mobile", 2, 1)]
    assert recorder.epochs == [2]
    assert recorder.fractions == [0.5, 1.0]
    assert recorder.finished == ["mobile"]
    expected = load_model("fashion-mnist", "mobile", assets=tmp_path / "straight")
    received = load_model("fashion-mnist", "mobile", assets=tmp_path / "assets")
    for one, other in zip(expected.weights, received.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=2e-3, err_msg=one.path)
    assert resumed.float_accuracy == pytest.approx(straight.float_accuracy, abs=0.05)
    assert not (tmp_path / "work" / "fashion-mnist" / "mobile").exists(), "the state of a finished run is removed"


def test_an_interrupted_run_with_other_settings_is_not_gone_on_with(tiny, tmp_path):
    with pytest.raises(Interrupted):
        _train(tiny, tmp_path, Recorder(stop_after=1))
    recorder = Recorder()
    assert _train(tiny, tmp_path, recorder, epochs=1).epochs == 1
    assert recorder.started == [("mobile", 1, 0)]


def test_dying_while_a_checkpoint_is_written_costs_one_epoch(tiny, tmp_path):
    with pytest.raises(Interrupted):
        _train(tiny, tmp_path, Recorder(stop_after=1))
    (tmp_path / "work" / "fashion-mnist" / "mobile" / "epoch-002.keras").write_bytes(b"half a file")
    recorder = Recorder()
    _train(tiny, tmp_path, recorder)
    assert recorder.epochs == [2]


def test_two_processes_do_not_train_one_model(tiny, tmp_path):
    directory = tmp_path / "work" / "fashion-mnist" / "mobile"
    directory.mkdir(parents=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process trains in .*--work-dir"):
            _train(tiny, tmp_path, Recorder())


def test_an_epoch_depends_on_seed_and_number_alone(tiny):
    one, labels = training.epoch_batches(tiny.train_images, tiny.train_labels, seed=1, epoch=3)
    again, _ = training.epoch_batches(tiny.train_images, tiny.train_labels, seed=1, epoch=3)
    other, _ = training.epoch_batches(tiny.train_images, tiny.train_labels, seed=1, epoch=4)
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert np.bincount(labels).tolist() == np.bincount(tiny.train_labels).tolist()
    assert (one.dtype, one.shape) == (np.float32, (256, 28, 28, 1))


def test_half_of_the_images_are_mirrored():
    images = np.zeros((1000, 28, 28, 1), np.uint8)
    images[:, :, 0] = 255
    shuffled, _ = training.epoch_batches(images, np.zeros(1000, np.int64), seed=1, epoch=1)
    left = int((shuffled[:, 0, 0, 0] == 255).sum())
    assert 400 < left < 600
    assert int((shuffled[:, 0, 27, 0] == 255).sum()) == 1000 - left


class TestCommand:
    @staticmethod
    def _run(*arguments, **options):
        result = CliRunner().invoke(zoo_command.zoo, arguments, catch_exceptions=False, **options)
        assert result.exit_code == 0
        return result

    def test_list_as_json(self):
        result = self._run("list", "--json")
        models = json.loads(result.stdout)["models"]
        assert len(models) >= 7
        assert {"name", "family", "parameters", "float_accuracy"} <= models[0].keys()

    def test_list_as_table(self):
        result = self._run("list", env={"COLUMNS": "160"})
        assert "residual CNN" in result.stdout

    def test_trained_models_are_skipped(self, tmp_path):
        result = self._run("train", "--model", "mobile", "--work-dir", str(tmp_path))
        assert "mobile: trained already (--force trains it again)" in result.stderr

    def test_the_background_process_gets_the_same_wishes(self, tmp_path, monkeypatch):
        started = []

        class Process:
            pid = 1234

            def __init__(self, command, **_):
                started.append(command)

        monkeypatch.setattr(zoo_command.subprocess, "Popen", Process)
        wishes = ["--model", "residual", "--epochs", "3", "--force", "--work-dir", str(tmp_path / "work")]
        result = self._run("train", *wishes, "--background")
        assert "training residual as process 1234" in result.stderr
        assert str(tmp_path / "work" / "train.log") in result.stderr
        (command,) = started
        arguments = command[command.index("train") + 1 :]
        asked = zoo_command.train.make_context("train", wishes.copy()).params
        assert zoo_command.train.make_context("train", arguments).params == asked

    def test_training_goes_on_when_run_again(self, tiny, tmp_path, monkeypatch):
        monkeypatch.setattr("zoo_keras.data.load_full", lambda: tiny)
        monkeypatch.setattr(training, "train", lambda _task, name, *_, **__: trained.append(name))
        trained: list[str] = []
        state = tmp_path / "fashion-mnist" / "mobile" / training.STATE_FILE
        state.parent.mkdir(parents=True)
        state.touch()
        self._run("train", "--work-dir", str(tmp_path), "--model", "mobile", "--model", "plain-cnn")
        assert trained == ["mobile"]

    def test_unknown_model(self):
        result = CliRunner().invoke(zoo_command.zoo, ["train", "--model", "lenet"])
        assert isinstance(result.exception, ConfigError)
        assert "has no model 'lenet'; it has: mobile" in str(result.exception)
