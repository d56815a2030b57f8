"""Files stay within 600 lines and functions within 50; no module is called after nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
MAX_TEST_FUNCTION_LINES = 80
EMPTY_NAMES = {"utils", "helpers", "common", "misc"}


def _python_files(root: Path) -> list[Path]:
    files = [
        path
        for folder in ("src", "tests", "scripts", "tools")
        for path in (root / folder).rglob("*.py")
    ]
    assert files
    return sorted(files)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, *, with_signature: bool) -> int:
    """Lines of a function without its decorators and its docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    lines = function.end_lineno - (function.lineno if with_signature else first.lineno) + 1
    if has_docstring and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_files_are_short(root: Path) -> None:
    long = {
        str(path.relative_to(root)): lines
        for path in _python_files(root)
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_functions_are_short(root: Path) -> None:
    long = []
    for path in _python_files(root):
        folders = path.relative_to(root).parts
        limit = MAX_TEST_FUNCTION_LINES if "tests" in folders else MAX_FUNCTION_LINES
        # The signature of a command is its list of options.
        with_signature = "cli" not in folders
        for function in _functions(ast.parse(path.read_text())):
            lines = _own_lines(function, with_signature=with_signature)
            if lines > limit:
                long.append(f"{path.relative_to(root)}:{function.lineno} {function.name} {lines}")
    assert not long


def test_modules_are_named_after_something(root: Path) -> None:
    nameless = [
        str(path.relative_to(root)) for path in _python_files(root) if path.stem in EMPTY_NAMES
    ]
    assert not nameless


def test_modules_say_what_they_own(root: Path) -> None:
    silent = [
        str(path.relative_to(root))
        for path in (root / "src").rglob("*.py")
        if ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not silent
