"""The house rules: floors, one composition root, purity, light imports, documented modules."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {
    "wire": 0,
    "cpukernels": 0,
    "configs": 0,
    "drafter": 1,
    "verifier": 1,
    "gateway": 2,
    "breakeven": 3,
    "benchmarks": 3,
    "tools": 3,
    "tests": 3,
}
SHIPPED = ("wire", "cpukernels", "drafter", "verifier", "gateway", "breakeven", "configs")
# What a pure module may not touch: it would bring a clock, randomness, the network, threads, files or logs.
IMPURE = {"asyncio", "time", "random", "socket", "threading", "os", "logging", "datetime", "secrets", "subprocess"}
PURE_NEIGHBOURS = {"wire.messages", "wire.sampling", "verifier.acceptance", "msgspec"}


@cache
def modules(*packages: str) -> dict[str, Path]:
    """Dotted name to file."""
    found = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Every module a file imports anywhere in it, also inside functions."""
    found: list[str] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            assert node.module is not None
            known = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = known & set(modules(*FLOORS))
            found += sorted(submodules) or [node.module]
    return tuple(found)


def top(name: str) -> str:
    return name.partition(".")[0]


EVERY = modules(*FLOORS)
PRODUCT = modules(*SHIPPED)


@pytest.mark.parametrize("name", EVERY)
def test_imports_point_down(name: str) -> None:
    own = top(name)
    for imported in imports_of(EVERY[name]):
        other = top(imported)
        if other in FLOORS and other != own:
            assert FLOORS[other] < FLOORS[own] or own in ("tests", "benchmarks", "tools"), f"{name} imports {imported}"


@pytest.mark.parametrize("name", modules("drafter", "verifier"))
def test_drafter_and_verifier_never_import_each_other(name: str) -> None:
    other = {"drafter": "verifier", "verifier": "drafter"}[top(name)]
    assert not [imported for imported in imports_of(EVERY[name]) if top(imported) == other]


@pytest.mark.parametrize("name", modules("gateway"))
def test_only_the_gateways_composition_root_names_the_other_processes(name: str) -> None:
    allowed = {"verifier.acceptance"}
    if name == "gateway.compose":
        return
    named = {imported for imported in imports_of(EVERY[name]) if top(imported) in ("drafter", "verifier")}
    assert named <= allowed


def test_the_composition_root_names_clients_and_configs_only() -> None:
    named = {i for i in imports_of(EVERY["gateway.compose"]) if top(i) in ("drafter", "verifier")}
    assert all(imported.endswith((".client", ".config")) for imported in named), named


@pytest.mark.parametrize("name", PRODUCT)
def test_nothing_that_ships_imports_tests_benchmarks_or_tools(name: str) -> None:
    assert not {top(imported) for imported in imports_of(EVERY[name])} & {"tests", "benchmarks", "tools"}


def test_there_are_no_cycles() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in done:
            return
        for imported in imports_of(PRODUCT[name]):
            if imported in PRODUCT and imported != name:
                visit(imported, (*path, name))
        done.add(name)

    for name in PRODUCT:
        visit(name, ())


# ---------------------------------------------------------------- purity


def pure_modules() -> list[str]:
    listed = [name for name in modules("gateway") if name.startswith("gateway.speculation.")]
    return [*listed, "verifier.acceptance", "drafter.policy"]


@pytest.mark.parametrize("name", pure_modules())
def test_pure_modules_import_nothing_impure(name: str) -> None:
    for imported in imports_of(EVERY[name]):
        if imported in PURE_NEIGHBOURS or imported in pure_modules():
            continue
        assert top(imported) in sys.stdlib_module_names, f"{name} imports {imported}"
        assert top(imported) not in IMPURE, f"{name} imports {imported}"


@pytest.mark.parametrize("name", pure_modules())
def test_pure_modules_do_not_open_print_or_await(name: str) -> None:
    for node in ast.walk(tree_of(EVERY[name])):
        assert not isinstance(node, ast.Await | ast.AsyncFunctionDef), f"{name}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "exec", "eval"}, f"{name}:{node.lineno}"


# ---------------------------------------------------------------- what an import costs

HEAVY = ("torch", "sglang", "transformers", "safetensors", "gguf", "accelerate", "numba")


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("gateway", HEAVY),
        ("gateway.compose", HEAVY),
        ("gateway.http.app", HEAVY),
        ("drafter.client", HEAVY),
        ("drafter.config", (*HEAVY, "numpy", "zmq")),
        ("verifier.embedded.client", (*HEAVY, "numpy")),
        ("verifier.embedded.config", (*HEAVY, "numpy", "zmq")),
        ("breakeven", HEAVY),
        ("breakeven.settings", (*HEAVY, "numpy", "zmq", "aiohttp")),
        ("wire.messages", (*HEAVY, "numpy", "zmq")),
    ],
)
def test_importing_a_light_module_loads_nothing_heavy(name: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {name}\nprint([m for m in {forbidden!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- every module


@pytest.mark.parametrize("name", EVERY)
def test_every_module_has_a_docstring_unless_its_tests_speak(name: str) -> None:
    if top(name) == "tests":
        return
    assert ast.get_docstring(tree_of(EVERY[name])), name


def declared_all(name: str) -> list[str] | None:
    for node in tree_of(EVERY[name]).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(node, ast.Assign | ast.AnnAssign):
            return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("name", [name for name in PRODUCT if not name.endswith("__main__")])
def test_every_module_says_what_it_exports_and_has_it(name: str) -> None:
    exported = declared_all(name)
    assert exported is not None, f"{name} has no __all__"
    assert len(exported) == len(set(exported)), name
    module = importlib.import_module(name)
    for each in exported:
        assert hasattr(module, each), f"{name}.{each}"


CLIS = {"breakeven.cli", "breakeven.doctor"}


@pytest.mark.parametrize("name", [name for name in PRODUCT if name not in CLIS])
def test_nothing_prints(name: str) -> None:
    for node in ast.walk(tree_of(EVERY[name])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{name}:{node.lineno}"


@pytest.mark.parametrize("name", PRODUCT)
def test_no_module_is_named_for_holding_anything(name: str) -> None:
    assert name.rpartition(".")[2] not in {"utils", "util", "common", "helpers", "misc"}


@pytest.mark.parametrize("name", PRODUCT)
def test_the_environment_is_read_by_configuration_only(name: str) -> None:
    # os.environ may be passed on to a child whole (the composition root) or read by the command line.
    entry_points = {"breakeven.settings", "breakeven.cli", "gateway.compose", "drafter.__main__"}
    if name in entry_points or name.endswith(".config"):
        return
    for node in ast.walk(tree_of(EVERY[name])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in {"environ", "getenv"}, f"{name}:{node.lineno}"
