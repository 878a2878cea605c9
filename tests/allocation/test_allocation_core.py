"""The allocation core against a fleet that exists only as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_server.allocation.core import MAX_BROKEN_OFF, MAX_UNREACHABLE, Allocator, Outcome, OutcomeState
from cloud_server.allocation.draw import History, RandomDraw
from cloud_server.allocation.settings import Redraw, Thresholds
from cloud_server.allocation.trial import Draw, Evaluation, Failure, TrialState, shortfall

MODELS = ("a", "b", "c", "d")
LIMITS = Thresholds(min_accuracy=0.8, max_latency_ms=50.0, latency_statistic="mean")


def evaluation(accuracy: float, latency_ms: float) -> Evaluation:
    return Evaluation(
        samples=100,
        accuracy=accuracy,
        latency_samples=10,
        latency_mean_ms=latency_ms,
        latency_p50_ms=latency_ms,
        latency_p95_ms=2 * latency_ms,
        edge_ms=latency_ms / 2,
        transfer_ms=latency_ms / 4,
        cloud_ms=latency_ms / 4,
        sent_bytes=100.0,
        head_bytes=1000,
        measured_peak_bytes=2000,
    )


GOOD, INACCURATE, SLOW, BAD = (evaluation(a, ms) for a, ms in ((0.9, 20.0), (0.7, 20.0), (0.9, 80.0), (0.7, 80.0)))
NO_FIT = Failure(state=TrialState.DOES_NOT_FIT, reason="not even the first layer fits")
FAILED = Failure(state=TrialState.FAILED, reason="conversion failed")
BROKEN = Failure(state=TrialState.BROKEN_OFF, reason="no space left on the device")
GONE = Failure(state=TrialState.UNREACHABLE, reason="no progress")

Answer = Callable[[Draw], Evaluation | Failure]


@dataclass(kw_only=True)
class SimulatedFleet:
    """Plays an allocation to its end; ``online(round)`` tells who is there before each round."""

    core: Allocator
    answer: Answer
    online: Callable[[int], list[str]]
    draws: list[list[Draw]] = field(default_factory=list)

    def play(self, *, at_most: int = 1000) -> dict[str, Outcome]:
        while draws := self.core.ask(self.online(self.core.round + 1)):
            assert self.core.round <= at_most
            self.draws.append([])
            for first in draws:
                draw: Draw | None = first
                while draw is not None:
                    self.draws[-1].append(draw)
                    result = self.answer(draw)
                    self.core.tell(draw, result)
                    draw = self.core.ask_again(draw.device_id) if result == NO_FIT else None
        return self.core.outcomes()


def fleet(
    answer: Answer | Mapping[str, Evaluation | Failure],
    devices: list[str],
    *,
    redraw: Redraw = "failing",
    seed: int = 0,
    max_rounds: int | None = None,
    models: tuple[str, ...] = MODELS,
    thresholds: Thresholds = LIMITS,
) -> SimulatedFleet:
    core = Allocator(
        models=models, thresholds=thresholds, strategy=RandomDraw(seed=seed), redraw=redraw, max_rounds=max_rounds
    )
    answers = answer if callable(answer) else (lambda draw, table=dict(answer): table[draw.model])
    return SimulatedFleet(core=core, answer=answers, online=lambda _: devices)


def test_all_pass_at_once() -> None:
    played = fleet(lambda _: GOOD, ["x", "y"])
    outcomes = played.play()
    assert {device: outcome.state for device, outcome in outcomes.items()} == dict.fromkeys("xy", OutcomeState.ACCEPTED)
    assert played.core.round == 1
    assert all(len(outcome.trials) == 1 and outcome.nearest_miss is None for outcome in outcomes.values())


def test_thresholds_are_inclusive() -> None:
    outcomes = fleet(lambda _: evaluation(0.8, 50.0), ["x"]).play()
    assert outcomes["x"].state is OutcomeState.ACCEPTED


@pytest.mark.parametrize(
    ("thresholds", "accepted"),
    [
        (Thresholds(), True),
        (Thresholds(min_accuracy=0.7), True),
        (Thresholds(max_latency_ms=80.0, latency_statistic="p50"), True),
        (Thresholds(max_latency_ms=80.0, latency_statistic="p95"), False),
        (Thresholds(max_latency_ms=160.0, latency_statistic="p95"), True),
        (Thresholds(min_accuracy=0.71), False),
    ],
)
def test_each_threshold_is_optional_and_of_its_statistic(thresholds: Thresholds, accepted: bool) -> None:
    outcomes = fleet(lambda _: BAD, ["x"], models=("a",), thresholds=thresholds).play()
    assert (outcomes["x"].state is OutcomeState.ACCEPTED) == accepted


def test_a_trial_names_every_threshold_that_it_missed() -> None:
    results = {"a": BAD, "b": SLOW, "c": INACCURATE}
    outcomes = fleet(results, ["x"], models=("a", "b", "c")).play()
    by_model = {trial.draw.model: trial for trial in outcomes["x"].trials}
    assert by_model["a"].missed == ("accuracy", "latency")
    assert by_model["b"].missed == ("latency",)
    assert by_model["c"].missed == ("accuracy",)
    assert by_model["a"].reason == "accuracy 0.7000 < 0.8, mean latency 80.00 ms > 50 ms"


def test_only_those_that_fall_short_draw_anew_and_never_a_model_that_they_had() -> None:
    played = fleet(lambda draw: GOOD if draw.device_id == "x" or draw.trial == 3 else INACCURATE, ["x", "y"])
    outcomes = played.play()
    assert [[draw.device_id for draw in draws] for draws in played.draws] == [["x", "y"], ["y"], ["y"]]
    assert len({trial.draw.model for trial in outcomes["y"].trials}) == 3
    assert outcomes["y"].accepted == outcomes["y"].trials[-1]


def test_a_device_that_had_them_all_is_infeasible_with_its_nearest_miss() -> None:
    near = evaluation(0.79, 51.0)
    outcomes = fleet({"a": BAD, "b": near, "c": SLOW, "d": NO_FIT}, ["x"]).play()
    assert outcomes["x"].state is OutcomeState.INFEASIBLE
    assert outcomes["x"].nearest_miss is not None
    assert outcomes["x"].nearest_miss.draw.model == "b"


def test_no_head_fits_then_it_ends_in_one_round_without_a_miss_to_show() -> None:
    played = fleet(lambda _: NO_FIT, ["x"])
    outcomes = played.play()
    assert outcomes["x"].state is OutcomeState.INFEASIBLE
    assert outcomes["x"].nearest_miss is None
    assert played.core.round == 1
    assert len(outcomes["x"].trials) == len(MODELS)


def test_a_failed_trial_costs_its_model_only() -> None:
    outcomes = fleet(lambda draw: FAILED if draw.trial == 1 else GOOD, ["x"]).play()
    assert [trial.state for trial in outcomes["x"].trials] == [TrialState.FAILED, TrialState.ACCEPTED]


def test_a_draw_that_was_broken_off_is_repeated_and_moves_no_later_draw() -> None:
    untroubled = fleet(lambda _: SLOW, ["x"]).play()["x"]
    troubled = fleet(lambda draw: BROKEN if draw.trial in (1, 4) else SLOW, ["x"]).play()["x"]
    judged = [trial.draw.model for trial in troubled.trials if trial.state is not TrialState.BROKEN_OFF]
    assert judged == [trial.draw.model for trial in untroubled.trials]
    assert [trial.draw.trial for trial in troubled.trials] == [1, 2, 3, 4, 5, 6]
    assert troubled.trials[0].draw.model == troubled.trials[1].draw.model
    assert troubled.state is OutcomeState.INFEASIBLE


def test_a_device_whose_trials_are_broken_off_stops_drawing_and_proves_nothing() -> None:
    outcomes = fleet(lambda draw: GOOD if draw.device_id == "y" else BROKEN, ["x", "y"]).play()
    assert outcomes["x"].state is OutcomeState.FAILED
    assert len({trial.draw.model for trial in outcomes["x"].trials}) == 1
    assert len(outcomes["x"].trials) == MAX_BROKEN_OFF
    assert outcomes["y"].state is OutcomeState.ACCEPTED


def test_a_device_without_time_to_repeat_what_was_broken_off_has_failed() -> None:
    assert fleet(lambda _: BROKEN, ["x"], max_rounds=1).play()["x"].state is OutcomeState.FAILED


def test_absent_is_who_would_draw_if_it_were_online() -> None:
    played = fleet(lambda draw: {"done": GOOD, "left": SLOW, "twice": GONE}.get(draw.device_id, SLOW), [])
    played.core.expect(["never"])
    played.online = lambda number: ["done", "left", "twice"] if number == 1 else ["twice"] if number == 2 else []
    played.play()
    assert played.core.absent() == ("left",)


def test_nobody_is_absent_once_the_rounds_ran_out() -> None:
    played = fleet(lambda _: SLOW, ["x"], max_rounds=1)
    played.play()
    assert played.core.ask([]) == ()
    assert played.core.absent() == ()


def test_the_others_go_on_when_one_hangs() -> None:
    def answer(draw: Draw) -> Evaluation | Failure:
        return GONE if draw.device_id == "hung" else (GOOD if draw.trial == 4 else SLOW)

    outcomes = fleet(answer, ["hung", "x"]).play()
    assert outcomes["hung"].state is OutcomeState.UNREACHABLE
    assert len(outcomes["hung"].trials) == MAX_UNREACHABLE
    assert outcomes["x"].state is OutcomeState.ACCEPTED


def test_a_device_that_comes_back_is_taken_up_again() -> None:
    played = fleet(lambda draw: GONE if draw.trial == 1 else GOOD, ["x", "y"])
    played.answer = lambda draw: (
        (GOOD if draw.trial == 3 else SLOW) if draw.device_id == "y" else GONE if draw.trial == 1 else GOOD
    )
    played.online = lambda number: ["y"] if number == 2 else ["x", "y"]
    outcomes = played.play()
    assert [draw.device_id for draw in played.draws[1]] == ["y"]
    assert outcomes["x"].state is OutcomeState.ACCEPTED


def test_a_device_that_left_before_it_was_done_is_unreachable() -> None:
    played = fleet(lambda _: SLOW, ["x"])
    played.online = lambda number: ["x"] if number == 1 else []
    assert played.play()["x"].state is OutcomeState.UNREACHABLE


def test_an_accepted_device_may_leave() -> None:
    played = fleet(lambda _: GOOD, ["x"])
    played.online = lambda number: ["x"] if number == 1 else []
    assert played.play()["x"].state is OutcomeState.ACCEPTED


def test_an_expected_device_that_never_came_is_unreachable() -> None:
    played = fleet(lambda _: GOOD, ["x"])
    played.core.expect(["x", "absent"])
    outcomes = played.play()
    assert outcomes["absent"].state is OutcomeState.UNREACHABLE
    assert outcomes["absent"].trials == ()


def test_one_that_joins_late_is_taken_up_in_the_next_round() -> None:
    played = fleet(lambda _: GOOD, [])
    played.online = lambda number: ["x"] if number == 1 else ["late", "x"]
    outcomes = played.play()
    assert [[draw.device_id for draw in draws] for draws in played.draws] == [["x"], ["late"]]
    assert outcomes["late"].state is OutcomeState.ACCEPTED


def test_when_the_rounds_run_out_a_device_is_undecided() -> None:
    outcomes = fleet(lambda _: SLOW, ["x"], max_rounds=2).play()
    assert outcomes["x"].state is OutcomeState.UNDECIDED
    assert len(outcomes["x"].trials) == 2
    assert outcomes["x"].nearest_miss is not None


class TestWorst:
    def test_the_least_accurate_and_the_slowest_draw(self) -> None:
        first = {
            "u": evaluation(0.75, 10.0),
            "v": evaluation(0.60, 60.0),
            "w": evaluation(0.90, 90.0),
            "x": GOOD,
        }
        played = fleet(lambda draw: first[draw.device_id] if draw.trial == 1 else GOOD, sorted(first), redraw="worst")
        outcomes = played.play()
        assert [[draw.device_id for draw in draws] for draws in played.draws] == [
            ["u", "v", "w", "x"],
            ["v", "w"],
            ["u"],
        ]
        assert all(outcome.state is OutcomeState.ACCEPTED for outcome in outcomes.values())

    def test_they_may_be_one_device(self) -> None:
        first = {"u": evaluation(0.75, 60.0), "v": evaluation(0.60, 90.0)}
        played = fleet(lambda draw: first[draw.device_id] if draw.trial == 1 else GOOD, ["u", "v"], redraw="worst")
        played.play()
        assert [[draw.device_id for draw in draws] for draws in played.draws[1:]] == [["v"], ["u"]]

    def test_one_without_an_evaluation_draws_too(self) -> None:
        first = {"u": FAILED, "v": evaluation(0.6, 10.0), "w": evaluation(0.7, 10.0)}
        played = fleet(lambda draw: first[draw.device_id] if draw.trial == 1 else GOOD, list("uvw"), redraw="worst")
        played.play()
        assert [draw.device_id for draw in played.draws[1]] == ["u", "v"]

    def test_one_that_had_them_all_does_not_block_the_others(self) -> None:
        played = fleet(
            lambda draw: evaluation(0.1, 10.0) if draw.device_id == "u" else GOOD if draw.trial == 2 else INACCURATE,
            ["u", "v"],
            redraw="worst",
        )
        outcomes = played.play()
        assert outcomes["u"].state is OutcomeState.INFEASIBLE
        assert outcomes["v"].state is OutcomeState.ACCEPTED


def test_misuse_is_told() -> None:
    core = fleet(lambda _: GOOD, ["x"]).core
    (draw,) = core.ask(["x"])
    with pytest.raises(RuntimeError, match="were not told: x"):
        core.ask(["x"])
    with pytest.raises(RuntimeError, match="was not told"):
        core.ask_again("x")
    core.tell(draw, GOOD)
    with pytest.raises(RuntimeError, match="not the open draw"):
        core.tell(draw, GOOD)


def test_a_strategy_is_held_to_the_models_that_are_left() -> None:
    class Stubborn:
        def choose(self, history: History) -> str:  # noqa: ARG002
            return "a"

    core = Allocator(models=MODELS, thresholds=LIMITS, strategy=Stubborn())
    (draw,) = core.ask(["x"])
    core.tell(draw, SLOW)
    with pytest.raises(RuntimeError, match="chose 'a'"):
        core.ask(["x"])


def test_shortfall_is_relative_to_each_threshold() -> None:
    assert shortfall(evaluation(0.72, 60.0), LIMITS) == pytest.approx(0.1 + 0.2)
    assert shortfall(GOOD, LIMITS) == 0.0
    assert shortfall(BAD, Thresholds(min_accuracy=0.0)) == 0.0


def test_draws_are_spread_over_the_models() -> None:
    devices = [f"device-{number}" for number in range(400)]
    played = fleet(lambda _: GOOD, devices)
    played.play()
    counts = [sum(draw.model == model for draw in played.draws[0]) for model in MODELS]
    assert min(counts) > 60


results = st.sampled_from([GOOD, INACCURATE, SLOW, BAD, NO_FIT, FAILED, BROKEN, GONE])
device_ids = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=5, unique=True)


@given(data=st.data(), devices=device_ids, redraw=st.sampled_from(["failing", "worst"]), seed=st.integers())
def test_any_fleet_ends_and_never_repeats_a_model(
    data: st.DataObject, devices: list[str], redraw: Redraw, seed: int
) -> None:
    script = {
        (device, model): data.draw(results, label=f"{device!r} {model}") for device in devices for model in MODELS
    }
    presence = data.draw(st.lists(st.lists(st.sampled_from(devices)), max_size=6), label="who is online, by round")
    played = fleet(lambda draw: script[draw.device_id, draw.model], devices, redraw=redraw, seed=seed)
    played.online = lambda number: presence[number - 1] if number <= len(presence) else devices
    outcomes = played.play(at_most=len(devices) * len(MODELS) * MAX_BROKEN_OFF)
    for device, outcome in outcomes.items():
        models = [trial.draw.model for trial in outcome.trials if trial.state is not TrialState.BROKEN_OFF]
        assert len(set(models)) == len(models)
        assert [trial.draw.trial for trial in outcome.trials] == list(range(1, len(outcome.trials) + 1))
        accepted = [trial for trial in outcome.trials if trial.state is TrialState.ACCEPTED]
        assert accepted == ([outcome.accepted] if outcome.accepted else [])
        assert (outcome.state is OutcomeState.ACCEPTED) == bool(accepted)
        if outcome.state is OutcomeState.INFEASIBLE:
            assert len(models) == len(MODELS)
            assert GOOD not in [script[device, model] for model in models]
        assert outcome.state is not OutcomeState.UNDECIDED  # that is for rounds that run out


@given(
    devices=device_ids,
    redraw=st.sampled_from(["failing", "worst"]),
    seed=st.integers(),
    data=st.data(),
)
def test_the_order_of_registration_decides_nothing(
    devices: list[str], redraw: Redraw, seed: int, data: st.DataObject
) -> None:
    script = {(device, model): data.draw(results) for device in devices for model in MODELS}
    shuffled = data.draw(st.permutations(devices))
    models = tuple(data.draw(st.permutations(MODELS)))

    def outcome(order: list[str], models: tuple[str, ...]) -> dict[str, Outcome]:
        answer = lambda draw: script[draw.device_id, draw.model]  # noqa: E731
        return fleet(answer, order, redraw=redraw, seed=seed, models=models).play()

    assert outcome(devices, MODELS) == outcome(shuffled, models)


@given(devices=device_ids, seed=st.integers())
def test_a_draw_does_not_depend_on_who_else_is_there(devices: list[str], seed: int) -> None:
    together = fleet(lambda _: SLOW, devices, seed=seed).play()
    for device in devices:
        alone = fleet(lambda _: SLOW, [device], seed=seed).play()
        assert alone[device].trials == together[device].trials


@given(devices=device_ids, redraw=st.sampled_from(["failing", "worst"]), seed=st.integers())
def test_where_all_pass_all_are_accepted_in_the_first_round(devices: list[str], redraw: Redraw, seed: int) -> None:
    played = fleet(lambda _: GOOD, devices, redraw=redraw, seed=seed)
    assert all(outcome.state is OutcomeState.ACCEPTED for outcome in played.play().values())
    assert played.core.round == 1
