"""Products with a weight stored [out, in]."""

from __future__ import annotations

import pytest
import torch

from lib.nn.linear import linear


def test_a_weight_is_stored_out_by_in() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]])
    assert linear(torch.tensor([1.0, 10.0, 100.0]), weight).tolist() == [321.0, -100.0]
    assert linear(torch.ones(2, 5, 3), weight).shape == (2, 5, 2)


def test_widths_that_do_not_fit_are_named() -> None:
    with pytest.raises(TypeError, match=r"^linear: weight is shape \(2, 3\), i=4; want float\[o i\] with \{'i': 4"):
        linear(torch.ones(4), torch.ones(2, 3))
