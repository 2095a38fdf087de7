"""The wall: the core touches no world, the store only disks, and imports point run -> store -> core.

The names that are banned stand once, in pyproject.toml, where ruff reads them too.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "lib").rglob("*.py"))
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["flake8-tidy-imports"][
    "banned-api"
]
PICKLE = frozenset(name for name, entry in TABLE.items() if "no pickle" in entry["msg"])
# A run tells its own child processes what to call; nothing that comes from elsewhere goes this way.
LET_THROUGH: Mapping[str, frozenset[str]] = {"lib.run.worker": frozenset({"multiprocessing.reduction"})}
# The generators and settings of the world, which lib/testing holds a step to account for; it draws what is to be tried.
WORLDS = frozenset(name for name, entry in TABLE.items() if "comes from the key" in entry["msg"])
DISK = frozenset(name for name, entry in TABLE.items() if "disk is lib/store/" in entry["msg"])

# What each room may not reach, and the calls that are not for it.
BANNED: Mapping[str, frozenset[str]] = {
    "core": frozenset(TABLE) | {"lib.run", "lib.store", "lib.testing"},
    "store": (frozenset(TABLE) - DISK) | {"lib.run"},
    "testing": (frozenset(TABLE) - WORLDS) | {"lib.run", "lib.store"},
    "run": PICKLE,
}
CALLS: Mapping[str, frozenset[str]] = {
    "core": frozenset({"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}),
    "store": frozenset({"print", "input", "exec", "eval", "breakpoint", "__import__"}),
    "testing": frozenset({"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}),
    "run": frozenset({"exec", "eval", "breakpoint"}),
}
CONSTANT = (
    *(int, float, complex, str, bytes, range, types.NoneType, re.Pattern, torch.dtype, torch.device, np.dtype),
    *(type, types.FunctionType, types.BuiltinFunctionType),
    *(types.GenericAlias, types.UnionType, typing.TypeVar, typing.ParamSpec),
)


def room(path: Path) -> str:
    first = path.relative_to(ROOT / "lib").parts[0]
    return first if first in {"run", "store", "testing"} else "core"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


CORE = [path for path in FILES if room(path) == "core"]
IMPORTABLE = [path for path in FILES if path.stem != "__main__"]


def reached(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each dotted name that a module imports, or reaches through what it imports, with its line."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                names[alias.asname or package] = alias.name if alias.asname else package
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{'.' * node.level}{node.module}.{alias.name}"
                yield node.lineno, names[alias.asname or alias.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in names:
                yield node.lineno, f"{names[root]}.{rest}"


def faults(source: str, where: str, module: str = "") -> list[str]:
    """Name each line of a module that reaches over the wall, seen from one room."""
    tree, banned = ast.parse(source), BANNED[where] - LET_THROUGH.get(module, frozenset())
    found = {
        f"{line}: {name}"
        for line, name in reached(tree)
        if name.startswith(".") or any(name == ban or name.startswith(f"{ban}.") for ban in banned)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.add(f"{node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS[where]:
            found.add(f"{node.lineno}: {node.func.id}()")
    return sorted(found)


def bound(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that a module binds by an assignment at its own level, with its annotation."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        hint = getattr(node, "annotation", None)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for name in (name for target in targets if target for name in ast.walk(target)):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                yield name.id, ast.unparse(hint) if hint else ""
        yield from bound(node)


def changeable(value: Any) -> bool:
    """Whether a value, or one that it holds, can be changed in place."""
    if isinstance(value, tuple | frozenset):
        return any(changeable(one) for one in value)
    if isinstance(value, types.MappingProxyType):
        return any(changeable(one) for one in value.values())
    if isinstance(value, msgspec.Struct):
        return not value.__struct_config__.frozen or any(changeable(one) for one in msgspec.structs.astuple(value))
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    return not (isinstance(value, CONSTANT) or typing.get_origin(value) is not None)


def mutable_values(source: str, module: types.ModuleType) -> list[str]:
    """Name the values of a module that could carry something from one call to the next.

    A dict is let through where it is annotated `Mapping[...]`: there mypy refuses every write.
    """
    found = []
    for name, annotation in bound(ast.parse(source)):
        value = vars(module).get(name)
        if "Mapping" in annotation and isinstance(value, dict):
            value = tuple(value.values())
        if name != "__all__" and changeable(value):
            found.append(name)
    return found


def python(program: str) -> str:
    """Run a program in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_module_reaches_over_the_wall(path: Path) -> None:
    assert faults(path.read_text(), room(path), module_name(path)) == []


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_no_module_of_the_core_holds_a_mutable_value(path: Path) -> None:
    assert mutable_values(path.read_text(), importlib.import_module(module_name(path))) == []


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_every_module_of_the_core_introduces_itself(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", IMPORTABLE, ids=module_name)
def test_all_public_names_exist(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []


def test_importing_the_core_imports_neither_driver_nor_disk() -> None:
    imports = "\n".join(f"import {module_name(path)}" for path in CORE)
    loaded = 'import sys; print(*(name for name in sys.modules if name.startswith(("lib.run", "lib.store", "zarr"))))'
    assert python(f"{imports}\n{loaded}") == ""


def test_reading_a_config_does_not_wait_for_torch() -> None:
    assert python('import lib.config, sys; print("torch" in sys.modules)') == "False"


@pytest.mark.parametrize(
    ("source", "where", "fault"),
    [
        ("import time", "core", "1: time"),
        ("from os import path", "core", "1: os.path"),
        ("def f():\n    import os.path as p", "core", "2: os.path"),
        ("import torch as t\nx = lambda: t.rand(2)", "core", "2: torch.rand"),
        ("import numpy as np\ndef f(): np.random.rand(2)", "core", "2: numpy.random"),
        ("import torch\ndef f(p): return torch.load(p)", "run", "2: torch.load"),
        ("from multiprocessing.reduction import ForkingPickler", "run", "1: multiprocessing.reduction.ForkingPickler"),
        ("from lib.store import save", "core", "1: lib.store.save"),
        ("import lib.run.loop", "store", "1: lib.run.loop"),
        ("from . import run", "run", "1: .None.run"),
        ("import logging", "store", "1: logging"),
        ("def f(p): return open(p)", "core", "1: open()"),
        ("def f(): print(1)", "store", "1: print()"),
        ("n = 0\ndef f():\n    global n", "run", "3: global n"),
    ],
)
def test_the_law_sees_a_breach(source: str, where: str, fault: str) -> None:
    assert fault in faults(source, where)


def test_the_one_exception_is_for_its_module_and_nothing_else() -> None:
    pickler, whole = "from multiprocessing.reduction import ForkingPickler", "import pickle"
    assert faults(pickler, "run", "lib.run.worker") == []
    assert faults(whole, "run", "lib.run.worker") == ["1: pickle"]
    assert faults(pickler, "run", "lib.run.feed") == ["1: multiprocessing.reduction.ForkingPickler"]


@pytest.mark.parametrize(
    ("source", "where"),
    [("import os, io, shutil\nfrom pathlib import Path\nopen('a')", "store"), ("import time\nprint(1)", "run")],
    ids=["disk in the store", "clock in the driver"],
)
def test_the_law_lets_each_room_do_its_work(source: str, where: str) -> None:
    assert faults(source, where) == []


@pytest.mark.parametrize(
    ("value", "mutable"),
    [
        ("x = []", True),
        ("x = {}", True),
        ("x: dict[str, int] = {'a': 1}", True),
        ("x = ('a', [1])", True),
        ("x = __import__('torch').zeros(2)", True),
        ("x = __import__('itertools').count()", True),
        ("x: Mapping[str, list] = {'a': []}", True),
        ("if 1:\n    x = set()", True),
        ("x: Mapping[str, int] = {'a': 1}", False),
        ("x = ('a', (1, 2.0), frozenset({3}))", False),
        ("x = dict[str, int]", False),
        ("x = len", False),
    ],
)
def test_the_law_tells_mutable_values_from_constants(value: str, mutable: bool) -> None:
    module = types.ModuleType("sample")
    source = f"from __future__ import annotations\n{value}"
    exec(source, vars(module))
    assert mutable_values(source, module) == (["x"] if mutable else [])
