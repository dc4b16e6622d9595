"""The package as a whole: contracts between its parts, what it ships, and how fast it answers."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dspark_jax
import torch_ref

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dspark_jax"
BUNDLED = PACKAGE / "bundled"
MOST_BUNDLED_BYTES = 16 * 2**20
MOST_HELP_S = 2.0

# Parts of a distribution that it pins to the version they go with.
COMPANIONS = {"jaxlib": "jax", "pydantic-core": "pydantic"}

COMMANDS = [
    "dspark_jax.serving.serve --help",
    "dspark_jax.serving.bench --help",
    "dspark_jax.serving.bench sweep --help",
    "dspark_jax.budget.simulate --help",
]


def test_import_contracts_are_kept():
    run = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_module_can_be_imported():
    names = [
        module.name
        for package in (dspark_jax, torch_ref)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith(".__main__")
    ]
    assert "dspark_jax.serving.serve" in names
    for name in names:
        importlib.import_module(name)


def test_every_module_of_the_package_has_a_docstring():
    bare = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.stat().st_size and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert bare == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick_and_leaves_jax_alone(command):
    module, *args = command.split()
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{module!r}, *{args}]\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as exit:\n"
        "    print('status', exit.code, 'jax' in sys.modules, file=sys.stderr)\n"
    )

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )

    run()  # writes the byte code that an installed package has
    before = _child_seconds()
    shown = run()
    seconds = _child_seconds() - before  # of the processor: other processes don't count
    assert "usage: " in shown.stdout
    assert shown.stderr == "status 0 False\n"
    assert seconds < MOST_HELP_S


def test_bundled_files_are_a_small_checkpoint():
    names = {path.name for path in BUNDLED.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert any(name.endswith(".safetensors") for name in names)
    total = sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file())
    assert total <= MOST_BUNDLED_BYTES


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[zipfile.ZipFile]:
    # A copy, because a build leaves its folders beside the sources.
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(
        PACKAGE, source / "dspark_jax", ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    for folder in ("torch_ref", "tests"):
        (source / folder).mkdir()
        (source / folder / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    out = tmp_path_factory.mktemp("wheel")
    run = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_is_the_package_and_nothing_else(wheel):
    info = next(n for n in wheel.namelist() if n.endswith("/METADATA")).rpartition("/")[0]
    shipped = {n for n in wheel.namelist() if not n.startswith(f"{info}/")}
    present = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == present
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert (
        wheel.read("dspark_jax/bundled/tokenizer.json") == (BUNDLED / "tokenizer.json").read_bytes()
    )


def test_wheel_requires_what_the_package_imports(wheel):
    """Every requirement is imported somewhere, and every import is required, at least by an extra."""
    metadata = next(n for n in wheel.namelist() if n.endswith("/METADATA"))
    lines = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist") or []
    required, by_extras = set(), set()
    for requirement in map(Requirement, lines):
        is_base = requirement.marker is None
        (required if is_base else by_extras).add(canonicalize_name(requirement.name))
    owners = packages_distributions()
    imported = [
        {COMPANIONS.get(owner, owner) for owner in map(canonicalize_name, owners[name])}
        for name in _imported_names()
        if name not in sys.stdlib_module_names and name != "dspark_jax"
    ]
    assert required <= set().union(*imported)
    assert [owner for owner in imported if not owner & (required | by_extras)] == []
    assert "torch" not in required


def _imported_names() -> set[str]:
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.partition(".")[0])
    return names


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
