"""The conventions of the four packages, checked on their source. Each check is shown to fail on planted source."""

import ast
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mca_config", "mca_convert", "mca_models", "mca_train")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without the docstring and the classes in it, whose methods count for themselves

HEAVY = (
    "accelerate",
    "apex",
    "datasets",
    "megatron",
    "peft",
    "safetensors",
    "torch",
    "transformer_engine",
    "transformers",
    "triton",
)
IMPORT_NAMES = {"megatron-core": "megatron", "pyyaml": "yaml", "transformer-engine": "transformer_engine"}
TRAINING = ("mca_config.training", "mca_config._hf_arguments")
EXTRA_ONLY = (*TRAINING, "mca_models.megatron")


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


@dataclass(frozen=True)
class Arrow:
    """Modules under `inside` (but not under `outside`) may not import anything under `targets`."""

    inside: str
    targets: tuple[str, ...]
    outside: tuple[str, ...] = ()


ARROWS = (
    Arrow("mca_config", ("mca_convert", "mca_models", "mca_train")),
    Arrow("mca_models", ("mca_convert", "mca_train")),
    Arrow("mca_train", ("mca_convert",)),
    Arrow("mca_convert", ("mca_train", *EXTRA_ONLY, *HEAVY)),
    Arrow("mca_config", TRAINING, outside=TRAINING),
    Arrow("mca_config", HEAVY, outside=TRAINING),
    Arrow("mca_models", (*TRAINING, *HEAVY), outside=("mca_models.megatron",)),
    Arrow("mca_models", ("mca_models.megatron",), outside=("mca_models.megatron",)),
)


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
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _names(node: ast.AST) -> Iterator[str]:
    """The modules that one statement or call imports."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            # `from a import b` may name the module a.b
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(function) in ("importlib.import_module", "import_module", "__import__"):
                yield name


def imports(text: str) -> list[Import]:
    """Every import in a module, wherever it stands; relative ones are ruff's business (TID)."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> None:
        found.extend(Import(name, node.lineno, lazy, typing_only) for name in _names(node))
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for child in node.body:
                visit(child, lazy, True)
            for child in node.orelse:
                visit(child, lazy, typing_only)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, lazy, typing_only)

    visit(ast.parse(text), False, False)
    return found


def wrong_arrows(source: Source) -> list[str]:
    """Imports against an arrow. A package's `__init__` may offer its extra's names lazily."""
    problems = []
    for arrow in ARROWS:
        if not under(source.module, (arrow.inside,)) or under(source.module, arrow.outside):
            continue
        for found in imports(source.text):
            offered = source.module == source.package and (found.lazy or found.typing_only)
            if offered and under(found.name, EXTRA_ONLY) and under(found.name, (source.package,)):
                continue
            if under(found.name, arrow.targets):
                problems.append(f"{source.module}:{found.line} imports {found.name}")
    return problems


def _import_names(requirements: list[str]) -> set[str]:
    names = set()
    for requirement in requirements:
        distribution = requirement
        for stop in "[<>=!~ ;":
            distribution = distribution.partition(stop)[0]
        distribution = distribution.lower()
        names.add(IMPORT_NAMES.get(distribution, distribution.replace("-", "_")))
    return names


def declared(package: str) -> tuple[set[str], set[str]]:
    """Import names that a package declares: always there, and with its extras."""
    text = (ROOT / "packages" / package.replace("_", "-") / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    base = _import_names(project.get("dependencies", []))
    extras = project.get("optional-dependencies", {}).values()
    return base, base.union(*map(_import_names, extras))


def undeclared_imports(source: Source, base: set[str], with_extras: set[str]) -> list[str]:
    """Third-party imports that the package's metadata does not ask for; an extra's must be lazy or in its module."""
    own = {source.package} | set(sys.stdlib_module_names)
    in_extra = under(source.module, EXTRA_ONLY)
    return [
        f"{source.module}:{found.line} imports {found.name}, which {source.package} does not declare"
        for found in imports(source.text)
        if not found.typing_only
        and found.name.partition(".")[0] not in own | (with_extras if in_extra or found.lazy else base)
    ]


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _own_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    total = _length(node) - sum(_length(inner) for inner in node.body if isinstance(inner, ast.ClassDef))
    return total - (_length(node.body[0]) if ast.get_docstring(node, clean=False) is not None else 0)


def too_long(source: Source) -> list[str]:
    """The file, and each function in it, over the limit."""
    lines = len(source.text.splitlines())
    problems = [f"{source.module} has {lines} lines"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if (own := _own_lines(node)) > MAX_FUNCTION_LINES:
                problems.append(f"{source.module}:{node.lineno} {node.name} has {own} lines")
    return problems


def prints(source: Source) -> list[str]:
    """Calls of print outside the command lines (modules named `cli`)."""
    if "cli" in source.module.split("."):
        return []
    return [
        f"{source.module}:{node.lineno} prints"
        for node in ast.walk(ast.parse(source.text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]


def wrong_exports(source: Source) -> list[str]:
    """`__all__` that is not sorted (as ruff sorts), has a name twice, or is no literal list."""
    statements = ast.parse(source.text).body
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


def _all(problems: Iterator[list[str]]) -> str:
    return "\n".join(problem for found in problems for problem in found)


def test_imports_follow_the_arrows():
    assert not _all(wrong_arrows(source) for source in SOURCES)


def test_every_import_is_declared():
    assert not _all(undeclared_imports(source, *declared(source.package)) for source in SOURCES)


def test_files_and_functions_are_short():
    assert not _all(too_long(source) for source in SOURCES)


def test_libraries_do_not_print():
    assert not _all(prints(source) for source in SOURCES)


def test_exports_are_sorted_and_unique():
    assert not _all(wrong_exports(source) for source in SOURCES)


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


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("mca_config.layout", "import mca_models"),
        ("mca_config.layout", "def f():\n    from mca_train import x"),
        ("mca_models.weights.rules", "from mca_convert.plan import Plan"),
        ("mca_models.megatron.load", "import mca_train"),
        ("mca_train.engine", "from mca_convert import convert"),
        ("mca_convert.cli", "import mca_train.cli"),
        ("mca_convert.cli", "from mca_models import megatron"),
        ("mca_convert.cli", "def f():\n    import torch"),
        ("mca_convert.cli", "import importlib\nimportlib.import_module('torch.nn')"),
        ("mca_config.layout", "if TYPE_CHECKING:\n    import transformers"),
        ("mca_config", "from mca_config.training import TrainingArguments"),
        ("mca_config.arguments", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("mca_models.templates.llama", "from torch import nn"),
        ("mca_models.checkpoint.placement", "def f():\n    import mca_models.megatron.load"),
        ("mca_models.megatronish", "import megatron.core"),
        ("mca_models", "from mca_models.megatron import AutoModel"),
    ],
)
def test_a_planted_import_is_caught(module, text):
    assert wrong_arrows(Source(module, text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("mca_config.training", "import torch, transformers"),
        ("mca_models.megatron.load", "from megatron.core import parallel_state"),
        ("mca_models", "def __getattr__(name):\n    from mca_models.megatron import AutoModel"),
        ("mca_models", "if TYPE_CHECKING:\n    from mca_models.megatron import AutoModel"),
        ("mca_convert.plan", "from mca_models.checkpoint import placement\nimport numpy"),
        ("mca_train.engine", "from mca_models.megatron import platform\nimport torchlike"),
    ],
)
def test_a_rightful_import_passes(module, text):
    assert not wrong_arrows(Source(module, text))


def test_an_undeclared_import_is_caught():
    text = "import json\nimport numpy\nfrom yaml import safe_load\n"
    assert len(undeclared_imports(Source("mca_convert.x", text), {"numpy"}, {"numpy", "yaml"})) == 1
    lazily = "def f():\n    import yaml"
    assert not undeclared_imports(Source("mca_convert.x", lazily), {"numpy"}, {"numpy", "yaml"})
    assert not undeclared_imports(Source("mca_models.megatron.x", text), {"numpy"}, {"numpy", "yaml"})


def test_requirements_are_read_as_import_names():
    base, with_extras = declared("mca_models")
    assert base == {"mca_config", "ml_dtypes", "numpy"}
    assert {"torch", "megatron", "transformer_engine"} <= with_extras


def test_a_long_file_and_a_long_function_are_caught():
    body = "    x = 1\n"
    assert too_long(Source("m", "x = 1\n" * 401)) and not too_long(Source("m", "x = 1\n" * 400))
    assert too_long(Source("m", f"def f():\n{body * 60}")) and not too_long(
        Source("m", f"def f():\n{body * 59}")
    )
    methods = ("        def a(self):\n" + "            x = 1\n" * 59) * 2
    assert not too_long(Source("m", f"def f():\n    class A:\n{methods}"))
    assert not too_long(Source("m", f'def f():\n    """A\n\n    B\n    """\n{body * 59}'))


def test_a_print_is_caught_except_in_a_command_line():
    assert prints(Source("mca_train.engine", "def f():\n    print(1)"))
    assert not prints(Source("mca_train.cli", "print(1)"))


@pytest.mark.parametrize("names", ['["b", "a"]', '["a", "a"]', "sorted(x)"])
def test_a_wrong_export_list_is_caught(names):
    assert wrong_exports(Source("m", f"a = b = 1\n__all__ = {names}\n"))
    assert not wrong_exports(Source("m", 'a = B = 1\n__all__ = ["B", "a"]\n'))
