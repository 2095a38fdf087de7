"""Every shape of the schedule against the formulas and worked values of its source, with what was repaired at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib.config import Config, Schedule, load_config, recipe_of
from lib.config import run_reach as reach
from lib.rates import stages_of
from lib.recipe import Recipe
from lib.state import init_state
from lib.state.schedule import factor
from lib.testing.strategies import fitting
from tests.strategies import PLAIN, gradients, own, refusal, run


def at(schedule: Schedule, *updates: int) -> list[float]:
    return list(factor(torch.tensor(updates), schedule).tolist())


# Worked values of 100,000 updates, warm-up 2,000, floor 0.1 ---------------------------------------------------------------

LONG: dict[str, Any] = {"warmup": 2000, "length": 100_000, "floor": 0.1}
UPDATES = (1, 1000, 2000, 26_500, 51_000, 75_500, 90_000, 95_000, 99_999, 100_000, 100_001)
WORKED = {
    "cosine": (0.0005, 0.5, 1, 0.868198052, 0.55, 0.231801948, 0.122924914, 0.105768197, 0.1, 0.1, 0.1),
    "linear": (0.0005, 0.5, 1, 0.775, 0.55, 0.325, 0.191836735, 0.145918367, 0.100009184, 0.1, 0.1),
    "power": (0.0005, 0.5, 1, 0.274721128, 0.198029509, 0.162757692, 0.149071198, 0.145095250,
              0.141422063, 0.141421356, 0.141420649),
    # The tail of wsd divided by its own length: half of it is 1 / (0.5 / 0.1 + 0.5), and its end is the floor, where it stays.
    "wsd": (0.0005, 0.5, 1, 1, 1, 1, 1, 0.181818182, 0.100009001, 0.1, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("shape", WORKED)
def test_the_worked_values(shape: Any) -> None:
    schedule = fitting(shape=shape, **LONG, tail_shape="reciprocal" if shape == "wsd" else "linear")
    assert at(schedule, *UPDATES) == pytest.approx(list(WORKED[shape]), abs=1e-9)


def test_a_root_reaches_the_floor_and_stays_there() -> None:
    schedule = fitting(shape="power", **LONG)
    assert at(schedule, 200_000, 200_001, 10**9) == pytest.approx([0.1, 0.1, 0.1], abs=1e-12)
    assert at(schedule, 199_000)[0] > 0.1


def test_a_cosine_of_squared_progress() -> None:
    assert at(Schedule(shape="cosine", **LONG, exponent=2.0), 26_500, 51_000, 75_500) == pytest.approx(
        [0.991353, 0.868198, 0.462209], abs=1e-6
    )


def test_a_cosine_of_two_cycles_begins_each_at_the_peak_and_ends_it_at_the_floor() -> None:
    schedule = Schedule(shape="cosine", **LONG, cycles=2)
    # Cycles are counted in progress after the warm-up, so the second begins behind update 51,000 and not behind 50,000.
    assert at(schedule, 26_500, 49_999, 51_000, 51_001, 75_500, 100_000, 100_001) == pytest.approx(
        [0.55, 0.100926, 0.1, 1.0, 0.55, 0.1, 0.1], abs=1e-6
    )


def test_a_wsd_of_two_cycles() -> None:
    schedule = Schedule(shape="wsd", **LONG, cycles=2, tail_shape="reciprocal")
    assert at(schedule, 45_000, 45_001, 50_000, 50_001, 95_000, 97_500, 100_000, 10**9) == pytest.approx(
        [1.0, 1 / (1 / 5000 / 0.1 + 1 - 1 / 5000), 0.1, 1.0, 1.0, 0.181818182, 0.1, 0.1], abs=1e-9
    )


# Twelve updates of each, by formulas written apart ------------------------------------------------------------------------

W, T, M = 3, 12, 0.2


def cosine(x: float, low: float = M, high: float = 1.0) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * x)) / 2


def r(t: int) -> float:
    return (t - W) / (T - W)


def warm(t: int) -> float:
    return t / W


def late(t: int, down: int, high: float, low: float) -> float:
    return low + (high - low) * (T - t) / down


AFTER: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({}, lambda t: 1.0),
    "linear": ({}, lambda t: M + (1 - M) * (1 - r(t))),
    "polynomial": ({"exponent": 3.0}, lambda t: M + (1 - M) * (1 - r(t)) ** 3),
    "polynomial of two": ({}, lambda t: M + (1 - M) * (1 - r(t)) ** 2),
    "cosine": ({}, lambda t: cosine(r(t))),
    "half_cosine": ({}, lambda t: cosine((1 + r(t)) / 2)),
    "exponential": ({}, lambda t: M ** r(t)),
    "inverse_sqrt": ({}, lambda t: M + (1 - M) * math.sqrt(W / t)),
    "power": ({"exponent": 0.51}, lambda t: max(M, (t / W) ** -0.51)),
    "wsd": ({"tail": 0.25}, lambda t: late(t, 3, 1.0, M) if t > 9 else 1.0),
    "wsd of a tenth": ({}, lambda t: M if t >= 12 else 1.0),
    "wsd down by sqrt": (
        {"tail": 0.5, "tail_shape": "sqrt", "end": 0.0},
        lambda t: 1 - math.sqrt((t - 6) / 6) if t > 6 else 1.0,
    ),
    "wsd down by cosine": ({"tail": 0.5, "tail_shape": "cosine"}, lambda t: cosine((t - 6) / 6) if t > 6 else 1.0),
    "constant with a tail": ({"tail": 0.5, "end": 0.0}, lambda t: late(t, 6, 1.0, 0.0) if t > 6 else 1.0),
    "cosine with a tail": (
        {"tail": 0.25, "end": 0.0},
        lambda t: late(t, 3, cosine(r(9)), 0.0) if t > 9 else cosine(r(t)),
    ),
    "power with a tail": (
        {"tail": 0.25, "end": 0.0},
        lambda t: late(t, 3, math.sqrt(W / 9), 0.0) if t > 9 else math.sqrt(W / t),
    ),
    "inverse_sqrt with a tail": (
        {"tail": 0.25, "end": 0.1},
        lambda t: late(t, 3, M + (1 - M) * math.sqrt(W / 9), 0.1) if t > 9 else M + (1 - M) * math.sqrt(W / t),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER)
def test_twelve_updates_and_what_comes_after(name: str) -> None:
    settings, after = AFTER[name]
    shape: Any = name.split(maxsplit=1)[0]
    schedule = fitting(shape=shape, warmup=W, length=T, floor=M, **settings)
    peak = (1 + M) / 2 if shape == "half_cosine" else 1.0
    want = [peak * warm(t) if t <= W else after(t) for t in range(1, T + 1)]
    assert at(schedule, *range(1, T + 1)) == pytest.approx(want, rel=1e-12, abs=1e-15)
    if shape not in ("power", "inverse_sqrt") or schedule.has_tail:
        assert at(schedule, T + 1, 10**9) == [want[-1]] * 2


def test_a_range_test_rises_by_equal_factors_from_the_floor_to_the_peak() -> None:
    schedule = Schedule(shape="range", length=12, floor=1e-9)
    assert at(schedule, *range(1, 15)) == pytest.approx(
        [1e-9 ** (1 - min(t, 12) / 12) for t in range(1, 15)], rel=1e-12
    )


def test_the_warm_up_rises_from_where_it_is_told() -> None:
    assert at(Schedule(shape="constant", warmup=4, start=0.2), 1, 2, 4, 5) == pytest.approx([0.4, 0.6, 1.0, 1.0])


def test_stages_follow_each_other_without_a_jump() -> None:
    schedule = Schedule(shape="stages", stages=("linear:4:1", "constant:2", "cosine:4:0.2", "linear:2:0"))
    want = [0.25, 0.5, 0.75, 1, 1, 1, *(cosine(s / 4, 0.2) for s in (1, 2, 3, 4)), 0.1, 0, 0, 0]
    assert at(schedule, *range(1, 15)) == pytest.approx(want, abs=1e-12)
    assert at(Schedule(shape="stages", stages=("cosine:2:1",), start=0.5), 1, 2, 9) == pytest.approx([0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(shape="cosine", warmup=2, length=12, cycles=2, tail=0.25, end=0.0, exponent=2.0),
        Schedule(shape="wsd", warmup=2, length=12, cycles=2, tail=0.5, tail_shape="reciprocal"),
        Schedule(shape="power", warmup=2, tail=0.25, length=12, tail_shape="sqrt"),
        Schedule(shape="stages", stages=("linear:4:1", "constant:3", "cosine:5:0.1")),
    ],
    ids=lambda schedule: schedule.shape,
)
def test_a_compiler_takes_each_in_one_graph_with_the_same_bits(schedule: Schedule) -> None:
    updates = torch.arange(1, 20)
    traced = torch.compile(lambda u: factor(u, schedule), fullgraph=True, backend="eager")
    assert torch.equal(traced(updates), factor(updates, schedule))


# In a run --------------------------------------------------------------------------------------------------------------


def test_tokens_count_the_targets_of_each_update_this_one_included() -> None:
    schedule = Schedule(shape="linear", warmup=4, length=12, floor=0.0, counts="tokens")
    state = init_state(own(lr=1.0, schedule=schedule), params={"w": torch.tensor(1.0)})
    batches = [gradients(*({"w": 1.0},) * count) for count in (1, 3, 4, 2, 5)]  # one target a micro-batch
    state, rows = run(PLAIN, state, batches)
    assert [row["lr"].item() for row in rows] == pytest.approx(at(schedule, 1, 4, 8, 10, 15))
    assert state["scheduler", "position"].item() == 15


def test_the_length_of_a_schedule_of_tokens_is_that_of_the_run() -> None:
    small = ["batch.rows=4", "batch.length=8", "schedule.counts=tokens"]
    assert recipe_of(load_config(*small, "steps=1000")).schedule.length == 32_000
    assert recipe_of(load_config(*small, "steps=1000")).schedule.warmup == 30 * 32
    assert recipe_of(load_config(*small, "tokens=5000")).schedule.length == 5000
    grown = load_config(*small, "steps=10", 'batch.rows_at=["4:8", "20:16"]')
    assert reach(grown) == (4 * 4 + 6 * 8) * 8
    assert reach(Config()) == recipe_of(Config()).schedule.length


def test_shapes_with_a_rise_of_their_own_get_no_warm_up() -> None:
    for settings in (["schedule.shape=range"], ["schedule.shape=stages", 'schedule.stages=["linear:10:1"]']):
        assert recipe_of(load_config(*settings)).schedule.warmup == 0


def test_the_stages_of_a_schedule_name_where_each_begins_and_ends() -> None:
    schedule = Schedule(shape="stages", stages=("linear:4:1", "constant:2"), start=0.5)
    assert [tuple(stage) for stage in stages_of(schedule)] == [("linear", 4, 0.5, 1.0), ("constant", 2, 1.0, 1.0)]


# What is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "power", "warmup": 0}, "schedule.warmup=0 must be at least 1 for schedule.shape=power"),
        ({"shape": "inverse_sqrt", "warmup": 0}, "schedule.warmup=0 must be at least 1 for schedule.shape=inverse_sqrt"),
        ({"shape": "exponential", "floor": 0.0}, "schedule.floor=0 must be above 0 for schedule.shape=exponential"),
        ({"shape": "range", "floor": 0.0}, "schedule.floor=0 must be above 0 for schedule.shape=range"),
        ({"shape": "range", "warmup": 3}, "schedule.warmup=3 must be 0 for schedule.shape=range"),
        ({"shape": "wsd", "floor": 0.0, "tail_shape": "reciprocal"}, "schedule.floor=0 must be above 0 for schedule.tail_shape"),
        ({"shape": "wsd", "end": 0.0, "tail_shape": "reciprocal"}, "schedule.end=0 must be above 0 for schedule.tail_shape"),
        ({"shape": "wsd", "warmup": 8, "length": 12, "tail": 0.5}, "schedule.tail=0.5 begins at update 6, must not begin within"),
        ({"shape": "wsd", "length": 4}, "schedule.tail=0.1 must be at least one update of schedule.length=4"),
        ({"shape": "wsd", "length": 100, "cycles": 3}, "schedule.cycles=3 must divide schedule.length=100"),
        ({"shape": "linear", "tail": 0.5}, "schedule.tail=0.5 must not go with schedule.shape=linear"),
        ({"shape": "linear", "exponent": 2.0}, "schedule.exponent=2.0 must not go with schedule.shape=linear"),
        ({"shape": "linear", "cycles": 2}, "schedule.cycles=2 must not go with schedule.shape=linear"),
        ({"shape": "cosine", "end": 0.0}, "schedule.end=0.0 must go with schedule.tail"),
        ({"shape": "cosine", "tail_shape": "sqrt"}, "schedule.tail_shape=sqrt must go with schedule.tail"),
        ({"shape": "cosine", "stages": ("linear:1:1",)}, "schedule.stages=['linear:1:1'] must not go with schedule.shape=cosine"),
        ({"shape": "cosine", "start": 0.1, "warmup": 0}, "schedule.start=0.1 must go with schedule.warmup"),
        ({"shape": "stages"}, "schedule.stages=[] must name stages"),
        *(
            ({"shape": "stages", "stages": (text,)}, f"schedule.stages={text} must be SHAPE:UPDATES:TO")
            for text in ("", "linear", "linear:4", "linear:0:1", "linear:x:1", "linear:4:2", "linear:4:nan",
                         "constant:4:1", "sine:4:1", "linear:99999999999999999999:1")
        ),
    ],
)  # fmt: skip
def test_settings_that_clash_are_named(settings: dict[str, Any], message: str) -> None:
    assert refusal(Schedule, **settings).startswith(message)


@pytest.mark.parametrize(
    ("shape", "needed"),
    [("wsd", True), ("range", True), ("exponential", True), ("constant", False), ("power", False), ("inverse_sqrt", False)],
)  # fmt: skip
def test_a_length_is_asked_for_where_it_decides(shape: Any, needed: bool) -> None:
    schedule = Schedule(shape=shape)
    if needed:
        assert "schedule.length=none must be set" in refusal(Recipe, schedule=schedule)
    else:
        assert Recipe(schedule=schedule).schedule.length is None
