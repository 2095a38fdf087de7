"""Initial weights: their law, their size in the residual stream, and how big a tensor is drawn in parts."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from lib.config import Model
from lib.model.lm import Spec, inner_width, parameters
from lib.state import params
from lib.tree import leaves

KEY = torch.tensor(0)


def test_every_parameter_has_the_mean_and_spread_of_its_law() -> None:
    model = Model(width=64, depth=3, heads=4, kv_heads=2, vocab=260, tied=False)
    drawn = leaves(params.init(model, KEY))
    assert set(drawn) == set(parameters(model))
    d, f = 64, inner_width(model)
    stds = {"wo": d**-0.5 / math.sqrt(6), "down": f**-0.5 / math.sqrt(6)}
    for path, leaf in drawn.items():
        if path.endswith("norm"):
            assert (leaf == 1).all(), path
            continue
        std = stds.get(path.rpartition(".")[2], d**-0.5)
        n = leaf.numel()
        assert abs(leaf.mean().item()) < 5 * std / math.sqrt(n), path
        assert abs(leaf.std().item() / std - 1) < 5 / math.sqrt(2 * n), path
        assert leaf.unique().numel() > 0.98 * n, path


def test_layers_and_paths_start_apart() -> None:
    drawn = leaves(params.init(Model(width=64, depth=2, heads=4), KEY))
    wq, wk = drawn["blocks.attention.wq"], drawn["blocks.attention.wk"]
    for one, other in ((wq[0], wq[1]), (wq[0], wk[0])):
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(one.numel())


def test_a_seed_above_32_bits_is_another_seed() -> None:
    spec = Spec((64,), 1.0)
    assert not torch.equal(params.draw(torch.tensor(0), "a", spec), params.draw(torch.tensor(2**32), "a", spec))


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_drawing_in_pieces_changes_no_bit(at_once: int) -> None:
    spec, part = Spec((5, 6, 3), 0.5), (slice(1, 4), slice(2, 6))
    whole = params.draw(KEY, "a", spec)
    with mock.patch.object(params, "_AT_ONCE", at_once):
        assert torch.equal(params.draw(KEY, "a", spec), whole)
        assert torch.equal(params.draw(KEY, "a", spec, part), whole[part])


def test_constants_are_cut_like_the_rest() -> None:
    assert params.draw(KEY, "a", Spec((4, 5), 0.0, 1.0), (slice(1, 3),)).tolist() == [[1.0] * 5] * 2


def test_on_the_meta_device_there_are_only_shapes() -> None:
    tree = params.init(Model(width=8, depth=1, heads=2, vocab=9), KEY, device=torch.device("meta"))
    assert leaves(tree)["embed.weight"].shape == (9, 8)
    assert {leaf.device.type for leaf in leaves(tree).values()} == {"meta"}


def test_the_weights_of_seed_0_are_these_for_ever() -> None:
    # The first values of a few parameters. If this fails, every run from a seed starts elsewhere: say so in CHANGELOG.md.
    drawn = leaves(params.init(Model(width=8, depth=1, heads=2, vocab=9), KEY))
    found = {
        path: [x.hex() for x in drawn[path].flatten()[:2].tolist()] for path in ("embed.weight", "blocks.ffn.down")
    }
    assert found == {
        "embed.weight": ["0x1.b4a15c0000000p-3", "-0x1.4a263a0000000p-1"],
        "blocks.ffn.down": ["-0x1.3986c20000000p-2", "-0x1.822dbe0000000p-4"],
    }
