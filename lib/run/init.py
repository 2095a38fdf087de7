"""What a new run begins with instead of random weights: those of another run, or of a .safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensordict import TensorDict
from torch import Tensor

from lib.config import Init
from lib.errors import CheckpointError
from lib.state import beginning_at
from lib.store import load
from lib.store.checkpoint import resolve
from lib.store.remote import is_remote
from lib.store.tensors import describe_tensors, read_tensors
from lib.store.trees import renamed
from lib.store.wish import differences
from lib.tree import from_leaves, leaves

__all__ = ["check_source", "is_tensors", "params_at", "rules_of", "with_weights"]


def with_weights(state: TensorDict, init: Init) -> TensorDict:
    """A state of step 0 that begins at the weights that `init` names.

    Raises:
        CheckpointError: they cannot be read, or are not those of this model: all differences are listed.
        ValueError: a name of `init.names` fits nothing.
    """
    assert init.path is not None
    found = params_at(init.path)
    names = renamed(found, rules_of(init.names))
    given = {names[name]: leaf for name, leaf in found.items()}
    wanted = leaves(state["params"])
    if wrong := differences(_forms(given), _forms(wanted)):
        raise CheckpointError(
            f"init.path={init.path}: {wrong}; set model.* as it was there, or name the weights with init.names"
        )
    return beginning_at(state, from_leaves({name: given[name].to(leaf.dtype) for name, leaf in wanted.items()}))


def check_source(init: Init) -> None:
    """Look whether there is something of the right kind.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
        ValueError: a whole state is asked for, and .safetensors is none.
    """
    assert init.path is not None
    if not is_tensors(init.path):
        resolve(init.path)
    elif init.take == "all":
        raise ValueError(f"init.path={init.path} must be a checkpoint with init.take=all; make one of it with convert")
    else:
        describe_tensors(init.path)


def params_at(path: str) -> dict[str, Tensor]:
    """Read parameters by dotted name: of a checkpoint, or of .safetensors.

    Raises:
        CheckpointError: they cannot be read.
    """
    return read_tensors(path) if is_tensors(path) else leaves(load(path, keys=["params"])["params"])


def is_tensors(path: str) -> bool:
    """Whether a path means .safetensors: by its name, or for a folder by what is in it."""
    if path.endswith((".safetensors", ".safetensors.index.json")):
        return True
    return not is_remote(path) and Path(path).is_dir() and any(Path(path).glob("*.safetensors"))


def rules_of(texts: tuple[str, ...]) -> Mapping[str, str]:
    """The name map that a list of "OLD=NEW" says."""
    return {old: new for old, _, new in (text.partition("=") for text in texts)}


def _forms(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Shapes alone: weights come in any floating dtype, and train in fp32."""
    return {
        name: f"{'real' if leaf.dtype.is_floating_point else leaf.dtype} {tuple(leaf.shape)}"
        for name, leaf in named.items()
    }
