"""What a user's own code makes is stale when the code changes, wherever in the user's modules that is."""

from __future__ import annotations

import importlib
import sys

import pytest

from cloud_server.models import LoadOptions, file_source
from converters.user_code import code_sha256

FILES = {
    "own_gates.py": "import keras\nfrom own_sums import total\n\n\n"
    "class Gate(keras.layers.Layer):\n    def call(self, x):\n        return total(x)\n\n"
    "    def compute_output_shape(self, shape):\n        return shape\n\n\n"
    "def bent(x):\n    return keras.ops.relu(x) - 1.0\n",
    "own_sums.py": "import own_parts.deep\n\n\ndef total(x):\n    return x + own_parts.deep.SHIFT\n",
    "own_parts/__init__.py": "",
    "own_parts/deep.py": "from . import near\n\nSHIFT = near.ONE\n",
    "own_parts/near.py": "ONE = 1.0\n",
    "own_parts/idle.py": "raise RuntimeError('imported by nobody')\n",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The folder of the user's modules; none of them is loaded before or after."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def changed(folder, name):
    path = folder / name
    path.write_text(path.read_text() + "\n# changed\n")
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", ["own_gates.py", "own_sums.py", "own_parts/deep.py", "own_parts/near.py"])
def test_a_change_anywhere_in_what_it_imports_is_seen(modules, name):
    before = code_sha256(["own_gates"])
    assert code_sha256(["own_gates"]) == before
    changed(modules, name)
    assert code_sha256(["own_gates"]) != before
    # It was read, not run.
    assert not {"own_gates", "own_sums", "own_parts", "own_parts.deep", "own_parts.near"} & sys.modules.keys()


def test_what_it_does_not_import_and_where_it_lies_is_of_no_matter(modules, tmp_path_factory, monkeypatch):
    before = code_sha256(["own_gates"])
    changed(modules, "own_parts/idle.py")
    assert code_sha256(["own_gates"]) == before
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "code"
    modules.rename(elsewhere)
    monkeypatch.syspath_prepend(str(elsewhere))
    assert code_sha256(["own_gates"]) == before


def test_modules_that_import_each_other_and_what_is_missing_or_broken(modules):
    (modules / "own_sums.py").write_text("import own_gates, no_such_module, sys\nfrom .. import x\n")
    assert code_sha256(["own_gates"])
    (modules / "own_sums.py").write_text("def (:\n")
    assert code_sha256(["own_gates"])
    assert code_sha256([]) == ""
    with pytest.raises(ImportError, match="no module named 'no_such_module'"):
        code_sha256(["no_such_module"])


@pytest.mark.parametrize("of", ["its class", "a layer within it", "a function that it calls"])
def test_the_hash_of_a_model_sees_the_code_of(modules, of):
    import keras
    from keras import layers

    from converters.flatten import flatten
    from converters.model_hash import model_sha256

    own_gates = importlib.import_module("own_gates")
    layer = {
        "its class": own_gates.Gate(name="own"),
        "a layer within it": layers.TimeDistributed(own_gates.Gate(name="inner"), name="own"),
        "a function that it calls": layers.Dense(3, activation=own_gates.bent, name="own"),
    }[of]
    inputs = keras.Input((4, 3), name="signal")
    flat = flatten(keras.Model(inputs, layer(inputs)))
    plain = flatten(keras.Model(inputs, layers.Dense(3, activation="relu", name="plain")(inputs)))
    before = model_sha256(flat), model_sha256(plain)
    assert (model_sha256(flat), model_sha256(plain)) == before
    changed(modules, "own_parts/near.py")
    assert model_sha256(flat) != before[0]
    assert model_sha256(plain) == before[1]


def test_an_outline_in_the_cache_is_not_that_of_changed_code(modules):
    """The fingerprint, by which the command line finds it, changes without loading the model."""
    path = modules / "model.keras"
    path.write_bytes(b"any")
    options = LoadOptions(custom_objects=("own_gates:Gate",))
    before = file_source(path, options).fingerprint
    assert file_source(path, options).fingerprint == before
    changed(modules, "own_sums.py")
    assert file_source(path, options).fingerprint != before
