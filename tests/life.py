"""The life of a run's checkpoints, in whatever kind of place: any order of events, against a dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from lib.errors import CheckpointError
from lib.run.saver import Saver
from lib.store import load, save
from lib.store.folder import committed, latest, prune, step_name, sweep
from lib.store.place import Place
from lib.store.retention import Policy, Saved, retain
from tests.checkpoints import assert_same, td
from tests.ranks import save_by_ranks

VALUES = st.integers(0, 100)
MESHES = st.sampled_from([(2,), (3,), (2, 2)])


def numbered(step: int, value: int | None = None) -> TensorDict:
    """A state of a step that shows a value, by default its step's number."""
    shown = step if value is None else value
    return td(
        step=torch.tensor(step),
        params=td(w=torch.full((3,), float(shown)), b=torch.tensor([-0.0]).bfloat16()),
        none=td(),
    )


class Life(RuleBasedStateMachine):
    """What every kind of place takes part in; each kind adds how it dies and how it is damaged.

    Attributes:
        root: the folder of checkpoints.
        good: what is committed and whole, value by step.
        damaged: steps that are committed and damaged.
    """

    root: Place

    def __init__(self) -> None:
        super().__init__()
        self.good: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.step = 0

    def at(self, step: int) -> Place:
        return self.root.child(step_name(step))

    def spoil(self, step: int, data: st.DataObject) -> None:
        """Flip a bit of the checkpoint."""
        raise NotImplementedError

    def died(self, value: int) -> None:
        """A save of the current step may have been committed before its death, whole."""
        if self.step in committed(self.root):
            self.good[self.step] = value

    @initialize(step=st.sampled_from([0, 9997, 2**40]))
    def begin(self, step: int) -> None:
        self.step = step

    @rule(value=VALUES, stride=st.integers(1, 3))
    def saves(self, value: int, stride: int) -> None:
        self.step += stride
        save(self.at(self.step), numbered(self.step, value))
        self.good[self.step] = value

    @rule(value=VALUES, other=VALUES)
    def saves_in_the_background(self, value: int, other: int) -> None:
        self.step += 1
        state = numbered(self.step, value)
        with Saver(self.root) as saver:
            saver.save(state, {})
            state["params", "w"].fill_(other)
            state["step"].fill_(0)
        self.good[self.step] = value

    @rule(value=VALUES, mesh=MESHES)
    def several_save(self, value: int, mesh: tuple[int, ...]) -> None:
        self.step += 1
        save_by_ranks(self.at(self.step), numbered(self.step, value), mesh, {"params/w": [0] * len(mesh)})
        self.good[self.step] = value

    @precondition(lambda self: self.good)
    @rule(data=st.data())
    def is_damaged(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.good)))
        self.spoil(step, data)
        del self.good[step]
        self.damaged.add(step)

    @rule(keep=st.none() | st.integers(1, 3))
    def prunes(self, keep: int | None) -> None:
        known = committed(self.root)  # damage in the data does not show without reading it
        gone = retain(list(map(Saved, known)), Policy(last=keep))
        assert set(prune(self.root, Policy(last=keep))) == gone
        self.good = {step: value for step, value in self.good.items() if step not in gone}
        self.damaged -= gone

    @rule()
    def resumes(self) -> None:
        last = max({*self.good, *self.damaged}, default=None)
        if last is None:
            assert latest(self.root) is None
        elif last in self.damaged:
            with pytest.raises(CheckpointError, match=step_name(last)):
                load(self.root)
        else:
            assert_same(load(self.root), numbered(last, self.good[last]))

    @precondition(lambda self: self.good)
    @rule()
    def resumes_older(self) -> None:
        last = max(self.good)
        assert latest(self.root, older=True) == self.at(last).where
        self.damaged = {step for step in self.damaged if step < last}

    @rule()
    def sweeps(self) -> None:
        sweep(self.root)
        left: list[Any] = [] if not self.good and not self.damaged else self.root.names()
        assert not [name for name in left if name.startswith(".")]

    @invariant()
    def every_good_one_loads(self) -> None:
        assert set(self.good) <= set(committed(self.root))
        for step, value in self.good.items():
            assert_same(load(self.at(step)), numbered(step, value))
