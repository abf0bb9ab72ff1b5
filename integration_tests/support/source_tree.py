"""The source files of the four packages, and what they import."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


PACKAGES = ("mca_config", "mca_convert", "mca_models", "mca_train")


@dataclass(frozen=True)
class Source:
    """One module: its dotted name and its text."""

    module: str
    text: str

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Import:
    """One imported module; `typing_only` inside `if TYPE_CHECKING`, `lazy` inside a function."""

    name: str
    line: int
    lazy: bool = False
    typing_only: bool = False


def under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _source_files() -> list[tuple[Path, Source]]:
    found = []
    for package in PACKAGES:
        src = ROOT / "packages" / package.replace("_", "-") / "src"
        for path in sorted((src / package).rglob("*.py")):
            parts = path.relative_to(src).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append((path, Source(module, path.read_text())))
    return found


FILES = _source_files()


SOURCES = [source for _, source in FILES]


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="typing"), attr=name):
            return name == "TYPE_CHECKING"
    return False


def _names(node: ast.AST) -> Iterator[str]:
    """The modules that one statement or call imports."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            # `from a import b` may name the module a.b
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Call(
            func=(
                ast.Attribute(value=ast.Name(id="importlib"), attr="import_module")
                | ast.Name(id="import_module" | "__import__")
            ),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


def syntax_tree(text: str) -> ast.Module:
    """Return a new syntax tree of a module; searches for garbage would take three times as long as the parser."""
    searched = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if searched:
            gc.enable()


@cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a module, which all checks of a process share: never change it."""
    return syntax_tree(text)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield ``tree`` and the statements in it at any depth, with handlers and cases: a twentieth of all nodes."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += _statements_in(node)


def _statements_in(node: ast.AST) -> list[ast.AST]:
    """Return the statements, handlers and cases directly in a module or statement."""
    bodies = ("body", "orelse", "handlers", "finalbody", "cases")
    return [child for name in bodies for child in getattr(node, name, ())]


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax tree of a module."""
    return tuple(ast.walk(parsed(text)))


@cache
def imports(text: str) -> list[Import]:
    """Every import in a module, wherever it stands; relative ones are ruff's business (TID)."""
    found: list[Import] = []
    children = ast.iter_child_nodes if "import_module" in text or "__import__" in text else _statements_in

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> None:
        found.extend(Import(name, node.lineno, lazy, typing_only) for name in _names(node))
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                visit(child, lazy, True)
            for child in node.orelse:
                visit(child, lazy, typing_only)
            return
        for child in children(node):
            visit(child, lazy, typing_only)

    visit(parsed(text), False, False)
    return found


def defined(tree: ast.Module) -> set[str]:
    """The names that a module has once imported, whichever branch sets them; `*` where it makes them itself."""
    names: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            if not isinstance(node, ast.expr) or isinstance(
                node, (ast.Tuple, ast.List, ast.NamedExpr, ast.Starred)
            ):
                waiting.append(node)
    return names | ({"*"} if "__getattr__" in names else set())


def report(problems: Iterator[list[str]]) -> str:
    return "\n".join(problem for found in problems for problem in found)
