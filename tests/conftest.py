"""What every test shares: shapes checked in the core, hypothesis profiles, and a place for compiled code."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is loaded: OpenMP's threads spin while they wait, and several processes would spin on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lib.shapes import checked

ROOT = Path(__file__).parent.parent
BARE = frozenset({"config", "run", "shapes", "store"})


class _Decorate(ast.NodeTransformer):
    """Put `checked` innermost around every function, nested ones too, whose signature names a shape."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        hints = [arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg)] + [node.returns]
        if any(f"{kind}[" in ast.unparse(hint) for hint in hints if hint for kind in ("Float", "Int", "Bool")):
            node.decorator_list.append(ast.copy_location(ast.Name("checked", ast.Load()), node))
        return node


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Compiled anew each time: bytecode on disk has to stay that of the bare source.
        path = self.get_filename(fullname)
        tree = _Decorate().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["checked"] = checked
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "lib" or not rest or rest.split(".")[0] in BARE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder())

# Examples a law is tried on. `ci` takes the same ones every time; `nightly` looks for new ones.
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=100, derandomize=True)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A real S3 server on loopback, for the tests of a module."""
    from tests.s3 import s3_server

    with s3_server() as running:
        yield running


@pytest.fixture
def server(s3: Any) -> Any:
    """The same, with no fault left from the test before."""
    s3.heal()
    s3.requests.clear()
    return s3


@pytest.fixture(scope="session", autouse=True)
def _compiled_code_persists() -> Iterator[None]:
    """Keep Inductor's output between runs: most of a compile is its C++ compiler."""
    with pytest.MonkeyPatch.context() as patch:
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
        yield
