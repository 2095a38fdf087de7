"""Draws by counting, against the same arithmetic in Python's own integers."""

from __future__ import annotations

import math

import torch

from lib.random import fold, keep_mask, mix32, normal, purpose, uniform

LOW = 2**32 - 1


def hashed(x: int) -> int:
    """lowbias32 as published."""
    x ^= x >> 16
    x = x * 0x7FEB352D & LOW
    x ^= x >> 15
    x = x * 0x846CA68B & LOW
    return x ^ (x >> 16)


def folded(key: int, word: int) -> int:
    h = hashed(hashed(key & LOW) ^ (key >> 32))
    h = hashed(hashed(h + 0x9E3779B9 & LOW) ^ (word & LOW))
    return hashed(h ^ (word >> 32))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_the_hash_is_lowbias32_at_the_ends_of_its_range() -> None:
    places = [0, 1, 2, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 2, LOW]
    assert mix32(ints(*places)).tolist() == [hashed(x) for x in places]
    assert hashed(0) == 0
    assert hashed(1) == 1753845952  # a value of the published function, not only of this file


def test_hashing_leaves_its_argument_alone() -> None:
    x = ints(1, 2, 3)
    mix32(x)
    fold(x, 5)
    assert x.tolist() == [1, 2, 3]


def test_a_key_uses_all_63_bits_of_both_its_parts() -> None:
    for key, word in ((0, 0), (2**32, 0), (2**62, 0), (0, 2**32), (0, 2**62), (2**63 - 1, 2**63 - 1)):
        assert fold(torch.tensor(key), word).item() == folded(key, word)
        assert fold(torch.tensor(key), torch.tensor(word)).item() == folded(key, word)
    assert len({folded(k, w) for k in (0, 2**32, 2**62) for w in (0, 2**32, 2**62)}) == 9


def test_purposes_are_numbered_by_the_public_fnv_1a() -> None:
    # values of the reference implementation
    assert purpose("") == 0x811C9DC5
    assert purpose("a") == 0xE40C292C
    assert purpose("foobar") == 0xBF9CF968
    assert len({purpose(name) for name in ("step", "init", "dropout", "sample", "order")}) == 5


def test_uniform_values_are_24_bits_from_0_to_just_below_1() -> None:
    values = uniform(ints(0, 255, 256, 2**31, LOW))
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, 0.0, 2.0**-24, 0.5, 1 - 2.0**-24]


def test_normal_values_have_the_quantiles_of_the_normal_law() -> None:
    values = normal(ints(2**31, 0, LOW))
    assert values.dtype == torch.float32
    assert values[0].item() == 0.0
    assert -4.0 < values[1].item() < -3.6
    assert 3.6 < values[2].item() < 4.0
    places = torch.arange(0, 2**32, 2**12)  # every part of the table, four places between two of its knots
    drawn = normal(places).to(torch.float64)
    assert (drawn[1:] >= drawn[:-1]).all()
    below = (drawn[:, None] < torch.tensor([-2.0, -1.0, 0.5, 1.96])).to(torch.float64).mean(0)
    wanted = [0.022750, 0.158655, 0.691462, 0.975002]
    assert torch.allclose(below, torch.tensor(wanted, dtype=torch.float64), atol=1e-4)


def test_normal_values_have_mean_0_and_variance_1() -> None:
    drawn = normal(torch.arange(0, 2**32, 2**10)).to(torch.float64)
    assert abs(drawn.mean().item()) < 1e-5
    assert abs(drawn.var().item() - 1) < 1e-5


def test_a_dropout_mask_at_the_ends_of_the_rate() -> None:
    keys = torch.arange(64)
    assert keep_mask(keys, 3, 8, 0.0).all()
    assert not keep_mask(keys, 3, 8, 1 - 2.0**-40).any()
    assert keep_mask(keys, 3, 8, 0.5).shape == (64, 8)


def test_a_dropout_mask_drops_its_share_independently_in_each_direction() -> None:
    keys = fold(torch.tensor(7), torch.arange(512))
    for rate in (0.1, 0.5, 0.9):
        kept = torch.stack([keep_mask(keys, site, 64, rate) for site in range(4)]).to(torch.float64)
        sigma = math.sqrt(rate * (1 - rate) / kept.numel())
        assert abs(kept.mean().item() - (1 - rate)) < 5 * sigma
        centred = kept - kept.mean()
        spread = rate * (1 - rate)
        neighbours = (
            centred[1:] * centred[:-1],  # places in the model
            centred[:, 1:] * centred[:, :-1],  # positions
            centred[:, :, 1:] * centred[:, :, :-1],  # channels
        )
        for products in neighbours:
            assert abs(products.mean().item()) / spread < 5 / math.sqrt(products.numel())
