"""What holds for checkpoints in an object store: no request, lost or late, costs a committed state; no damage passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from lib.errors import CheckpointError
from lib.store import bucket, load, save
from lib.store.bucket import Bucket
from lib.store.folder import committed, latest, prune, step_name, sweep
from lib.store.retention import Policy
from tests.checkpoints import assert_same, td
from tests.faults import Crash, Objects, in_order
from tests.life import VALUES, Life, numbered


@pytest.fixture(autouse=True)
def _one_request_at_a_time() -> Iterator[None]:
    with in_order():
        yield


def at(objects: Objects, step: int) -> Bucket:
    return objects.bucket().child(step_name(step))


def requests(objects: Objects, act: Callable[[], Any]) -> int:
    """Count the requests of an action that write."""
    objects.recover()
    act()
    return 10**9 - objects.left


def after(prepare: Callable[[Objects], None]) -> Objects:
    objects = Objects()
    prepare(objects)
    return objects


def two(objects: Objects) -> None:
    save(at(objects, 1), numbered(1))
    save(at(objects, 2), numbered(2))


def one_and_a_rest(objects: Objects) -> None:
    save(at(objects, 1), numbered(1))
    save(at(objects, 3), numbered(7))
    del objects.kept[f"{at(objects, 3).root}/COMMIT"]


@pytest.mark.parametrize("arrives", [False, True], ids=["the last request is lost", "the last request arrives"])
@pytest.mark.parametrize("prepare", [two, one_and_a_rest])
def test_a_save_that_dies_at_any_request_costs_at_most_itself(
    arrives: bool, prepare: Callable[[Objects], None]
) -> None:
    objects = after(prepare)
    total = requests(objects, lambda: save(at(objects, 3), numbered(3)))
    assert total > 10
    before, outcomes = committed(after(prepare).bucket()), set()
    for request in range(1, total + 1):
        objects = after(prepare)
        objects.fail_at(request, arrives=arrives)
        with pytest.raises(Crash):
            save(at(objects, 3), numbered(3))
        objects.recover()
        steps = committed(objects.bucket())
        assert steps in (before, [*before, 3])
        outcomes.add(tuple(steps))
        assert_same(load(objects.bucket()), numbered(steps[-1]))
        save(at(objects, 3), numbered(3))
        assert_same(load(objects.bucket()), numbered(3))
        sweep(objects.bucket())
        assert {key.split("/")[2] for key in objects.kept} == {step_name(step) for step in [*before, 3]}
    assert outcomes == ({tuple(before), (*before, 3)} if arrives else {tuple(before)})


@pytest.mark.parametrize("arrives", [False, True])
def test_pruning_that_dies_at_any_request_spares_the_newest_and_leaves_nothing_half(arrives: bool) -> None:
    def prepare(objects: Objects) -> None:
        two(objects)
        save(at(objects, 3), numbered(3))

    objects = after(prepare)
    total = requests(objects, lambda: prune(objects.bucket(), Policy(last=1)))
    for request in range(1, total + 1):
        objects = after(prepare)
        objects.fail_at(request, arrives=arrives)
        with pytest.raises(Crash):
            prune(objects.bucket(), Policy(last=1))
        objects.recover()
        for step in committed(objects.bucket()):
            assert_same(load(at(objects, step)), numbered(step))
        assert committed(objects.bucket())[-1] == 3
        prune(objects.bucket(), Policy(last=1))
        sweep(objects.bucket())
        assert {key.split("/")[2] for key in objects.kept} == {step_name(3)}


def test_setting_aside_that_dies_at_any_request_can_be_done_again() -> None:
    def prepare(objects: Objects) -> None:
        two(objects)
        objects.kept[f"{at(objects, 2).root}/step/c"] = b"spoilt"

    objects = after(prepare)
    total = requests(objects, lambda: latest(objects.bucket(), older=True))
    assert total == 2
    for request in (1, 2):
        objects = after(prepare)
        objects.fail_at(request, arrives=True)
        with pytest.raises(Crash):
            latest(objects.bucket(), older=True)
        objects.recover()
        assert latest(objects.bucket(), older=True) == str(at(objects, 1))
        sweep(objects.bucket())
        assert f"{at(objects, 2).root}/DAMAGED" in objects.kept  # set aside, not deleted
        assert f"{at(objects, 2).root}/params/w/c.0" in objects.kept
        assert committed(objects.bucket()) == [1]


def test_no_flipped_cut_missing_or_extra_object_passes() -> None:
    objects = Objects()
    save(at(objects, 1), numbered(1))
    good = dict(objects.kept)
    for key, data in good.items():
        spoilt: list[bytes | None] = [None, b"", data[:-1], data + b"\0", data[1:]]
        for place in range(len(data)):
            flipped = bytearray(data)
            flipped[place] ^= 1 << (place % 8)
            spoilt.append(bytes(flipped))
        for each in spoilt:
            objects.kept = {**good, key: each} if each is not None else {k: v for k, v in good.items() if k != key}
            with pytest.raises(CheckpointError) as caught:
                load(at(objects, 1))
            leaf = key.removeprefix(f"{at(objects, 1).root}/").split("/c")[0].removesuffix("/zarr.json")
            if leaf not in ("COMMIT", "manifest.json", "zarr.json"):
                assert f"state.{leaf.replace('/', '.')}" in str(caught.value), (key, str(caught.value))
    objects.kept = {**good, f"{at(objects, 1).root}/params/more": b"x"}
    with pytest.raises(CheckpointError, match="params/more .state.params. is unexpected"):
        load(at(objects, 1))
    objects.kept = good
    assert_same(load(at(objects, 1)), numbered(1))


PASSING = (OSError(5, "Input/output error"), TimeoutError("slow"), ConnectionResetError("reset"), RuntimeError("503"))


@given(st.lists(st.sampled_from(PASSING), max_size=bucket.TRIES - 1))
def test_failures_that_pass_are_tried_again(errors: list[Exception]) -> None:
    objects = Objects()
    save(at(objects, 1), numbered(1))
    objects.errors = list(errors)
    assert_same(load(at(objects, 1)), numbered(1))
    objects.errors = list(errors)
    save(at(objects, 2), numbered(2))
    assert committed(objects.bucket()) == [1, 2]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device"), "not saved (No space left on device)"),
        (PermissionError(13, "Permission denied"), "not saved (Permission denied)"),
        (
            RuntimeError("SlowDown: Please reduce\nyour request rate"),
            "not saved (SlowDown: Please reduce your request rate)",
        ),
    ],
)
def test_failures_that_last_end_the_save_and_cost_nothing(error: Exception, why: str) -> None:
    failed = 0
    for good in range(1, 100):  # requests that are answered before it begins
        objects = Objects()
        save(at(objects, 1), numbered(1))
        left = [good]

        def answer(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objects, "_answers", answer)
            try:
                save(at(objects, 2), numbered(2))
            except CheckpointError as caught:
                told, failed = str(caught), failed + 1
            else:
                break
        assert why in told
        assert "\n" not in told
        assert committed(objects.bucket()) == [1]
        save(at(objects, 2), numbered(2))
        assert_same(load(objects.bucket()), numbered(2))
    assert failed > 8


def test_what_is_not_ours_is_never_swept() -> None:
    objects = Objects()
    save(at(objects, 1), numbered(1))
    foreign = {
        f"{objects.bucket().root}/step_5/model.pt": b"precious",
        f"{objects.bucket().root}/step_6/zarr.json": b'{"zarr_format": 3, "node_type": "group", "attributes": {}}',
        f"{objects.bucket().root}/notes/a": b"precious",
    }
    objects.kept |= foreign
    assert sweep(objects.bucket()) == []
    assert foreign.items() <= objects.kept.items()


def test_slow_answers_change_nothing() -> None:
    objects = Objects()
    objects.delay_s = 0.002
    save(at(objects, 1), numbered(1))
    assert_same(load(at(objects, 1)), numbered(1))


def test_large_leaves_go_part_by_part_and_only_what_is_needed_comes_back() -> None:
    objects = Objects()
    state = td(w=torch.arange(6 << 20, dtype=torch.float32).view(6, -1), small=torch.ones(2))
    save(at(objects, 1), state)
    assert max(map(len, objects.kept.values())) > bucket.PART_BYTES
    assert_same(load(at(objects, 1)), state)
    asked: list[str] = []
    real = objects.cat_file

    def counted(path: str, start: int | None = None, end: int | None = None) -> bytes:
        asked.append(path)
        return real(path, start, end)

    objects.cat_file = counted  # type: ignore[method-assign]
    assert_same(load(at(objects, 1), keys=["small"]), td(small=torch.ones(2)))
    assert not [path for path in asked if "/w/c" in path]


class InBucket(Life):
    """An object store whose requests may be the last, and may be answered with errors that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects()
        self.root = self.objects.bucket()

    def spoil(self, step: int, data: st.DataObject) -> None:
        keys = sorted(key for key in self.objects.kept if key.startswith(f"{at(self.objects, step).root}/"))
        key = data.draw(st.sampled_from(keys))
        spoilt = bytearray(self.objects.kept[key])
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] ^= 1
        self.objects.kept[key] = bytes(spoilt)

    @rule(value=VALUES, request=st.integers(1, 16), arrives=st.booleans(), again=st.booleans())
    def dies_while_saving(self, value: int, request: int, arrives: bool, again: bool) -> None:
        self.step += 1
        self.objects.fail_at(request, arrives=arrives)
        with contextlib.suppress(Crash):
            save(self.at(self.step), numbered(self.step, value))
        self.objects.recover()
        if again:
            save(self.at(self.step), numbered(self.step, value))
        self.died(value)

    @rule(errors=st.lists(st.sampled_from(PASSING), min_size=1, max_size=3), value=VALUES)
    def saves_though_answered_with_errors(self, errors: list[Exception], value: int) -> None:
        self.step += 1
        self.objects.errors = list(errors)
        save(self.at(self.step), numbered(self.step, value))
        assert self.objects.errors == []
        self.good[self.step] = value


TestLife = InBucket.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=12)
