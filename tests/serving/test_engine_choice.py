"""Which engine runs a tail: what is asked for, else the fastest that agrees; what was found out is remembered."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from cloud_server.engines import choice, race
from cloud_server.engines.choice import EngineChooser
from cloud_server.engines.race import Entrant, Finish, speedup, winner
from cloud_server.engines.results import Result, Results
from edge_sdk.errors import BundleError, ConversionError

TENSORFLOW = Entrant(engine="tensorflow", threads=2)
LITERT_1 = Entrant(engine="litert", threads=1)
LITERT_2 = Entrant(engine="litert", threads=2)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(choice, "engine_threads", lambda: 2)


@pytest.fixture
def bundle(make_bundle, saved_models, tail_tflites):
    return make_bundle(tail=saved_models["good"], tail_tflite=tail_tflites["good"])


def finish(entrant, *seconds, error=""):
    return Finish(entrant=entrant, seconds=dict(zip((1, 32), seconds, strict=False)), error=error)


class FakeTrack:
    """Races that end as the test says, and are counted."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.asked = []

    def race(self, folder, entrants, batches):
        self.asked.append((folder, list(entrants), list(batches)))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def close(self):
        pass


@pytest.fixture
def chooser(tmp_path):
    """A chooser whose races end with ``outcome``."""

    def make(outcome=None, *, engine="auto", batches=(1, 32), path=tmp_path / "home" / "engines.json"):
        made = EngineChooser(engine, batches, path)
        made._track = FakeTrack(outcome)
        return made

    return make


LITERT_WINS = [finish(TENSORFLOW, 0.004, 0.04), finish(LITERT_1, 0.001, 0.01), finish(LITERT_2, 0.001, 0.01)]


class TestWinner:
    @pytest.mark.parametrize(
        ("others", "entrant"),
        [
            ([finish(LITERT_1, 2.0, 2.0)], TENSORFLOW),
            ([finish(LITERT_1, 1.0, 1.0)], TENSORFLOW),
            ([finish(LITERT_1, 0.9, 0.9)], LITERT_1),
            # Over all batch sizes: once three times as fast, once half as fast.
            ([finish(LITERT_1, 1 / 3, 2.0)], LITERT_1),
            ([finish(LITERT_1, 1 / 2, 3.0)], TENSORFLOW),
            # A second thread must gain enough.
            ([finish(LITERT_1, 0.9, 0.9), finish(LITERT_2, 0.8, 0.8)], LITERT_1),
            ([finish(LITERT_1, 0.9, 0.9), finish(LITERT_2, 0.5, 0.5)], LITERT_2),
            ([finish(LITERT_1, 2.0, 2.0), finish(LITERT_2, 0.9, 0.9)], LITERT_2),
            # However fast: it computes something else.
            ([finish(LITERT_1, error="its outputs differ"), finish(LITERT_2, 0.9, 0.9)], LITERT_2),
            ([finish(LITERT_1, error="its outputs differ"), finish(LITERT_2, error="it crashed")], TENSORFLOW),
        ],
    )
    def test_is_the_fastest_that_agrees(self, others, entrant):
        assert winner([finish(TENSORFLOW, 1.0, 1.0), *others]).entrant == entrant

    def test_speed_is_the_geometric_mean(self):
        assert speedup(finish(TENSORFLOW, 2.0, 9.0), finish(LITERT_1, 1.0, 2.0)) == pytest.approx(3.0)


class TestChooser:
    def test_loads_the_winner_and_says_why(self, chooser, bundle):
        auto = chooser(LITERT_WINS)
        engine = auto.load(bundle)
        assert (engine.name, engine.threads, engine._most) == ("litert", 1, 32)
        assert engine.reason == (
            "4.0 times as fast as tensorflow on 2 threads; batches of 1 and 32: tensorflow on 2 threads: 4 ms, 40 ms; "
            "litert on 1 thread: 1 ms, 10 ms; litert on 2 threads: 1 ms, 10 ms"
        )
        assert auto._track.asked == [(bundle.path, [TENSORFLOW, LITERT_1, LITERT_2], [1, 32])]

    def test_keeps_the_reference_where_nothing_that_agrees_is_faster(self, chooser, bundle, caplog):
        refused = finish(LITERT_1, error="its outputs differ by 0.5 of their largest value")
        engine = chooser([finish(TENSORFLOW, 0.004, 0.04), refused, finish(LITERT_2, 0.005, 0.05)]).load(bundle)
        assert engine.name == "tensorflow"
        assert engine.reason.startswith("nothing that computes the same is faster; batches of 1 and 32: ")
        assert "litert on 1 thread is not taken: its outputs differ by 0.5 of their largest value" in caplog.text

    def test_says_where_the_figures_were_reckoned(self, chooser, bundle):
        outcome = [
            Finish(entrant=TENSORFLOW, seconds={1: 0.004}, reckoned=True),
            Finish(entrant=LITERT_1, seconds={1: 0.001}, reckoned=True),
        ]
        assert "batches of 1, reckoned on a busy machine: " in chooser(outcome, batches=[1]).load(bundle).reason

    def test_does_not_race_what_has_nothing_to_race_with(self, chooser, make_bundle, saved_models):
        auto = chooser(AssertionError("no race"))
        engine = auto.load(make_bundle(tail=saved_models["good"], tail_tflite_reason="no kernel for this"))
        assert (engine.name, engine.reason) == ("tensorflow", "the bundle has no tail.tflite: no kernel for this")
        assert auto._track.asked == []

    def test_takes_the_reference_where_the_race_crashes_and_tries_again_next_time(self, chooser, bundle, caplog):
        auto = chooser(ConversionError("the worker process was ended by SIGSEGV", died=True))
        engine = auto.load(bundle)
        assert (engine.name, engine.reason) == (
            "tensorflow",
            "the race failed: the worker process was ended by SIGSEGV",
        )
        assert "the race of its engines failed" in caplog.text
        auto.load(bundle)
        assert len(auto._track.asked) == 2

    def test_says_what_is_wrong_with_the_bundle(self, chooser, bundle):
        with pytest.raises(BundleError, match="no such graph"):
            chooser(BundleError("no such graph")).load(bundle)

    def test_takes_the_engine_that_is_asked_for(self, chooser, bundle):
        forced = chooser(AssertionError("no race"), engine="tensorflow")
        engine = forced.load(bundle)
        assert (engine.name, engine.reason) == ("tensorflow", "it was asked for")

    def test_races_only_threads_where_litert_is_asked_for(self, chooser, bundle):
        forced = chooser([finish(LITERT_1, 0.004, 0.04), finish(LITERT_2, 0.002, 0.02)], engine="litert")
        engine = forced.load(bundle)
        assert (engine.name, engine.threads) == ("litert", 2)
        assert forced._track.asked == [(bundle.path, [LITERT_1, LITERT_2], [1, 32])]

    def test_refuses_an_engine_that_the_bundle_does_not_offer(self, chooser, make_bundle):
        bundle = make_bundle(tail_tflite_reason="no kernel for this")
        with pytest.raises(
            BundleError,
            match=r"cannot be served with --engine litert: the bundle has no tail\.tflite: no kernel for this; "
            "serve it with --engine auto or tensorflow",
        ):
            chooser(engine="litert").load(bundle)


class TestMemory:
    def test_a_second_load_is_no_race(self, chooser, bundle):
        chooser(LITERT_WINS).load(bundle)
        again = chooser(AssertionError("no race"))
        engine = again.load(bundle)
        assert (engine.name, engine.threads) == ("litert", 1)
        assert engine.reason.startswith("4.0 times as fast as tensorflow")
        assert engine.reason.endswith("; remembered")
        assert again._track.asked == []

    @pytest.mark.parametrize("changed", ["bundle", "batches", "cores", "processor", "gpus", "version"])
    def test_another_machine_or_bundle_races_anew(
        self, chooser, bundle, make_bundle, saved_models, tail_tflites, monkeypatch, changed
    ):
        chooser(LITERT_WINS).load(bundle)
        batches = (1, 8) if changed == "batches" else (1, 32)
        if changed == "bundle":
            bundle = make_bundle("another", tail=saved_models["good"], tail_tflite=tail_tflites["good"])
        if changed == "cores":
            monkeypatch.setattr(choice, "engine_threads", lambda: 4)
        if changed in ("processor", "gpus"):
            monkeypatch.setattr(choice, f"_{changed}", lambda: "another")
        if changed == "version":
            monkeypatch.setattr(choice, "_version", lambda library: f"{library} 99")
        again = chooser([finish(TENSORFLOW, 0.001, 0.01), finish(LITERT_1, 0.004, 0.04)], batches=batches)
        if changed == "cores":
            again._track.outcome[0] = finish(Entrant(engine="tensorflow", threads=4), 0.001, 0.01)
        assert again.load(bundle).name == "tensorflow"
        assert len(again._track.asked) == 1

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "null", '{"version": 1}', '{"version": 1, "results": []}', '{"version": 2, "results": {}}'],
    )
    def test_a_file_that_cannot_be_read_counts_as_empty_and_is_written_anew(self, chooser, bundle, tmp_path, text):
        path = tmp_path / "engines.json"
        path.write_text(text)
        assert chooser(LITERT_WINS, path=path).load(bundle).name == "litert"
        document = json.loads(path.read_text())
        (entry,) = document["results"].values()
        assert (entry["engine"], entry["threads"], entry["facts"]["bundle"]) == ("litert", 1, bundle.digest)
        assert chooser(AssertionError("no race"), path=path).load(bundle).name == "litert"

    @pytest.mark.parametrize("entry", [None, 7, {}, {"engine": "openvino", "threads": 1, "reason": ""}])
    def test_an_entry_that_is_none_is_found_out_anew(self, chooser, bundle, tmp_path, entry):
        path = tmp_path / "engines.json"
        chooser(LITERT_WINS, path=path).load(bundle)
        document = json.loads(path.read_text())
        document["results"] = dict.fromkeys(document["results"], entry)
        path.write_text(json.dumps(document))
        again = chooser(LITERT_WINS, path=path)
        assert again.load(bundle).name == "litert"
        assert len(again._track.asked) == 1

    def test_the_file_changes_by_one_rename(self, tmp_path, monkeypatch):
        results = Results(path=tmp_path / "engines.json")
        result = Result(engine="litert", threads=1, reason="fast")
        results.put({"bundle": "a"}, result)
        before = results.path.read_text()
        whole = []

        def replace(self, target):
            whole.append(json.loads(self.read_text()))
            assert target.read_text() == before
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", replace)
        results.put({"bundle": "b"}, result)
        assert len(whole[0]["results"]) == 2
        assert results.path.read_text() == before
        assert [path.name for path in tmp_path.iterdir()] == ["engines.json"]

    def test_the_oldest_results_go(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cloud_server.engines.results._MOST_RESULTS", 3)
        results = Results(path=tmp_path / "engines.json")
        for bundle in "abcbd":
            results.put({"bundle": bundle}, Result(engine="litert", threads=1, reason=bundle))
        assert [results.get({"bundle": bundle}) is not None for bundle in "abcd"] == [False, True, True, True]

    def test_where_nothing_can_be_written_it_races_each_time(self, chooser, bundle, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        auto = chooser(LITERT_WINS, path=tmp_path / "file" / "engines.json")
        assert [auto.load(bundle).name, auto.load(bundle).name] == ["litert", "litert"]
        assert len(auto._track.asked) == 2
        assert "cannot be kept there" in caplog.text


class TestRace:
    """Real engines, in this process."""

    @pytest.fixture(autouse=True)
    def as_important_as_before(self, monkeypatch):
        monkeypatch.setattr(os, "nice", lambda _: 0)

    def test_who_agrees_has_a_time_for_each_batch_size(self, bundle):
        finishes = race.race(bundle.path, [TENSORFLOW, LITERT_1, LITERT_2], [1, 5])
        assert [each.entrant for each in finishes] == [TENSORFLOW, LITERT_1, LITERT_2]
        assert all(each.error == "" for each in finishes)
        assert all(set(each.seconds) == {1, 5} and min(each.seconds.values()) > 0 for each in finishes)

    def test_who_computes_something_else_is_out(self, make_bundle, saved_models, tail_tflites):
        bundle = make_bundle(tail=saved_models["good"], tail_tflite=tail_tflites["wrong"])
        reference, other = race.race(bundle.path, [TENSORFLOW, LITERT_1], [1, 5])
        assert set(reference.seconds) == {1, 5}
        assert other.error.startswith("its outputs differ by 1 of their largest value")
        assert other.seconds == {}

    def test_who_cannot_be_loaded_is_out(self, make_bundle, saved_models):
        bundle = make_bundle(tail=saved_models["good"], tail_tflite=b"nothing")
        _, other = race.race(bundle.path, [TENSORFLOW, LITERT_1], [1])
        assert "cannot load it" in other.error

    def test_a_reference_that_cannot_be_loaded_is_an_error(self, make_bundle, tail_tflites):
        bundle = make_bundle(tail={"saved_model.pb": b"not a graph"}, tail_tflite=tail_tflites["good"])
        with pytest.raises(BundleError, match="cannot load this SavedModel"):
            race.race(bundle.path, [TENSORFLOW, LITERT_1], [1])

    @pytest.mark.parametrize(
        ("took", "cpu", "reckoned"), [(0.010, 0.010, False), (0.012, 0.010, False), (0.040, 0.010, True)]
    )
    def test_on_a_busy_machine_cpu_time_decides(self, took, cpu, reckoned):
        timing = race._Timing(took_s=took, cpu_s=cpu)
        assert timing.held_up is reckoned
        assert timing.seconds(LITERT_2, True) == cpu / 2
        assert timing.seconds(LITERT_2, False) == took
        # Not worth sharing.
        assert race._Timing(took_s=1.0, cpu_s=0.0001).seconds(LITERT_2, True) == 0.0001


def never_end(*_):
    time.sleep(600)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_whole_way_in_a_process_of_its_own(make_bundle, saved_models, tail_tflites, tmp_path, monkeypatch):
    """One that agrees, one that does not, a crash, and a race that never ends."""
    good = make_bundle("good", tail=saved_models["good"], tail_tflite=tail_tflites["good"])
    wrong = make_bundle("wrong", tail=saved_models["good"], tail_tflite=tail_tflites["wrong"])
    auto = EngineChooser("auto", (1, 2), tmp_path / "engines.json")
    try:
        engine = auto.load(wrong)
        assert engine.name == "tensorflow"
        assert "litert on 1 thread: its outputs differ by 1 of their largest value" in engine.reason
        engine = auto.load(good)
        # Whichever was faster: it computes what it should.
        outputs = engine.run({"feature_0": np.full((1, 2, 3), 13, np.int8)})["output_0"]
        np.testing.assert_allclose(outputs, np.ones((1, 6)), rtol=1e-6)
        monkeypatch.setattr(choice, "race", die)
        crashed = make_bundle("crashed", tail=saved_models["good"], tail_tflite=tail_tflites["good"])
        assert auto.load(crashed).reason.startswith("the race failed: the worker process was ended by SIGKILL")
        # What is remembered needs no process.
        assert auto.load(good).reason.count("batches of 1 and 2") == 1
        assert auto._track._worker is None
        monkeypatch.setattr(choice, "race", never_end)
        monkeypatch.setattr(choice, "_RACE_PATIENCE_S", 0.5)
        assert auto.load(crashed).reason == "the race failed: it took longer than 0.5 s"
        assert auto._track._worker is None
    finally:
        auto.close()
