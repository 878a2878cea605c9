"""Legacy files that only the old Keras reads: what to install without it, and what becomes of them with it.

``tf_keras`` is no dependency, and beside Keras 3 it changes what TensorFlow imports. So it is kept in a folder of its
own outside the tree, used again by later runs, and only one process has it on its path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import old_files
import pytest

from converters.loading import load_model
from edge_sdk.errors import UnsupportedModelError

REQUIREMENT = "tf_keras==2.21.*"
ROOT = Path(__file__).parents[2]


def old_keras_folder() -> Path:
    key = hashlib.sha256(repr((sys.version_info[:3], REQUIREMENT)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "splitfleet-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"tf-keras-{key}"
    complete = folder / "complete"
    # Several test runs may come here at once.
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder]
            done = subprocess.run([*install, REQUIREMENT], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            complete.touch()
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The report of `old_files`, and the folder of its files."""
    folder = tmp_path_factory.mktemp("old")
    done = subprocess.run(
        [sys.executable, old_files.__file__, folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{old_keras_folder()}", "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), folder


@pytest.mark.parametrize("name", ["operations", "recurrent", "plain", "mobilenet"])
def test_the_model_is_the_same_in_keras_3_and_its_head_runs(made, name):
    report, _ = made
    assert report[name]["difference"] <= 1e-5
    assert report[name]["features"] >= 1


def test_layers_are_those_of_keras_3_and_operations_stand_as_they_are(made):
    report, _ = made
    assert report["recurrent"]["operations"] == ["bidirectional:Bidirectional", "gru:GRU", "dense:Dense"]
    operations = report["operations"]["operations"]
    assert operations[:3] == ["tf.math.truediv:Truediv", "tf.math.subtract:Subtract", "block_conv:Conv2D"]
    assert "inner/c:Conv2D" in operations


def test_what_is_not_carried_over_is_refused_by_name(made):
    report, _ = made
    assert "the layer 'embedding' makes a mask, which is not carried over" in report["masked"]["error"]
    assert "model.save('model.keras')" in report["masked"]["error"]


def test_a_graph_that_does_more_than_to_compute_is_refused(made):
    report, _ = made
    assert "its graph calls tf." in report["writing"]["error"]
    assert "does more than to compute" in report["writing"]["error"]


@pytest.mark.parametrize("name", ["operations", "recurrent", "plain"])
def test_without_the_old_keras_the_message_names_it(made, name):
    _, folder = made
    with pytest.raises(UnsupportedModelError, match=r"was written by Keras 2\..*pip install tf_keras .*\.keras"):
        load_model(folder / f"{name}.h5")
