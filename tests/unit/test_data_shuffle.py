"""The keyed permutation: worked values, uniformity, large sizes, errors."""

from __future__ import annotations

from collections import Counter
from math import factorial, sqrt

import numpy as np
import pytest

from lib.data.shuffle import fold, permute, restore


def spread(counts: Counter[object], cells: int) -> float:
    """Chi-square of counts that should be equal, in standard deviations from what is expected."""
    mean = sum(counts.values()) / cells
    chi2 = sum((count - mean) ** 2 / mean for count in counts.values()) + (cells - len(counts)) * mean
    return (chi2 - (cells - 1)) / sqrt(2 * (cells - 1))


def order(size: int, seed: int, epoch: int) -> list[int]:
    return permute(np.arange(size), size, seed=seed, epoch=epoch).tolist()


def test_the_order_of_a_seed_is_fixed_for_ever() -> None:
    assert order(10, seed=0, epoch=0) == [8, 0, 9, 1, 5, 3, 4, 2, 6, 7]
    assert order(10, seed=1, epoch=0) == [9, 7, 0, 2, 6, 8, 4, 1, 3, 5]


def test_an_order_differs_by_seed_and_by_epoch_and_comes_again() -> None:
    orders = {tuple(order(20, seed, epoch)) for seed in (0, 1, -1, 2**63 - 1) for epoch in (0, 1, 2, 2**40)}
    assert len(orders) == 16
    assert order(20, 3, 5) == order(20, 3, 5)
    assert tuple(range(20)) not in orders


@pytest.mark.parametrize("size", [2, 3, 7, 16, 31, 100])
def test_first_elements_are_uniform(size: int) -> None:
    first: Counter[object] = Counter()
    for seed in range(300):
        for epoch in range(4):
            first[int(permute(np.zeros(1, np.int64), size, seed=seed, epoch=epoch)[0])] += 1
    assert spread(first, size) < 4


@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_order_of_a_few_elements_is_drawn_alike(size: int) -> None:
    orders: Counter[object] = Counter(tuple(order(size, seed, seed % 3)) for seed in range(2400))
    assert spread(orders, factorial(size)) < 4


@pytest.mark.parametrize("size", [10**6 + 3, 2**31 + 11, 10**12, 2**62])
def test_large_sizes_come_back_and_do_not_collide(size: int) -> None:
    places = np.arange(5000) * (size // 5000) + size % 5000
    elements = permute(places, size, seed=5, epoch=9)
    assert elements.min() >= 0
    assert elements.max() < size
    assert len(set(elements.tolist())) == len(set(places.tolist()))
    np.testing.assert_array_equal(restore(elements, size, seed=5, epoch=9), places)
    assert abs(float(elements.mean()) / size - 0.5) < 0.03


def test_the_input_is_not_touched_and_may_be_empty() -> None:
    places = np.arange(5)
    permute(places, 5, seed=0, epoch=0)
    assert places.tolist() == [0, 1, 2, 3, 4]
    assert permute(np.empty(0, np.int64), 5, seed=0, epoch=0).tolist() == []


def test_what_is_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^size=0 must be >= 1$"):
        permute(np.zeros(1, np.int64), 0, seed=0, epoch=0)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=rf"^index={wrong} must be in \[0, 5\)$"):
            restore(np.array([0, wrong]), 5, seed=0, epoch=0)


def test_a_folded_seed_is_fixed_for_ever_and_differs_by_every_word() -> None:
    assert fold(0, "source", "text") == 4373011828366542773
    assert fold(-1, "a") == fold(2**64 - 1, "a")
    seeds = [fold(seed, *words) for seed in range(9) for words in (("a",), ("b",), ("a", "b"), ("ab",), ("b", "a"))]
    assert len(set(seeds)) == 45
    assert all(0 <= seed < 2**64 for seed in seeds)
