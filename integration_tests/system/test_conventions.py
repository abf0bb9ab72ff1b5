"""Lengths, prints, exports and metadata of the four packages. Each check is shown to fail on planted source."""

import ast
import re
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from tools.qualified import BEGIN, END, written

from source_tree import (
    PACKAGES,
    ROOT,
    SOURCES,
    Source,
    defined,
    imports,
    nodes,
    parsed,
    report,
    statements,
    syntax_tree,
)

MAX_FILE_LINES = 600


MAX_FUNCTION_LINES = 60  # without the docstring and the classes in it, whose methods count for themselves


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _own_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    total = _length(node) - sum(_length(inner) for inner in node.body if isinstance(inner, ast.ClassDef))
    return total - (_length(node.body[0]) if ast.get_docstring(node, clean=False) is not None else 0)


def too_long(source: Source) -> list[str]:
    """The file, and each function in it, over the limit."""
    lines = len(source.text.splitlines())
    problems = [f"{source.module} has {lines} lines"] if lines > MAX_FILE_LINES else []
    for node in statements(parsed(source.text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if (own := _own_lines(node)) > MAX_FUNCTION_LINES:
                problems.append(f"{source.module}:{node.lineno} {node.name} has {own} lines")
    return problems


_MAY_PRINT = re.compile(r"\bprint\s*\(")


def prints(source: Source) -> list[str]:
    """Calls of print outside the command lines (modules named `cli`)."""
    if "cli" in source.module.split(".") or not _MAY_PRINT.search(source.text):
        return []
    return [
        f"{source.module}:{node.lineno} prints"
        for node in nodes(source.text)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def wrong_exports(source: Source) -> list[str]:
    """`__all__` that is not sorted (as ruff sorts), has a name twice, or is no literal list."""
    statements = parsed(source.text).body if "__all__" in source.text else []
    for statement in statements:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            try:
                names = ast.literal_eval(statement.value)
            except ValueError:
                return [f"{source.module}: __all__ is not a literal list"]
            problems = [f"{source.module}: __all__ names {n} twice" for n in set(names) if names.count(n) > 1]
            return problems + (
                [] if _sorted_by_ruff(source.text) else [f"{source.module}: __all__ not sorted"]
            )
    return []


def _sorted_by_ruff(text: str) -> bool:
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    command = [str(ruff), "check", "--isolated", "--quiet", "--select", "RUF022", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == 0


def _beside_the_sources() -> list[list[Source]]:
    """Tests, benchmarks, tools and examples, which mypy does not read: those of a folder import each other."""
    folders = [ROOT / "integration_tests", ROOT / "benchmarks", ROOT / "tools", ROOT / "examples"]
    folders += sorted((ROOT / "packages").glob("*/tests"))
    return [
        [
            Source(".".join(path.relative_to(folder).with_suffix("").parts), path.read_text())
            for path in sorted(folder.rglob("*.py"))
        ]
        for folder in folders
    ]


def missing_names(module: str, tree: ast.Module, modules: dict[str, set[str]]) -> list[str]:
    """Return the names that `from module import name` would not find, anywhere in the file."""
    return [
        f"{module}:{node.lineno} {node.module} has no {alias.name}"
        for node in statements(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
        if not {alias.name, "*"} & modules[node.module] and f"{node.module}.{alias.name}" not in modules
    ]


_MAY_IMPORT_A_TEST = re.compile(r"(?:from|import|import_module\()[^\n]*\btest_|^\s+test_\w+,?$", re.MULTILINE)


def imported_tests(source: Source) -> list[str]:
    """Imports of test modules: what several tests use stands in a helper, so each can be moved and read alone."""
    if not _MAY_IMPORT_A_TEST.search(source.text):
        return []
    return [
        f"{source.module}:{found.line} imports {found.name}"
        for found in imports(source.text)
        if any(part.startswith("test_") for part in found.name.split("."))
    ]


def test_files_and_functions_are_short():
    assert not report(too_long(source) for source in SOURCES)


def test_libraries_do_not_print():
    assert not report(prints(source) for source in SOURCES)


def test_exports_are_sorted_and_unique():
    assert not report(wrong_exports(source) for source in SOURCES)


def test_what_tests_and_tools_import_is_there():
    """Some of them are collected only where a tool is installed, and import only in the middle of a run."""
    ours = {source.module: defined(parsed(source.text)) for source in SOURCES}
    problems = []
    for folder in _beside_the_sources():
        trees = {source.module: syntax_tree(source.text) for source in folder}
        modules = ours | {module: defined(tree) for module, tree in trees.items()}
        problems += [missing_names(module, tree, modules) for module, tree in trees.items()]
    assert not report(iter(problems))


STARTED = ("__main__", "mca_config.reference", "mca_train.reference.keys")
"""Modules that are started with ``python -m``: commands, and writers of generated pages."""


def unused_modules(sources: Iterable[Source]) -> list[str]:
    """Return the modules that no other module imports, except families, which a table names, and started ones."""
    sources = list(sources)
    used = {each.name for source in sources for each in imports(source.text)}
    packages = {name.rpartition(".")[0] for name in used}
    return [
        source.module
        for source in sources
        if source.module.count(".")
        and source.module not in used | packages
        and not source.module.endswith(STARTED)
        and not source.module.startswith("mca_train.clients.")  # other programs import them
        and not any(module.startswith(f"{source.module}.") for module in used)
        and "\nFAMILY = " not in source.text
        and "\nFAMILIES = " not in source.text
    ]


def test_every_module_is_imported_by_another():
    assert not unused_modules(SOURCES)


def test_a_module_that_nothing_imports_is_caught():
    used, left = Source("mca_train.a", "import mca_train.b"), Source("mca_train.c", "")
    assert unused_modules([used, Source("mca_train.b", ""), left]) == ["mca_train.a", "mca_train.c"]


def test_nothing_imports_a_test_module():
    assert not report(imported_tests(source) for folder in _beside_the_sources() for source in folder)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_and_releasable_alone(package):
    home = ROOT / "packages" / package.replace("_", "-")
    assert (home / "src" / package / "py.typed").exists()
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        assert (home / name).stat().st_size > 200, f"{home.name}/{name} says nothing"
    assert (home / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    internal = [r for r in [*project["dependencies"], *chain.from_iterable(extras)] if r.startswith("mca-")]
    unbounded = [r for r in internal if not r.startswith(project["name"]) and not (">=" in r and "<" in r)]
    assert not unbounded, f"{home.name}: give these a version range: {unbounded}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_index_can_show_the_package(package):
    """Its page has no links into this repository, and says who wrote it and for whom."""
    home = ROOT / "packages" / package.replace("_", "-")
    links = re.findall(r"\]\(([^)]+)\)", (home / "README.md").read_text())
    assert not [link for link in links if "://" not in link and not link.startswith("#")]
    project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
    assert {"authors", "classifiers", "keywords", "description", "license", "readme"} <= set(project)


def test_a_long_file_and_a_long_function_are_caught():
    body = "    x = 1\n"
    assert too_long(Source("m", "x = 1\n" * 601)) and not too_long(Source("m", "x = 1\n" * 600))
    assert too_long(Source("m", f"def f():\n{body * 60}")) and not too_long(
        Source("m", f"def f():\n{body * 59}")
    )
    methods = ("        def a(self):\n" + "            x = 1\n" * 59) * 2
    assert not too_long(Source("m", f"def f():\n    class A:\n{methods}"))
    assert not too_long(Source("m", f'def f():\n    """A\n\n    B\n    """\n{body * 59}'))


def test_a_print_is_caught_except_in_a_command_line():
    assert prints(Source("mca_train.engine.engine", "def f():\n    print(1)"))
    assert not prints(Source("mca_train.cli", "print(1)"))


def test_an_import_that_finds_nothing_is_caught():
    text = "if X:\n    b, (c, *d) = e = 1\nelse:\n    from os import path as f\n"
    modules = {"a": defined(ast.parse(text)), "a.g": set()}

    def missing(text: str) -> list[str]:
        return missing_names("m", ast.parse(text), modules)

    assert not missing("from a import b, c, d, e, f, g\n")
    for place in ("def f():\n    {}", "class A:\n  def f(self):\n    if x: {}", "try: pass\nexcept A:\n  {}"):
        assert missing(place.format("from a import h")) == [f"m:{place.count(chr(10)) + 1} a has no h"]
    assert missing("match x:\n  case 1:\n    from a import h") and missing("for x in y:\n  from a import h")
    assert missing("with x:\n  pass\nwhile x:\n  pass\nelse:\n  from a import h")
    assert missing("try:\n  pass\nfinally:\n  from a import h")
    assert missing("from a import (\n    b as h,  # c\n    i as b,\n)\n") == ["m:1 a has no i"]
    modules["a"] = defined(ast.parse("def __getattr__(name): ..."))
    assert not missing("from a import h")


@pytest.mark.parametrize(
    "text",
    [
        "from test_lora import CASES",
        "def f():\n    import test_lora as lora",
        "from torch_checkpoint.test_torch_dist import save",
        "from torch_checkpoint import test_torch_dist",
        'importlib.import_module("test_lora")',
        "from torch_checkpoint import (\n    save,\n    test_torch_dist,\n)",
    ],
)
def test_an_import_of_a_test_module_is_caught(text):
    assert imported_tests(Source("test_m", text))
    assert not imported_tests(Source("test_m", "from tests_of import test\nimport testing.latest_test"))


@pytest.mark.parametrize("names", ['["b", "a"]', '["a", "a"]', "sorted(x)"])
def test_a_wrong_export_list_is_caught(names):
    assert wrong_exports(Source("m", f"a = b = 1\n__all__ = {names}\n"))
    assert not wrong_exports(Source("m", 'a = B = 1\n__all__ = ["B", "a"]\n'))


@pytest.mark.parametrize("tier", ["run", "qualify"])
def test_every_stage_of_ci_has_its_command(tier: str) -> None:
    """A stage is a function of the scripts, or a program."""
    text = (ROOT / ".ci" / "stages.sh").read_text() + (ROOT / ".ci" / tier).read_text()
    functions = set(re.findall(r"^(\w+)\(\) \{", text, re.MULTILINE))
    commands = re.findall(r'stage "(?:[^"$]|\$\(.*?\)|\$\{.*?\})*" (\S+)', text)
    assert len(commands) == len(re.findall(r'stage "', text)) > 5
    assert set(commands) <= {*functions, "uv", "env"}


def test_a_qualified_stage_replaces_its_row_and_keeps_the_others() -> None:
    page = (ROOT / "docs" / "validation" / "evidence.md").read_text()
    first = written(written(page, "stage a", "failed", "commit1"), "stage b", "passed", "commit1")
    again = written(first, "stage a", "passed", "commit2")
    assert "| stage a | passed | commit2 |\n| stage b | passed | commit1 |\n" in again
    assert "| stage a | failed" in first and "| stage a | failed" not in again
    assert page.partition(BEGIN)[0] == again.partition(BEGIN)[0]
    assert page.partition(END)[2] == again.partition(END)[2]
