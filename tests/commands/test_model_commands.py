"""`splitfleet cuts`, `split` and `verify` on models of users and of the zoo."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from edge_sdk.bundle import Bundle, file_sha256
from edge_sdk.manifest import FileEntry

Command = Callable[..., Result]
Document = Callable[..., Any]
Told = Callable[..., str]


def test_the_json_of_cuts_is_the_contract(document: Document, files: Path) -> None:
    found = document("cuts", files / "narrow.keras", "--ram", "200B", "--memory-model", "cumulative")
    assert found["model"] == str(files / "narrow.keras")
    assert found["operations"] == 5
    assert [cut["name"] for cut in found["cuts"]] == ["first", "pool", "second", "flat"]
    first = found["cuts"][0]
    assert first["tensors"] == [{"name": "first", "source": "first", "shape": [8, 8, 2], "dtype": "float32"}]
    assert (first["k"], first["legal"], first["feature_bytes_int8"], first["feature_bytes_float"]) == (
        1,
        True,
        128,
        512,
    )
    assert [cut["fits"] for cut in found["cuts"]] == [True, True, False, False]
    assert found["chosen"] == found["deepest_that_fits"] == 2
    assert found["smallest_feature"] == 2
    assert all(set(cut["peak_bytes"]) == {"litert", "tflite_runtime"} for cut in found["cuts"])


def test_the_deepest_head_whose_peak_fits_is_chosen(document: Document) -> None:
    peaks = [cut["peak_bytes"]["litert"] for cut in document("cuts", "zoo:mobile")["cuts"]]
    budget = (peaks[0] + peaks[-1]) // 2
    found = document("cuts", "zoo:mobile", "--ram", budget)
    fitting = [cut["k"] for cut in found["cuts"] if cut["peak_bytes"]["litert"] <= budget]
    assert (found["memory_model"], found["chosen"]) == ("peak", fitting[-1])
    assert found["chosen"] < found["cuts"][-1]["k"]


def test_a_table_and_a_plot_are_shown(splitfleet: Command, files: Path) -> None:
    result = splitfleet("cuts", files / "narrow.keras", "--profile", "camera-256mb")
    assert result.exit_code == 0
    assert "8×8×2" in result.stdout
    assert "all of it fits into" in result.stdout
    assert "█" in result.stdout
    assert "reading" in result.stderr


def test_cuts_of_a_zoo_model_list_illegal_ones_with_the_reason(document: Document) -> None:
    found = document("cuts", "zoo:mobile", "--all")
    assert found["operations"] == len(found["cuts"]) + 1
    assert "raw input" in found["cuts"][0]["reason"]
    assert found["chosen"] is None
    assert {cut["fits"] for cut in found["cuts"]} == {None}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.keras"], "nothing.keras: cannot be read"),
        (["mobile"], "a model of the zoo is zoo:mobile"),
        (["zoo:nothing"], "it has: zoo:mobile"),
        (["zoo:fashion-mnist/nothing"], "the zoo has no model"),
        (["registry:nothing"], "the registry has no model 'nothing'"),
        (["zoo:mobile", "--unsafe"], "leave out --custom-objects"),
        (["zoo:mobile", "--ram", "1MB", "--profile", "camera-256mb"], "give one of them"),
        (["zoo:mobile", "--ram", "much"], "is not a size"),
        (["zoo:mobile", "--profile", "toaster"], "there is no profile 'toaster'"),
        (["x.keras", "--input-shape", "3,x"], "is not a shape"),
        (["x.keras", "--input-shape", "3,3", "--input-shape", "4,4"], "give one shape"),
        (["x.keras", "--custom-objects", "halve"], "is not module:attribute"),
    ],
)
def test_a_model_that_is_none_is_told(error: Told, arguments: list[str], told: str) -> None:
    assert told in error("cuts", *arguments)


def test_a_module_that_is_not_there_is_told(error: Told, files: Path) -> None:
    message = error("cuts", files / "custom.keras", "--custom-objects", "no_such_layers:Halve")
    assert "no module named 'no_such_layers'" in message
    assert "PYTHONPATH" in message


def test_layers_of_the_user_s_own_are_loaded(document: Document, files: Path) -> None:
    found = document("cuts", files / "custom.keras", "--custom-objects", "own_layers:Halve", "--all")
    assert [cut["name"] for cut in found["cuts"]] == ["halve", "first", "pool", "second", "flat"]
    assert [cut["legal"] for cut in found["cuts"]][:2] == [False, True]


def test_free_dimensions_are_fixed(document: Document, error: Told, files: Path) -> None:
    assert "--input-shape" in error("cuts", files / "free.keras")
    found = document("cuts", files / "free.keras", "--input-shape", "8,8,1")
    assert found["cuts"][0]["tensors"][0]["shape"] == [8, 8, 2]


def test_a_legacy_file_is_loaded(document: Document, files: Path) -> None:
    assert document("cuts", files / "legacy.h5")["operations"] == 5


def test_a_split_tells_what_it_made(document: Document, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = document(
        "split",
        files / "narrow.keras",
        "--ram",
        "200B",
        "--memory-model",
        "cumulative",
        "--calibration",
        files / "calibration.npz",
        "--precision",
        "int8",
        "--out",
        out,
    )
    assert made["cut"] == {"k": 2, "n": 5, "name": "pool"}
    assert (made["precision"], made["feature_bytes"], made["calibration"][-4:]) == ("int8", 32, ".npz")
    assert made["head_bytes"] == (out / "head.tflite").stat().st_size
    assert (out / "tail" / "saved_model.pb").exists()
    assert (out / "tail.tflite").exists()
    assert (made["tail_tflite"], made["tail_tflite_reason"]) == (True, "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name the cut with --cut, or the memory with --profile or --ram"),
        (["--cut", "1", "--ram", "1MB"], "one of them"),
        (["--cut", "1"], "the accuracy is at risk"),
        (["--cut", "1", "--calibration", "none.npz"], "none.npz: cannot be read (No such file"),
        (["--cut", "1", "--calibration", "random", "--precision", "int8", "--max-error", "1"], "--precision auto"),
        (["--cut", "seconds", "--calibration", "random"], "did you mean 'second' (k=3)"),
        (["--ram", "1B", "--memory-model", "cumulative", "--calibration", "random"], "never fits"),
    ],
)
def test_a_split_that_cannot_be_is_told(
    error: Told, files: Path, tmp_path: Path, arguments: list[str], told: str
) -> None:
    assert told in error("split", files / "narrow.keras", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone(error: Told, files: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in error("split", files / "narrow.keras", "--cut", "1", "--out", tmp_path)
    assert "is a file" in error("split", files / "narrow.keras", "--cut", "1", "--out", tmp_path / "notes.txt")


def test_calibration_data_of_another_shape_are_told(error: Told, files: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", picture=np.zeros((5, 4, 4, 1), np.float32))
    message = error(
        "split",
        files / "narrow.keras",
        "--cut",
        "1",
        "--calibration",
        tmp_path / "wrong.npz",
        "--out",
        tmp_path / "out",
    )
    assert "wrong.npz" in message
    assert "expected shape (samples, *[8, 8, 1])" in message


def test_a_good_bundle_is_proved(document: Document, bundle: Path, files: Path) -> None:
    found = document("verify", bundle, "--model", files / "narrow.keras", "--data", files / "validation.npz")
    assert (found["ok"], found["problems"], found["samples"]) == (True, [], 60)
    assert 0 < found["mean_abs_error"] <= found["max_abs_error"] < 0.1
    assert found["top1_agreement"] == 1.0
    assert found["tail_tflite"] == {"ok": True, "error": ""}
    assert found["runtimes"]["litert"] == {
        "ok": True,
        "version": found["runtimes"]["litert"]["version"],
        "python": sys.executable,
        "error": "",
        **{key: found[key] for key in ("max_abs_error", "mean_abs_error", "relative_error", "top1_agreement")},
    }


def test_a_bundle_is_run_without_its_model(document: Document, splitfleet: Command, bundle: Path) -> None:
    found = document("verify", bundle)
    assert (found["ok"], found["compared_with"], found["max_abs_error"]) == (True, None, None)
    assert found["runtimes"]["litert"]["ok"]
    assert "name it with --model" in splitfleet("verify", bundle).stderr


def test_a_bundle_of_another_model_falls_short(document: Document, bundle: Path, files: Path) -> None:
    found = document("verify", bundle, "--model", files / "wide.keras", exit_code=1)
    assert not found["ok"]
    assert "was made of a model with the SHA-256" in found["problems"][0]


def test_an_altered_file_falls_short_before_anything_runs(document: Document, bundle: Path, tmp_path: Path) -> None:
    altered = shutil.copytree(bundle, tmp_path / "altered")
    with (altered / "head.tflite").open("r+b") as file:
        file.seek(100)
        file.write(b"xx")
    found = document("verify", altered, exit_code=1)
    assert not found["ok"]
    assert "SHA-256" in found["problems"][0]
    assert found["runtimes"] == {}


def test_a_tail_tflite_that_is_none_falls_short(document: Document, bundle: Path, tmp_path: Path) -> None:
    """Its hash is the manifest's, so that it must be run to be found out."""
    altered = Bundle.open(shutil.copytree(bundle, tmp_path / "altered"))
    shutil.copyfile(altered.head_path, altered.tail_tflite_path)
    entry = FileEntry(
        path="tail.tflite",
        sha256=file_sha256(altered.head_path),
        size_bytes=altered.head_path.stat().st_size,
    )
    files = tuple(entry if each.path == entry.path else each for each in altered.manifest.files)
    (altered.path / "manifest.json").write_bytes(dataclasses.replace(altered.manifest, files=files).canonical())
    found = document("verify", altered.path, exit_code=1)
    assert found["problems"] == [f"{altered.tail_tflite_path}: it takes ['input_0'] instead of ['feature_0']"]
    assert found["tail_tflite"] == {"ok": False, "error": found["problems"][0]}
    assert found["runtimes"]["litert"]["ok"]


def test_a_tail_that_does_not_convert_is_told(splitfleet: Command, tmp_path: Path) -> None:
    import keras

    inputs = keras.Input((6, 4))
    series = keras.layers.Dense(3, name="each")(inputs)
    keras.Model(inputs, keras.layers.LSTM(2)(series)).save(tmp_path / "series.keras")
    command = [
        "split",
        tmp_path / "series.keras",
        "--cut",
        "each",
        "--calibration",
        "random",
        "--out",
        tmp_path / "out",
    ]
    result = splitfleet(*command, "--json")
    assert result.exit_code == 0
    made = json.loads(result.stdout)
    reason = "TensorFlow Lite cannot convert the tail: it has no kernel for TensorListReserve"
    assert (made["tail_tflite"], made["tail_tflite_reason"]) == (False, reason)
    assert f"only the engine 'tensorflow' can serve the tail, there is no tail.tflite: {reason}" in result.stderr


def test_data_of_another_shape_are_told(error: Told, bundle: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", picture=np.zeros((5, 4, 4, 1), np.float32))
    assert "expected shape (samples, *[8, 8, 1])" in error("verify", bundle, "--data", tmp_path / "wrong.npz")
    assert "no bundle" in error("verify", tmp_path)


def test_a_head_that_saturates_falls_short(document: Document, files: Path, tmp_path: Path) -> None:
    with np.load(files / "calibration.npz") as known:
        np.savez(tmp_path / "dark.npz", picture=known["picture"] / 20)
    made = document(
        "split",
        files / "narrow.keras",
        "--cut",
        "pool",
        "--calibration",
        tmp_path / "dark.npz",
        "--precision",
        "int8",
        "--out",
        tmp_path / "out",
    )
    assert made["precision"] == "int8"
    model = ("--model", files / "narrow.keras", "--data", files / "validation.npz")
    found = document("verify", tmp_path / "out", *model, exit_code=1)
    assert found["relative_error"] > 0.25
    assert "the noise of an output" in found["problems"][0]
    assert found["runtimes"]["litert"]["ok"]


def test_a_model_of_several_inputs_goes_by_their_names(
    document: Document, error: Told, files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    split = ("split", files / "pair.keras", "--cut", "mix", "--out", out, "--calibration")
    assert "expected the inputs ['left', 'right'], got ['picture']" in error(*split, files / "calibration.npz")
    document(*split, files / "pair.npz")
    found = document("verify", out, "--model", files / "pair.keras", "--data", files / "pair.npz")
    assert (found["ok"], found["samples"], found["top1_agreement"]) == (True, 20, None)
    assert "expected the inputs ['left', 'right'], got ['picture']" in error(
        "verify", out, "--data", files / "calibration.npz"
    )
