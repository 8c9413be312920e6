"""The rooms' import arrows, as docs/architecture.md draws them, and the processes that stay free of torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "firsttoken"
DOCS = ROOT / "docs" / "architecture.md"
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))

TORCH_FREE = (
    "checkpoint",
    "cli",
    "core",
    "diagnose",
    "frontend",
    "grammar",
    "kvcache",
    "observability",
    "scheduler",
    "server",
    "text",
    "transport",
)
# The one file of a torch-free room that moves device memory.
TORCH_EXCEPTIONS = frozenset({"kvcache/torch_copy.py"})


@dataclass(frozen=True)
class Arrows:
    """Rooms that a room may import anywhere, and those only inside a function."""

    anywhere: frozenset[str]
    in_functions: frozenset[str]


@dataclass(frozen=True)
class Import:
    """One imported module, absolute; ``names`` are what ``from module import names`` takes."""

    module: str
    names: tuple[str, ...]
    line: int
    in_function: bool


def documented_arrows(text: str) -> dict[str, Arrows]:
    """The table's third column: what follows a semicolon holds inside functions only; brackets explain."""
    rooms: dict[str, Arrows] = {}
    for name, cell in re.findall(r"^\| `(\w+)/` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE):
        plain, _, lazy = re.sub(r"\([^)]*\)", "", cell).partition(";")
        anywhere = frozenset(ROOMS) if plain.strip() == "any" else frozenset(re.findall(r"\w+", plain)) & set(ROOMS)
        rooms[name] = Arrows(anywhere, frozenset(re.findall(r"\w+", lazy)) & set(ROOMS))
    return rooms


def imports_of(source: str, package: str) -> list[Import]:
    """Every import of a module in ``package`` (its dotted parent), relative ones made absolute."""
    found: list[Import] = []

    def walk(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, (), node.lineno, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = package.split(".")
                module = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [module])])
            found.append(Import(module, tuple(alias.name for alias in node.names), node.lineno, in_function))
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(ast.parse(source), False)
    return found


def targets(found: Import) -> list[str]:
    """The rooms (or root modules) that an import reaches."""
    parts = found.module.split(".")
    if parts[0] != "firsttoken":
        return []
    return [parts[1]] if len(parts) > 1 else list(found.names or ("firsttoken",))


def violations(room: str, source: str, package: str, arrows: Arrows) -> list[str]:
    """Imports that the arrows do not allow, each as ``line N: ...``."""
    wrong = []
    for found in imports_of(source, package):
        for target in targets(found):
            if target in (room, "version") or target in arrows.anywhere:
                continue
            if target in arrows.in_functions and found.in_function:
                continue
            where = " outside a function" if target in arrows.in_functions else ""
            wrong.append(f"line {found.line}: {room} imports {target}{where}")
    return wrong


def torch_imports(source: str, package: str) -> list[str]:
    return [
        f"line {found.line}: imports {found.module}"
        for found in imports_of(source, package)
        if found.module.split(".")[0] in ("torch", "triton")
    ]


def files(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).parent.parts)


ARROWS = documented_arrows(DOCS.read_text(encoding="utf-8"))


def test_the_table_has_a_row_for_each_room_and_no_other() -> None:
    assert sorted(ARROWS) == ROOMS


def test_arrows_point_one_way() -> None:
    """Anywhere-arrows form no circle: taking away rooms without arrows left must empty the table."""
    left = {room: set(arrows.anywhere) - {room} for room, arrows in ARROWS.items() if room != "cli"}
    while left:
        leaves = {room for room, wanted in left.items() if not wanted & left.keys()}
        assert leaves, f"a circle among {sorted(left)}"
        for room in leaves:
            del left[room]


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_its_row_allows(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} {text}"
        for path in files(room)
        for text in violations(room, path.read_text(encoding="utf-8"), package_of(path), ARROWS[room])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_room_is_torch_free(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} {text}"
        for path in files(room)
        if path.relative_to(SOURCE).as_posix() not in TORCH_EXCEPTIONS
        for text in torch_imports(path.read_text(encoding="utf-8"), package_of(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module",
    [
        "firsttoken",
        "firsttoken.cli.main",
        "firsttoken.frontend.async_llm",
        "firsttoken.frontend.llm",
        "firsttoken.server.app",
        "firsttoken.server.run",
        "firsttoken.scheduler",
        "firsttoken.text.tokenizer",
    ],
)
def test_importing_it_loads_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = sorted({'torch', 'triton', 'transformers'} & sys.modules.keys())\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_file_is_too_long() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in SOURCE.rglob("*.py")
        if (lines := path.read_text(encoding="utf-8").count("\n")) > 500
    }
    assert not long


def test_nothing_unpickles_or_evaluates() -> None:
    banned = re.compile(r"^\s*(import|from)\s+(pickle|dill|cloudpickle|marshal|shelve)\b|(?<![.\w])(eval|exec)\(", re.M)
    hits = [
        f"{path.relative_to(ROOT)}: {match.group().strip()}"
        for path in SOURCE.rglob("*.py")
        for match in banned.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not hits


# ------------------------------------------------- the checker itself finds what it should


def test_checker_reads_the_table() -> None:
    table = (
        "| `core/` | words | nothing |\n"
        "| `frontend/` | LLM | core, text; `engine` only inside the functions that start one |\n"
        "| `executor/` | rows | core, kvcache (the engine's interface) |\n"
        "| `cli/` | commands | any |\n"
    )
    arrows = documented_arrows(table)
    assert arrows["core"] == Arrows(frozenset(), frozenset())
    assert arrows["frontend"] == Arrows(frozenset({"core", "text"}), frozenset({"engine"}))
    assert arrows["executor"].anywhere == {"core", "kvcache"}
    assert arrows["cli"].anywhere == set(ROOMS)


@pytest.mark.parametrize(
    "source",
    [
        "import firsttoken.engine.loop",
        "from firsttoken.engine import loop",
        "from firsttoken import engine",
        "from ..engine import loop",
        "from firsttoken import LLM",
        "def f():\n    import firsttoken.server.run",
        "if TYPE_CHECKING:\n    from firsttoken.models import llama",
    ],
)
def test_checker_finds_a_wrong_arrow(source: str) -> None:
    arrows = Arrows(frozenset({"core"}), frozenset({"engine"}))
    assert violations("frontend", source, "firsttoken.frontend", arrows)


@pytest.mark.parametrize(
    "source",
    [
        "from firsttoken.core.errors import EngineDead",
        "from firsttoken.version import __version__",
        "from . import llm",
        "from .llm import LLM",
        "def f():\n    from firsttoken.engine.launch import start_thread",
        "import numpy",
    ],
)
def test_checker_lets_a_right_arrow_pass(source: str) -> None:
    arrows = Arrows(frozenset({"core"}), frozenset({"engine"}))
    assert not violations("frontend", source, "firsttoken.frontend", arrows)


@pytest.mark.parametrize("source", ["import torch", "from torch.nn import functional", "def f():\n    import torch"])
def test_checker_finds_torch(source: str) -> None:
    assert torch_imports(source, "firsttoken.text")
