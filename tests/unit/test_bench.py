"""The bench's own arithmetic: pairs, ratios, history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import harness, optimizer
from bench.baseline import Transformer
from bench.step import batch_of, recipe_of
from lib.model import lm
from lib.state import init_state
from lib.tree import leaves, plain


def test_turns_are_paired_and_the_first_ones_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = {"ours": iter([9.0, 2.0, 4.0]), "plain": iter([1.0, 4.0, 4.0])}

    def seconds(run: object) -> float:
        name = "ours" if run is ours else "plain"
        order.append(name)
        return next(times[name])

    def ours() -> None: ...
    def plain_one() -> None: ...

    monkeypatch.setattr(harness, "_seconds", seconds)
    ratio = harness.interleave(ours, plain_one, turns=2, warm=1)
    assert order == ["ours", "plain", "plain", "ours", "ours", "plain"]
    assert (ratio.least, ratio.median, ratio.most) == (0.5, 0.75, 1.0)
    assert (ratio.ours_s, ratio.baseline_s) == (3.0, 4.0)


def test_history_grows_by_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "HISTORY", tmp_path / "history.jsonl")
    assert harness.last_lines("step", 5) == []
    for n in range(3):
        harness.record("step", f"case {n}", ratio=0.123456789)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["ratio"] for line in lines] == [0.12346] * 3
    assert {"date", "commit", "machine", "versions"} <= set(lines[0])
    assert [text.split("case=")[1].split("  ")[0] for text in harness.last_lines("step", 2)] == ["case 1", "case 2"]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_updates_that_are_compared_are_one_update() -> None:
    shapes = {"a": (5, 7), "b": (3, 2)}
    params, update = optimizer.ours(shapes, backend="aot_eager")
    twins, fused = optimizer.fused(shapes)
    for _ in range(3):
        update()
        fused()
    for path, leaf in leaves(params).items():
        # Torch multiplies by the rate before it divides, we after; ours are clipped by a half, which Adam does not see.
        torch.testing.assert_close(leaf, twins[path], rtol=0, atol=1e-6)


def test_the_baseline_is_the_same_model() -> None:
    """With our weights carried over, the plain module gives our logits: the comparison is of equals."""
    recipe = recipe_of("small", "fp32")
    assert recipe.model is not None
    params = plain(init_state(recipe)["params"])
    module = Transformer(recipe)
    named = leaves(params)
    target = dict(module.named_parameters())
    names = {"attention.norm": "norm1", "ffn.norm": "norm2"}
    with torch.no_grad():
        for path, leaf in named.items():
            if path.startswith("blocks."):
                inner = path.removeprefix("blocks.")
                for n in range(recipe.model.depth):
                    target[f"blocks.{n}.{names.get(inner, inner.split('.')[1])}.weight"].copy_(leaf[n])
            else:
                target["norm.weight" if path == "norm" else path].copy_(leaf)
    assert sum(leaf.numel() for leaf in named.values()) == sum(leaf.numel() for leaf in target.values())
    batch = batch_of(recipe, 0)
    part = {name: batch[name][0] for name in ("inputs", "positions", "segments")}
    ours = lm.logits(params, part, recipe.model)
    theirs = module(part["inputs"], part["positions"], part["segments"])
    # fp32 through four layers, sums in another order
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
