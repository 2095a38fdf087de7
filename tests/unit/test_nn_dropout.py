"""Dropout: the mask is the positions' own, the mean stays, and evaluation is untouched."""

from __future__ import annotations

import math

import pytest
import torch

from lib.nn.dropout import dropout, position_keys

KEY = torch.tensor(11)


def keys(rows: int, length: int, first: int = 0) -> torch.Tensor:
    return position_keys(KEY, torch.arange(first, first + rows), length)


def test_without_keys_or_rate_nothing_is_dropped() -> None:
    x = torch.ones(2, 3, 4)
    assert dropout(x, 0.5, None, 0) is x
    assert dropout(x, 0.0, keys(2, 3), 0) is x


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_what_stays_is_scaled_so_that_the_mean_stays(rate: float) -> None:
    x = torch.ones(16, 32, 64)
    y = dropout(x, rate, keys(16, 32), 3)
    assert set(y.unique().tolist()) == {0.0, (x[0, 0, 0] / (1 - rate)).item()}
    assert abs(y.mean().item() - 1) < 5 * math.sqrt(rate / (1 - rate) / x.numel())


def test_the_mask_of_a_row_is_its_own_wherever_the_row_stands() -> None:
    x = torch.ones(4, 6, 8)
    whole = dropout(x, 0.5, keys(4, 6), 1)
    assert torch.equal(whole[2:], dropout(x[2:], 0.5, keys(2, 6, first=2), 1))
    assert torch.equal(whole[:, :3], dropout(x[:, :3], 0.5, keys(4, 3), 1))


def test_masks_differ_by_row_position_place_and_key() -> None:
    x = torch.ones(2, 2, 256)
    y = dropout(x, 0.5, keys(2, 2), 1)
    others = [y[0, 1], y[1, 0], dropout(x, 0.5, keys(2, 2), 2)[0, 0], dropout(x, 0.5, keys(2, 2) ^ 1, 1)[0, 0]]
    for other in others:
        same = (y[0, 0] == other).to(torch.float64).mean().item()
        assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(256)


def test_dropped_channels_get_no_gradient_and_hide_what_they_held() -> None:
    x = torch.ones(1, 4, 8, requires_grad=True)
    y = dropout(x, 0.5, keys(1, 4), 0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())
    spoilt = torch.where(y == 0, math.nan, x.detach())
    assert torch.isfinite(dropout(spoilt, 0.5, keys(1, 4), 0)).all()


def test_a_key_is_made_for_each_position() -> None:
    assert keys(3, 5).shape == (3, 5)
    assert keys(30, 50).unique().numel() == 1500
