"""What the docs name exists: links, modules, metrics, commands, flags, make targets, versions."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import kvferry
from kvferry import errors
from kvferry.cli.main import build_command

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_MODULE = re.compile(r"^[a-z_]+(?:/[a-z_{},]+)*/(?:[a-z_{},]+\.py)?$")
_METRIC = re.compile(r"\bkvferry_[a-z0-9_]+\b")
_COMMAND = re.compile(r"(?:^|(?<=[\s`$]))kvferry((?: [^\s`|&;<>]+)*)", re.MULTILINE)
_MAKE = re.compile(r"(?:^|(?<=[\s`$]))make ([a-z]+)\b", re.MULTILINE)
_TREE_LINE = re.compile(r"^[│├└─ ]*([A-Z][A-Za-z]+Error)\b")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def _code_parts(text: str) -> list[str]:
    return [part.strip("`").replace("\\\n", " ") for part in _CODE.findall(text)]


def _slug(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def _slugs(path: Path) -> set[str]:
    return {_slug(line.lstrip("#")) for line in path.read_text().splitlines() if line[:1] == "#"}


def test_links_lead_somewhere(root: Path) -> None:
    broken = []
    for document in _documents(root):
        for target in _LINK.findall(document.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            name, _, anchor = target.partition("#")
            path = (document.parent / name).resolve() if name else document
            missing_anchor = anchor and path.suffix == ".md" and anchor not in _slugs(path)
            if not path.exists() or missing_anchor:
                broken.append(f"{document.name}: {target}")
    assert not broken


def _expand(name: str) -> list[str]:
    """Expand ``{a,b}`` as a shell does."""
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(combination) for combination in itertools.product(*choices)]


def test_modules_exist(root: Path) -> None:
    package = root / "src" / "kvferry"
    missing = [
        f"{document.name}: {name}"
        for document in _documents(root)
        for part in _code_parts(document.read_text())
        if _MODULE.match(part)
        for name in _expand(part)
        if not ((package / name).exists() or (root / name).exists())
    ]
    assert not missing


def _defined_names(root: Path) -> set[str]:
    """Classes, and ``Class.method``, of the package."""
    names: set[str] = set()
    for path in (root / "src" / "kvferry").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members = [m for m in node.body if isinstance(m, _FUNCTIONS)]
                names |= {node.name, *(f"{node.name}.{member.name}" for member in members)}
    return names


def _functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, _FUNCTIONS)}


def test_functions_on_the_ways_through_the_tree_exist(root: Path) -> None:
    defined = _defined_names(root)
    page = (root / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([A-Z][A-Za-z]+\.[a-z_]+)`", page)
    assert len(named) > 20
    assert set(named) <= defined
    for name, function in re.findall(r"`([a-z_/]+\.py)` `([a-z_]+)`", page):
        assert function in _functions_of(root / "src" / "kvferry" / name), f"{name} {function}"


def test_metrics_exist(root: Path) -> None:
    source = "\n".join(path.read_text() for path in (root / "src").rglob("*.py"))
    missing = [
        f"{document.name}: {name}"
        for document in _documents(root)
        for part in _code_parts(document.read_text())
        for name in _METRIC.findall(part)
        if re.sub(r"_(total|bucket|sum|count|created)$", "", name) not in source
    ]
    assert not missing


def _complaint(words: list[str]) -> str | None:
    """What is wrong with a command line that a document shows, if anything."""
    command: click.Command = build_command()
    context = click.Context(command)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if found is None:
            return f"no command {words[0]!r}"
        command, words = found, words[1:]
        context = click.Context(command)
    known = {
        flag
        for parameter in command.get_params(context)
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    for word in words:
        flag = word.partition("=")[0].rstrip(".,:)…")
        if re.match(r"^--?[a-z]", flag) and flag not in known:
            return f"{command.name} has no {flag}"
    return None


def test_commands_and_flags_exist(root: Path) -> None:
    wrong = [
        f"{document.name}: kvferry{line}: {complaint}"
        for document in _documents(root)
        for part in _code_parts(document.read_text())
        for line in _COMMAND.findall(part)
        if (complaint := _complaint(line.split()))
    ]
    assert not wrong


def test_commands_that_do_not_exist_are_noticed() -> None:
    assert _complaint(["vresion"]) == "no command 'vresion'"
    assert _complaint(["version", "--loud"]) == "version has no --loud"
    assert _complaint(["version", "--help"]) is None


def test_make_targets_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for document in _documents(root)
        for part in _code_parts(document.read_text())
        for target in _MAKE.findall(part)
    }
    assert named
    assert named <= targets


def test_every_flag_of_the_cluster_and_bench_commands_is_explained() -> None:
    silent = []
    top = build_command()
    context = click.Context(top)
    for name in top.list_commands(context):
        command = top.get_command(context, name)
        assert command is not None
        silent += [
            f"{name} {option.opts[0]}"
            for option in command.params
            if isinstance(option, click.Option) and not option.help
        ]
    assert not silent


def test_versions_agree(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## \[?([0-9][^\]\s]*)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == kvferry.__version__ == project["version"]


def _tree_names(text: str) -> list[str]:
    return [found[1] for line in text.splitlines() if (found := _TREE_LINE.match(line))]


def _class_tree(base: type[BaseException]) -> list[str]:
    names = [base.__name__]
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            names += _class_tree(child)
    return names


@pytest.mark.parametrize("source", ["module", "page"])
def test_drawn_exception_tree_is_the_real_one(root: Path, source: str) -> None:
    page = (root / "docs" / "errors.md").read_text()
    text = (errors.__doc__ or "") if source == "module" else page
    assert _tree_names(text) == _class_tree(errors.FerryError)


def test_tables_of_options_are_those_of_the_code(root: Path) -> None:
    script = root / "scripts" / "render_option_tables.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
