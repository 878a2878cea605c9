"""The zoo's models as candidates, with the converters' processes behind them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import zoo_keras
from cloud_server.allocation.candidates import WorkshopCandidates, zoo_recipe
from cloud_server.allocation.memory_model import MODELS, Choice, NoCut
from cloud_server.allocation.metrics import accuracy
from cloud_server.allocation.predictions import Predictions
from cloud_server.allocation.task_data import TaskData, task_data
from cloud_server.home import Home
from cloud_server.library import Library
from cloud_server.registry import Registry
from converters import Workshop
from converters.worker import Worker
from edge_sdk.errors import ConfigError, StorageError

TASK = "fashion-mnist"
MODEL = "mobile"


@pytest.fixture
def candidates(tmp_path: Path) -> Iterator[WorkshopCandidates]:
    with Workshop(tmp_path / "cache", workers=1) as workshop, closing(Predictions(tmp_path / "predictions")) as known:
        yield WorkshopCandidates(workshop, known, {MODEL: zoo_recipe(TASK, MODEL)}, MODELS["cumulative"])


@pytest.fixture
def find(registry: Registry, tmp_path: Path) -> Callable[[str], TaskData]:
    library = Library(registry, Home.at(tmp_path / "home"))
    return lambda name: task_data(name, library)


def test_a_recipe_travels_and_tells_models_apart(find: Callable[[str], TaskData]) -> None:
    recipe = zoo_recipe(TASK, MODEL)
    assert pickle.loads(pickle.dumps(recipe)).fingerprint == recipe.fingerprint
    recipes = find(TASK).recipes
    assert len({each.fingerprint for each in recipes.values()}) == len(recipes) > 1
    with pytest.raises(ConfigError, match="has no model"):
        zoo_recipe(TASK, "nothing")


def test_a_task_has_its_data(find: Callable[[str], TaskData]) -> None:
    data = find(TASK)
    assert set(data.recipes) <= set(zoo_keras.task(TASK).models)
    assert data.test is not None
    assert len(data.validation) == len(data.test) == 1000
    assert data.validation.digest != data.test.digest
    with pytest.raises(ConfigError, match="there is no task"):
        find("nothing")


def test_a_budget_chooses_the_cut_and_a_bundle_is_built_of_it(candidates: WorkshopCandidates) -> None:
    assert isinstance(candidates.choose(MODEL, 10, "litert"), NoCut)
    chosen = candidates.choose(MODEL, 20_000, "litert")
    assert isinstance(chosen, Choice)
    cut = chosen.first
    assert 0 < cut.k < cut.n
    assert cut.predicted_bytes <= 20_000 < cut.whole_bytes
    bundle = candidates.build(MODEL, chosen)
    bundle.verify()
    assert (bundle.manifest.model.name, bundle.manifest.task) == (MODEL, TASK)
    assert (bundle.manifest.cut.k, bundle.manifest.cut.name) == (cut.k, cut.cut)
    assert bundle.manifest.cumulative_bytes == cut.predicted_bytes
    assert bundle.manifest.precision == "int8"
    assert candidates.build_cloud_only(MODEL).manifest.cut.k == 0


def test_predictions_are_the_model_s_and_are_asked_once(
    candidates: WorkshopCandidates, find: Callable[[str], TaskData], monkeypatch: pytest.MonkeyPatch
) -> None:
    validation = find(TASK).validation
    outputs = candidates.predict(MODEL, validation)
    share = accuracy(outputs, validation.labels).mean()
    # Its metadata is of all 10,000 test images, of which these are a tenth.
    assert share == pytest.approx(zoo_keras.model_info(TASK, MODEL).float_accuracy, abs=0.03)
    monkeypatch.setattr(Worker, "run", lambda *_: pytest.fail("it was asked before"))
    again = candidates.predict(MODEL, validation)
    assert all((before == after).all() for before, after in zip(outputs, again, strict=True))


def test_predictions_that_cannot_be_kept_are_told(
    find: Callable[[str], TaskData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "predictions").touch()
    monkeypatch.setattr(Worker, "run", lambda *_: [np.zeros(3)])
    with closing(Predictions(tmp_path / "predictions")) as known, pytest.raises(StorageError, match="cannot be kept"):
        known.of(zoo_recipe(TASK, MODEL), find(TASK).validation)
