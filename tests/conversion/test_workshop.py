"""The workshop: conversions in other processes, silent, cached, and with an error where one of them dies."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import small_models

from converters import Recipe, Workshop
from edge_sdk.bundle import Bundle
from edge_sdk.errors import ConfigError, ConversionError, IllegalCutError, InvalidInputError, ModelError


def recipe(kind="chain", *, fingerprint=None, **changes):
    parts = {
        "task": "small-task",
        "model_name": kind,
        "load": functools.partial(small_models.load, kind),
        "calibration": functools.partial(small_models.samples, kind),
        "fingerprint": fingerprint,
    }
    return Recipe(**parts | changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def workshop(cache):
    with Workshop(cache, workers=1) as workshop:
        yield workshop


def test_an_outline_and_a_bundle(workshop):
    outline = workshop.outline(recipe()).result()
    assert outline.n == 9
    assert [cut.k for cut in outline.cuts] == list(range(1, 9))
    assert [operation.name for operation in outline.operations][:2] == ["rescale", "conv"]
    made = Bundle.open(workshop.build(recipe(), 6).result())
    made.verify()
    assert made.manifest.cut.name == "pool"
    assert made.manifest.model.sha256 == outline.model_sha256
    assert made.manifest.cumulative_bytes == outline.operations[5].cumulative_bytes


def test_the_same_again_is_the_same_folder(workshop):
    folder = workshop.build(recipe(), 4).result()
    inode = (folder / "manifest.json").stat().st_ino
    assert workshop.build(recipe(), 4).result() == folder
    assert (folder / "manifest.json").stat().st_ino == inode


def test_one_asked_for_twice_at_once_is_made_once(workshop):
    first, second = workshop.build(recipe("nested"), 6), workshop.build(recipe("nested"), 6)
    assert first is second
    assert first.result() == second.result()


def test_a_hit_by_fingerprint_starts_no_process(cache, workshop):
    named = recipe(fingerprint="chain-1")
    outline, folder = workshop.outline(named).result(), workshop.build(named, 6).result()
    # Its functions would fail: only what is cached can answer.
    cold = recipe(fingerprint="chain-1", load=small_models.killed, calibration=small_models.killed)
    with Workshop(cache, workers=1) as second:
        assert second.outline(cold).result() == outline
        assert second.build(cold, 6).result() == folder
        with pytest.raises(ConversionError):
            second.build(cold, 5).result()


def test_a_refusal_is_found_again_without_a_process(cache, workshop):
    """So ``auto`` does not convert each time what is no good."""
    dead = {"fingerprint": "dead-1", "calibration": small_models.dead_samples}
    named = recipe("dead", load=small_models.dead, **dead)
    with pytest.raises(ConversionError, match="cannot run") as first:
        workshop.build(named, 5).result()
    folder = workshop.build(named, 5, "auto").result()
    manifest = Bundle.open(folder).manifest
    assert (manifest.precision, manifest.precision_reason) == ("int8-weights", f"int8: {first.value.message}")
    assert str(cache) not in manifest.precision_reason
    cold = recipe("dead", load=small_models.killed, **dead)
    with Workshop(cache, workers=1) as second:
        with pytest.raises(ConversionError) as again:
            second.build(cold, 5).result()
        assert again.value.message == first.value.message
        assert second.build(cold, 5, "auto").result() == folder


def test_a_process_that_dies_is_an_error_and_the_next_job_runs(workshop):
    with pytest.raises(ConversionError, match=r"SIGKILL, as happens when memory runs out; .*about to vanish") as caught:
        workshop.outline(recipe(load=small_models.killed)).result()
    assert "about to vanish" in caught.value.details["log"]
    assert workshop.outline(recipe()).result().n == 9


def test_errors_come_through_with_what_was_printed(workshop, capfd):
    with pytest.raises(ModelError, match=r"model 'chain' .* cannot be loaded: KeyError: 'layer_7'") as caught:
        workshop.outline(recipe(load=small_models.broken)).result()
    assert "a page of complaints" in caught.value.details["log"]
    with pytest.raises(IllegalCutError, match="its cut points are 1 to 8"):
        workshop.build(recipe(), 10).result()
    with pytest.raises(InvalidInputError, match="calibration data"):
        workshop.build(recipe(calibration=dict), 3).result()
    spectrum = recipe("spectrum", load=small_models.spectrum, calibration=small_models.signal_samples)
    with pytest.raises(ConversionError, match="to int8") as caught:
        workshop.build(spectrum, 5).result()
    assert caught.value.details["log"]
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_recipe_that_cannot_travel_is_refused_at_once(workshop):
    with pytest.raises(ConfigError, match="must be importable"):
        workshop.outline(recipe(load=lambda: None))


def test_at_least_one_worker(cache):
    with pytest.raises(ConfigError, match="got 0"):
        Workshop(cache, workers=0)


def test_leaving_by_an_exception_drops_what_is_under_way(cache):
    futures = []

    def leave_early():
        with Workshop(cache, workers=1) as workshop:
            futures.extend(workshop.build(recipe("branches"), k) for k in (1, 2, 3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave_early()
    assert all(future.done() for future in futures)
    assert futures[-1].cancelled()


def test_neither_importing_nor_using_it_loads_tensorflow(cache, workshop):
    workshop.build(recipe(fingerprint="chain-2"), 6).result()
    script = (
        "import sys; from pathlib import Path; sys.path.append(sys.argv[2])\n"
        "import converters, functools, small_models\n"
        "recipe = converters.Recipe(task='small-task', model_name='chain', load=small_models.killed,\n"
        "                           calibration=small_models.killed, fingerprint='chain-2')\n"
        "with converters.Workshop(Path(sys.argv[1])) as workshop:\n"
        "    k = converters.choose_cumulative(workshop.outline(recipe).result(), 10**9).k\n"
        "    print(k, workshop.build(recipe, 6).result().name)\n"
        "assert not {'tensorflow', 'keras', 'ai_edge_litert'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(cache), str(Path(small_models.__file__).parent)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("9 ")
