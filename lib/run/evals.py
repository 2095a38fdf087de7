"""Held-out loss: of the state at hand while it trains, and of the newest checkpoint as the verb `eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDict

from lib.data.batch import heldout_batches
from lib.data.plan import plan_of
from lib.errors import DataError
from lib.metrics import as_row, merge
from lib.run.launch import Launch
from lib.run.newest import newest_state
from lib.run.progress import Progress
from lib.run.reading import check_same, find_text, open_text
from lib.run.signals import Signals
from lib.state.average import mean_of
from lib.step import eval_step
from lib.tree import plain, tensordict

__all__ = ["EVAL_UNITS", "eval_verb", "evaluate", "weights_of"]

EVAL_UNITS = {
    "eval/loss_nats": "nats per target of the held-out text",
    "eval/bpb": "bits per byte of the held-out text",
    "eval/tokens": "targets evaluated on",
}


def eval_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Evaluate the newest checkpoint on the run's held-out text.

    Raises:
        ValueError: there is no such run.
        DataError: the text is gone, other than the run's, or none of it is held out.
        CheckpointError: its newest checkpoint is absent or damaged.
    """
    with signals.at_once():
        config, state = told.config, newest_state(told.config, voice)
        recipe = state["recipe"]
        found = find_text(config, voice)
        check_same(found, recipe.data, Path(config.run.dir) / "data.json", config)
        text = open_text(found, config, recipe, voice)
        if not text.heldout:
            raise DataError(
                f"run.dir={config.run.dir}: data.holdout=0 must be above 0 to evaluate; train a run with some"
            )
        batches = heldout_batches(list(text.heldout.values()), plan_of(recipe.batch), config.eval.rows)
        row = evaluate(state, batches, weights=config.eval.weights)
        if row is not None:
            voice.heldout(row)
    return 0


def evaluate(
    state: TensorDict,
    batches: Iterable[TensorDict],
    *,
    weights: Literal["params", "average"] | None,
    asked: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Measure a state on held-out batches; eager, so that the first line comes before anything is compiled.

    Args:
        state: read only.
        batches: all of them are one measurement: sums are added, ratios taken of the sums.
        weights: which parameters.
        asked: when it says so the measurement is dropped.

    Returns:
        A held-out row, or none when it was dropped.
    """
    view = weights_of(state, weights)
    reports = []
    for batch in batches:
        if asked():
            return None
        reports.append(eval_step(view, batch))
    row = as_row(merge(reports))
    held = {f"eval/{name}": row[name] for name in ("loss_nats", "bpb", "tokens")}
    return {"step": int(state["step"]), **held}


def weights_of(state: TensorDict, weights: Literal["params", "average"] | None) -> TensorDict:
    """The state with the parameters that are to be used; the average stands in for them and is never mixed in.

    Args:
        state: read only.
        weights: which; none = the parameters, but of a schedule-free rule its average, which is what that one trains.

    Raises:
        ValueError: this state keeps no average.
    """
    own = state["recipe"].optim.rule == "schedule_free"
    if weights == "params" or (weights is None and not own):
        return state
    mean = mean_of(plain(state), state["recipe"])
    if mean is None:
        raise ValueError("eval.weights=average must have an average in the state; set eval.weights=params")
    view = state.clone(recurse=False)
    view["params"] = tensordict(mean)
    return view
