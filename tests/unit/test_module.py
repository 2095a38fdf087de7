"""Modules as functions: which are refused, in full, and that the module itself is only a template."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lib.module import as_function
from lib.tree import from_leaves, leaves
from tests.strategies import refusal


def squares(call: nn.Module, batch: dict[str, Tensor], key: Tensor | None) -> tuple[Tensor, Tensor]:
    return call(batch["x"]).square().sum(), torch.tensor(batch["x"].shape[0])


GENERATOR = "draws from torch's global generator; set it to 0 and call lib.nn.dropout.dropout with the key"
RUNNING = "keeps running statistics outside the state; use a layer or group norm"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), f"module.1: BatchNorm1d {RUNNING}"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), f"module.1: BatchNorm1d {RUNNING}"),
        (nn.SyncBatchNorm(2), f"module: SyncBatchNorm {RUNNING}"),
        (nn.InstanceNorm1d(2, track_running_stats=True), f"module: InstanceNorm1d {RUNNING}"),
        (nn.Dropout(0.5), f"module: Dropout with rate 0.5 {GENERATOR}"),
        (
            nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25))}),
            f"module.a.1: Dropout with rate 0.25 {GENERATOR}",
        ),
        (nn.AlphaDropout(0.1), f"module: AlphaDropout with rate 0.1 {GENERATOR}"),
        (nn.Dropout2d(0.1), f"module: Dropout2d with rate 0.1 {GENERATOR}"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), f"module: MultiheadAttention with rate 0.1 {GENERATOR}"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.3), f"module: LSTM with rate 0.3 {GENERATOR}"),
        (
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1),
            f"module.self_attn: MultiheadAttention with rate 0.1 {GENERATOR}",
        ),
    ],
)
def test_a_module_with_hidden_state_or_randomness_is_refused(module: nn.Module, message: str) -> None:
    assert refusal(as_function, squares, module) == message


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.0),
        nn.Dropout(0.5).eval(),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.LayerNorm(2),
        nn.GroupNorm(1, 2),
        nn.InstanceNorm1d(2),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    ],
)
def test_a_module_without_either_is_taken(module: nn.Module) -> None:
    assert as_function(squares, module)


def test_without_a_module_the_loss_gets_the_tree() -> None:
    got: list[object] = []

    def loss(params: object, batch: object, key: object) -> tuple[torch.Tensor, int]:
        got.extend((params, batch, key))
        return torch.tensor(3.0), 2

    total, count = as_function(loss, None)({"w": torch.ones(1)}, {"x": torch.ones(1)}, None)
    assert (total.item(), count.item(), count.dtype) == (3.0, 2, torch.int64)
    assert [type(value) for value in got] == [dict, dict, type(None)]


def test_the_module_is_called_with_the_parameters_given_and_keeps_its_own() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    others = from_leaves({name: torch.full_like(p, 0.5) for name, p in before.items()})
    x = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    total, count = as_function(squares, module)(others, {"x": x}, None)
    inner = torch.tanh(x @ torch.full((2, 3), 0.5) + 0.5)
    assert total.item() == pytest.approx((inner @ torch.full((3, 1), 0.5)).square().sum().item(), rel=1e-6)
    assert count.item() == 2
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())


def test_tied_weights_of_a_module_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    module = Tied()
    named = from_leaves(dict(module.named_parameters()))
    assert list(leaves(named)) == ["first.weight"]
    w = torch.tensor([[0.0, 1.0], [2.0, 0.0]], requires_grad=True)
    x = torch.tensor([[1.0, 2.0]])
    total, _ = as_function(squares, module)(from_leaves({"first.weight": w}), {"x": x}, None)
    assert total.item() == (x @ w.T @ w.T).square().sum().item() == 20.0
    (both,) = torch.autograd.grad(total, w)
    ((x @ w.T @ w.T).square().sum()).backward()
    assert torch.equal(both, w.grad)


def call(loss: object, module: object = None, params: object = None) -> object:
    return as_function(loss, module)({} if params is None else params, {}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "described"),
    [
        (1.0, "float"),
        (None, "NoneType"),
        (torch.ones(()), "a tensor of shape ()"),
        ((torch.ones(3), 3), "(a tensor of shape (3,), int)"),
        ((1.0, 3), "(float, int)"),
        ((torch.ones(()), 1, 2), "(a tensor of shape (), int, int)"),
    ],
)
def test_a_loss_that_gives_something_else_is_refused(found: object, described: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(lambda *_: found)
    assert str(caught.value) == (
        f"loss: gave {described}, must give (sum of the targets' losses as a 0-d tensor, number of targets); "
        "return losses.sum(), losses.numel()"
    )


def test_a_loss_that_draws_from_the_global_generator_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        call(lambda *_: (torch.rand(()), 1))
    assert str(caught.value) == (
        "loss: drew from torch's global generator, must draw from its key only; use lib.random or lib.nn.dropout"
    )


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self) -> torch.Tensor:
        self.calls.add_(1)
        return self.w * self.calls


def test_a_buffer_that_forward_changes_is_refused_and_left_alone() -> None:
    module = Counts()
    with pytest.raises(ValueError) as caught:
        call(lambda model, *_: (model().sum(), 2), module, {"w": torch.ones(2)})
    assert str(caught.value) == (
        "module.calls: the buffer is changed by forward, outside the state; keep what must be remembered in the parameters "
        "or leave it out"
    )
    assert module.calls.item() == 0


def test_parameters_that_are_not_the_modules_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        call(
            lambda model, *_: (model(torch.ones(2)).sum(), 2),
            nn.Linear(2, 2),
            {"weight": torch.ones(2, 2), "b": torch.ones(2)},
        )
    assert str(caught.value) == (
        "state.params: missing ['bias'], extra ['b'], must be the parameters of the module; "
        "make the state with init_state(recipe, params=module)"
    )


def test_a_frozen_or_whole_number_parameter_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    with pytest.raises(ValueError) as caught:
        as_function(lambda *_: (torch.ones(()), 1), module)
    assert str(caught.value) == (
        "params.weight: is frozen (requires_grad is false), must be trainable; turn it into a buffer of the module"
    )
    complex_one = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="params.weight: is torch.complex64, must be real floating point"):
        as_function(lambda *_: (torch.ones(()), 1), complex_one)


def test_what_is_no_function_or_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="loss=None must be a function of \\(model or params, batch, key\\); pass one"):
        as_function(None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be an nn.Module made already; pass an instance"):
        as_function(lambda *_: (torch.ones(()), 1), nn.Linear)  # type: ignore[arg-type]
