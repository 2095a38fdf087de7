"""Reports: a fixed schema, sums that merge, and rows that hold no number that is not one."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from lib.config import Guard
from lib.metrics import UNITS, as_row, eval_report, merge
from lib.state import init_state
from lib.step import eval_step, train_step
from lib.testing.strategies import lm_batch
from tests.strategies import PLAIN, form, gradients, memory, own, refusal, tiny, with_leaves


def reported(*, valid: float = 0.7) -> TensorDict:
    _, metrics = train_step(init_state(tiny()), lm_batch(tiny(), valid=valid))
    return metrics


def test_a_report_has_the_names_of_the_table_of_units_and_no_others() -> None:
    guarded = tiny(guard=Guard(window=4))
    _, metrics = train_step(init_state(guarded), lm_batch(guarded))
    assert sorted(metrics.keys()) == sorted(UNITS)
    assert sorted(reported().keys()) == sorted(set(UNITS) - {"spike_score"})
    assert all(leaf.shape == () for leaf in reported().values())


def test_the_schema_does_not_depend_on_what_happened() -> None:
    assert form(reported()) == form(reported(valid=0.0))
    dtypes = {name: dtype for name, (dtype, _) in form(reported()).items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int64} == {"step", "tokens", "bytes", "skipped"}
    assert dtypes["refused"] == torch.bool
    assert dtypes["lr"] == torch.float64


def test_what_is_reported_is_what_the_batch_held() -> None:
    batch = lm_batch(tiny())
    state = init_state(tiny())
    _, metrics = train_step(state, batch)
    assert metrics["step"].item() == 1
    assert metrics["tokens"].item() == int(batch["mask"].sum())
    assert metrics["bytes"].item() == int(batch["bytes"].sum())
    nats = metrics["loss_nats"].item() * metrics["tokens"].item()
    assert metrics["bpb"].item() == pytest.approx(nats / math.log(2) / metrics["bytes"].item(), rel=1e-6)
    assert metrics["loss_nats"].item() == pytest.approx(eval_step(state, batch)["loss_nats"].item(), rel=1e-6)


def report(nats: float, tokens: int, size: int) -> TensorDict:
    return eval_report(torch.tensor(nats), torch.tensor(tokens), torch.tensor(size))


def test_reports_merge_by_their_sums() -> None:
    merged = merge([report(8.0, 8, 4), report(5.0, 1, 2), report(8.0, 4, 0), report(9.0, 3, 2)])
    assert merged["loss_nats"].item() == 1.875  # the mean of the means is 2.75
    assert merged["bpb"].item() == pytest.approx(30 / math.log(2) / 8)
    assert (merged["nats"].item(), merged["tokens"].item(), merged["bytes"].item()) == (30.0, 16, 8)
    assert form(merged) == form(report(1.0, 1, 1))


def test_merging_is_the_same_at_once_and_in_parts() -> None:
    parts = [report(0.1 * n, n, n) for n in range(1, 9)]
    one, two = merge(parts), merge([merge(parts[:3]), merge(parts[3:])])
    assert one["nats"].item() == pytest.approx(two["nats"].item(), rel=1e-15)
    assert one["tokens"].item() == two["tokens"].item()


def test_a_report_of_nothing_is_no_report() -> None:
    assert refusal(merge, []) == "reports: got none, must have at least one; evaluate a batch first"


def test_reports_share_no_memory_with_what_they_tell_of() -> None:
    total, count, size = torch.tensor(1.0, dtype=torch.float64), torch.tensor(2), torch.tensor(3)
    places = memory(eval_report(total, count, size))
    assert not set(places) & {x.untyped_storage().data_ptr() for x in (count, size)}
    assert len(set(places)) == len(places)


def test_a_row_holds_python_numbers() -> None:
    row = as_row(reported())
    assert {type(row[name]) for name in ("step", "tokens", "bytes", "skipped", "refused")} == {int}
    assert {type(row[name]) for name in ("loss_nats", "bpb", "lr", "grad_norm", "scale")} == {float}
    assert row["refused"] == 0
    assert row["lr"] == tiny().optim.lr


def test_a_ratio_with_nothing_under_it_is_none_in_a_row() -> None:
    state = init_state(tiny())
    batch = lm_batch(tiny(), valid=0.0)
    row = as_row(train_step(state, with_leaves(batch, bytes=torch.zeros_like(batch["bytes"])))[1])
    assert (row["loss_nats"], row["tokens"]) == (None, 0)
    assert row["bpb"] is None


def test_a_loss_of_ones_own_may_do_without_bytes() -> None:
    _, metrics = PLAIN(init_state(own(), params={"w": torch.tensor(1.0)}), gradients({"w": 2.0}))
    row = as_row(metrics)
    assert (row["loss_nats"], row["bytes"], row["bpb"]) == (2.0, 0, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_none_in_a_row(value: float) -> None:
    metrics = reported()
    metrics["loss_nats"] = torch.tensor(value)
    metrics["grad_norm"] = torch.tensor(value)
    row = as_row(metrics)
    assert (row["loss_nats"], row["grad_norm"]) == (None, None)
    assert row["step"] == 1


def test_counts_beyond_fp32_are_exact_in_a_row() -> None:
    metrics = reported()
    metrics["tokens"] = torch.tensor(2**24 + 1)
    metrics["step"] = torch.tensor(2**53)
    row = as_row(metrics)
    assert row["tokens"] == 2**24 + 1
    assert row["step"] == 2**53
