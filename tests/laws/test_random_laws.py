"""Draws: the published hash for every value, any part of a tensor without the rest, one key a place."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.model.lm import Spec
from lib.random import fold, keep_mask, mix32, normal, uniform
from lib.state.params import draw
from tests.strategies import SEEDS
from tests.unit.test_random import folded, hashed

WORDS = st.integers(0, 2**63 - 1)
HASHES = st.integers(0, 2**32 - 1)
PATHS = st.sampled_from(["embed.weight", "blocks.ffn.up", "blocks.ffn.down", "a"])


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """A shape, and a slice for some of its leading dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, size))
        cuts.append(slice(start, draw(st.integers(start, size))))
    return shape, tuple(cuts)


@given(x=st.lists(HASHES, min_size=1, max_size=8))
def test_the_hash_is_the_published_one(x: list[int]) -> None:
    assert mix32(torch.tensor(x)).tolist() == [hashed(value) for value in x]


@given(start=st.integers(0, 2**32 - 2**12))
def test_the_hash_is_one_to_one(start: int) -> None:
    assert mix32(torch.arange(start, start + 2**12)).unique().numel() == 2**12


@given(keys=st.lists(SEEDS, min_size=1, max_size=4), words=st.lists(WORDS, min_size=1, max_size=4))
def test_folding_is_a_function_of_its_two_numbers_however_they_are_laid_out(keys: list[int], words: list[int]) -> None:
    table = fold(torch.tensor(keys)[:, None], torch.tensor(words))
    assert table.tolist() == [[folded(k, w) for w in words] for k in keys]
    assert fold(torch.tensor(keys[0]), words[0]).item() == table[0, 0].item()
    assert int(table.min()) >= 0
    assert int(table.max()) < 2**32


@given(key=SEEDS, words=st.lists(WORDS, min_size=2, max_size=50, unique=True))
def test_other_words_give_other_keys(key: int, words: list[int]) -> None:
    # 50 of 2**32: two of them fall together once in 3.5 million tries
    assert fold(torch.tensor(key), torch.tensor(words)).unique().numel() == len(words)


@given(hashes=st.lists(HASHES, min_size=1, max_size=20))
def test_uniform_and_normal_values_rise_with_the_hash_and_stay_in_range(hashes: list[int]) -> None:
    ordered = torch.tensor(sorted(hashes))
    u, z = uniform(ordered), normal(ordered)
    assert ((u >= 0) & (u < 1)).all()
    assert (z.abs() < 3.9).all()
    assert (u[1:] >= u[:-1]).all()
    assert (z[1:] >= z[:-1]).all()
    for hash_, value in zip(sorted(hashes), z.tolist(), strict=True):
        share = (hash_ + 0.5) / 2**32
        if 0.01 < share < 0.99:
            # 2**12 knots, straight between them, stretched to variance 1: off by about 2e-4 this far from the tails
            assert math.isclose(value, NormalDist().inv_cdf(share), abs_tol=5e-4, rel_tol=2e-4)


@given(seed=SEEDS, path=PATHS, part=parts())
def test_any_slice_of_a_parameter_has_the_bits_of_the_slice(
    seed: int, path: str, part: tuple[tuple[int, ...], tuple[slice, ...]]
) -> None:
    shape, cut = part
    spec = Spec(shape, 0.02)
    whole = draw(torch.tensor(seed), path, spec)
    assert whole.shape == shape
    assert torch.equal(draw(torch.tensor(seed), path, spec, cut), whole[cut])


@given(seed=SEEDS, part=parts(), rows=st.integers(1, 5))
def test_a_parameter_that_grows_at_its_end_keeps_its_beginning(
    seed: int, part: tuple[tuple[int, ...], tuple[slice, ...]], rows: int
) -> None:
    # an element is numbered row-major in the whole parameter: more rows change no number of the rows before
    shape, _ = part
    taller = (shape[0] + rows, *shape[1:])
    key = torch.tensor(seed)
    assert torch.equal(draw(key, "a", Spec(taller, 1.0))[: shape[0]], draw(key, "a", Spec(shape, 1.0)))


@given(seeds=st.lists(SEEDS, min_size=2, max_size=2, unique=True), paths=st.permutations(["a", "b", "a.b"]))
def test_other_seeds_and_other_paths_are_other_weights(seeds: list[int], paths: list[str]) -> None:
    spec = Spec((64,), 1.0)
    first, second = (draw(torch.tensor(seed), paths[0], spec) for seed in seeds)
    third = draw(torch.tensor(seeds[0]), paths[1], spec)
    assert (first == second).sum() <= 2
    assert (first == third).sum() <= 2


@given(key=SEEDS, site=st.integers(0, 200), rate=st.floats(0, 0.99), width=st.integers(1, 9))
def test_a_dropout_mask_of_some_positions_is_a_part_of_the_mask_of_all(
    key: int, site: int, rate: float, width: int
) -> None:
    keys = fold(torch.tensor(key), torch.arange(12).view(3, 4))
    whole = keep_mask(keys, site, width + 2, rate)
    assert torch.equal(keep_mask(keys[1:, 2:], site, width, rate), whole[1:, 2:, :width])
    assert torch.equal(keep_mask(keys, torch.tensor(site), width + 2, rate), whole)
