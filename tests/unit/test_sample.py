"""Sampling: the cache changes nothing, the key decides all, the context is kept to."""

from __future__ import annotations

import pytest
import torch

from lib.config import Model, Recipe
from lib.model import lm
from lib.model.sample import choose, empty_cache, extend, sample
from lib.state import init_state
from lib.tree import Tree, plain

MODEL = Model(width=16, depth=2, heads=4, kv_heads=2)
IDS = torch.tensor([[7, 200, 4, 99, 2, 31, 64, 5, 5, 180]])


@pytest.fixture(scope="module")
def params() -> Tree:
    return plain(init_state(Recipe(model=MODEL), seed=3)["params"])


@pytest.mark.parametrize("parts", [[1] * 10, [10], [4, 1, 5], [1, 9]])
def test_reading_in_parts_gives_the_scores_of_reading_at_once(params: Tree, parts: list[int]) -> None:
    batch = {"inputs": IDS, "segments": torch.zeros_like(IDS), "positions": torch.arange(10)[None]}
    whole = lm.logits(params, batch, MODEL)[0]
    cache, at = empty_cache(params, MODEL, 1, 10), 0
    for count in parts:
        scores, cache = extend(params, MODEL, IDS[:, at : at + count], cache)
        at += count
        # sums over keys are taken in another order: a few ulp of fp32 through two layers
        torch.testing.assert_close(scores[0], whole[at - 1], rtol=1e-5, atol=1e-5)


def test_a_cache_is_left_as_it_was(params: Tree) -> None:
    cache = empty_cache(params, MODEL, 1, 10)
    _, later = extend(params, MODEL, IDS[:, :3], cache)
    assert (cache.used, later.used) == (0, 3)
    assert not cache.keys.any()
    assert later.keys[:, :, :3].any()


def test_a_full_cache_is_refused(params: Tree) -> None:
    with pytest.raises(ValueError, match="cache: 10 positions do not fit, must be at most 4; make it with more room"):
        extend(params, MODEL, IDS, empty_cache(params, MODEL, 1, 4))


def test_the_key_decides_the_text(params: Tree) -> None:
    def write(key: int) -> list[int]:
        return sample(params, MODEL, IDS[0], length=20, context=16, key=torch.tensor(key)).tolist()

    assert write(1) == write(1)
    assert write(1) != write(2)
    assert len(write(1)) == 20


def test_temperature_zero_and_top_one_take_the_likeliest(params: Tree) -> None:
    scores, _ = extend(params, MODEL, IDS, empty_cache(params, MODEL, 1, 10))
    best = scores.argmax(-1)
    for key in range(5):
        assert torch.equal(choose(scores, torch.tensor(key), temperature=0), best)
        assert torch.equal(choose(scores, torch.tensor(key), top_k=1), best)


def test_draws_follow_the_softmax() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, -50.0]])
    drawn = torch.stack([choose(scores, torch.tensor(key), temperature=2.0)[0] for key in range(4000)])
    share = drawn.bincount(minlength=4) / 4000
    # four standard deviations of a share near 1/2 over 4000 draws
    torch.testing.assert_close(share, (scores[0] / 2).softmax(-1), rtol=0, atol=0.032)


def test_only_the_top_k_are_drawn() -> None:
    scores = torch.tensor([[0.0, 0.1, 0.2, 0.3]])
    drawn = {int(choose(scores, torch.tensor(key), top_k=2)[0]) for key in range(200)}
    assert drawn == {2, 3}


def test_it_looks_no_further_back_than_the_context(params: Tree) -> None:
    long = torch.cat((torch.arange(100, 150), IDS[0]))
    for context in (2, 5, 10):
        one = sample(params, MODEL, long[-context:], length=12, context=context, key=torch.tensor(0))
        assert torch.equal(one, sample(params, MODEL, long, length=12, context=context, key=torch.tensor(0)))


def test_text_longer_than_the_context_goes_on_from_its_newer_half(params: Tree) -> None:
    first = sample(params, MODEL, IDS[0], length=1, context=10, temperature=0, key=torch.tensor(0))
    text = torch.cat((IDS[0], first))
    scores, _ = extend(params, MODEL, text[None, -5:], empty_cache(params, MODEL, 1, 10))
    both = sample(params, MODEL, IDS[0], length=2, context=10, temperature=0, key=torch.tensor(0))
    assert both.tolist() == [int(first), int(scores.argmax())]


def test_bad_wishes_are_refused(params: Tree) -> None:
    with pytest.raises(ValueError, match="prompt: has 0 ids, must have at least one; begin with the end mark"):
        sample(params, MODEL, IDS[0, :0], length=1, context=8, key=torch.tensor(0))
    with pytest.raises(ValueError, match="context=1 must be >= 2 positions; give the length the model was trained at"):
        sample(params, MODEL, IDS[0], length=1, context=1, key=torch.tensor(0))


def test_nothing_to_write_is_nothing(params: Tree) -> None:
    assert sample(params, MODEL, IDS[0], length=0, context=8, key=torch.tensor(0)).tolist() == []
