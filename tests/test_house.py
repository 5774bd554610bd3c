"""Rules of the house that no tool checks: see docs/design.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import kvstore
from tests.unsafe import unsafe

PACKAGE = Path(kvstore.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in SOURCES]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 10
ENDS_THE_PROCESS = {"sys.exit", "SystemExit", "exit", "quit"}
MAY_USE = {
    # vLLM's default hash of keys is one of pickled bytes; nothing reads them back.
    "keys.py": {"pickle", "pickle.dumps"},
    # Engines tested by several processes, which are children of the test.
    "testing/processes.py": {
        *("multiprocessing", "multiprocessing.get_context"),
        "multiprocessing.connection.Connection",
        *("ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
    },
}
EMPTY_WORDS = ("Manager", "Helper", "Util", "Handler")


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without those of the functions inside of it."""
    inner = 0
    for node in ast.walk(function):
        if node is not function and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner += (node.end_lineno or 0) - node.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - inner


def used_names(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, (ast.Attribute, ast.Name)):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_files_and_functions_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    long = [function.name for function in functions(path) if lines(function) > MAX_FUNCTION_LINES]
    assert long == []


def test_half_of_the_functions_are_very_short() -> None:
    assert median(lines(f) for path in SOURCES for f in functions(path)) <= MAX_MEDIAN_LINES


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_only_the_command_line_ends_the_process(path: Path) -> None:
    if path != PACKAGE / "cli.py":
        assert not used_names(path) & ENDS_THE_PROCESS


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    allowed = MAY_USE.get(str(path.relative_to(PACKAGE)), set())
    assert unsafe(path.read_text(), allowed) == []


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_classes_are_named_for_what_they_are(path: Path) -> None:
    classes = [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]
    assert [name for name in classes if name.endswith(EMPTY_WORDS)] == []


def test_design_page_names_every_room_and_no_other() -> None:
    page = (PACKAGE.parent / "docs" / "design.md").read_text()
    rooms = page.split("## Rooms")[1].split("Planned rooms")[0]
    named = set(re.findall(r"`(\w+(?:\.py|/))`", rooms))
    there = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert named == there


def test_pages_point_at_files_that_exist() -> None:
    root = PACKAGE.parent
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
