"""Imports between the four packages, checked on their source. Each check is shown to fail on planted source."""

import ast
import re
import sys
import tomllib
from dataclasses import dataclass

import pytest

from source_tree import ROOT, SOURCES, Import, Source, imports, nodes, report, under

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


IMPORT_NAMES = {
    "megatron-core": "megatron",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "transformer-engine": "transformer_engine",
}


TRAINING = ("mca_config.training",)


EXTRA_ONLY = (*TRAINING, "mca_config.yaml_text", "mca_models.megatron")


PLUGINS = {
    "mca_train.clients.chunk_lora": ("peft",),
    "mca_train.clients.roll": ("peft",),
    "mca_train.clients.verl": ("peft", "tensordict", "verl"),
}
"""Plugins, which another program imports, and the packages that come with that program."""


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


# From the ground up. A module imports from rungs below its own, and from its own room.
LADDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "mca_config": (
        ("types",),
        ("redaction",),
        ("errors", "lazy_names", "printable", "_megatron_keys"),
        ("fields", "files", "streams", "yaml_text"),
        ("model",),
        ("layout", "parser"),
        ("_roll", "arguments", "pipeline", "program"),
        ("model_config", "reference", "training_checks"),
        ("checks", "training"),
    ),
    "mca_convert": (
        ("flags", "interrupts", "pool"),
        ("fills", "output", "request"),
        ("reader",),
        ("compare", "engine", "non_finite"),
        ("conversion", "inspection"),
        ("forecast",),
        ("api",),
        ("commands",),
        ("cli",),
        ("__main__",),
    ),
    "mca_models": (
        ("weights", "hub"),
        ("templates", "media"),
        ("storage",),
        ("quantization",),
        ("checkpoint",),
        ("torch_checkpoint",),
        ("checkpoint_kinds",),
        ("lora",),
        ("megatron",),
    ),
    "mca_models.megatron": (
        ("names", "tensors", "types"),
        ("layers",),
        ("platform",),
        ("features",),
        ("distributed",),
        ("factory",),
        ("state", "forward"),
        ("log_probs",),
        ("virtual_models",),
        ("auto",),
        ("peft",),
    ),
    "mca_train": (
        ("types",),
        ("groups",),
        ("launch",),
        ("config",),
        ("data", "lr_schedule"),
        ("plan",),
        ("batching",),
        ("losses",),
        ("engine",),
        ("metrics",),
        ("checkpoint",),
        ("trainer",),
        ("tasks",),
        ("reference",),
        ("clients",),
        ("dry_run",),
        ("plots",),
        ("report",),
        ("run",),
        ("cli",),
        ("__main__",),
    ),
}


# At the border of libraries without types; elsewhere `Any` as a name may become rarer, not more frequent.
BORDER = ("mca_config.types", "mca_models.megatron.types", "mca_train.types")


ANY = {
    "mca_config.arguments._additional": 1,
    "mca_config.parser": 1,
    "mca_config.fields": 5,
    "mca_config.lazy_names": 2,
    "mca_config.reference": 1,
    "mca_convert.commands": 3,
    "mca_models.megatron.features.sparse_mixer": 2,
    "mca_models.megatron.platform.recompute": 10,
    "mca_models.storage.safetensors": 1,
    "mca_models.torch_checkpoint.allowed_globals": 1,
    "mca_models.weights.arrays": 5,
    "mca_train.config.arguments": 1,
    "mca_train.dry_run.fake_values": 16,
    "mca_train.dry_run.step": 7,
    "mca_train.dry_run.tracker": 30,
    "mca_train.lr_schedule": 1,
    "mca_train.plots": 4,
    "mca_train.plots.figures": 1,
}


# Modules of mca-train that import our own modules in functions, and the start-up that asks for it (seconds of a CPU).
LAZY = {
    "mca_train.cli": "a command imports only what it runs",
    "mca_train.clients": "the client's own packages may be missing",
    "mca_train.config.early_arguments": "only a source of another form needs the class itself, which takes 9 s",
    "mca_train.config.model": "an architecture is read, and checked, before torch is imported",
    "mca_train.config.model_parts": "the parts of a model are read before torch is imported",
    "mca_train.run.settings": "TrainingArguments takes 9 s; wrong keys and missing files are reported before",
    "mca_train.dry_run.stages": "it is imported once for all forks, after megatron is prepared",
    "mca_train.launch.environment": "the launcher limits the threads before torch is imported, which takes 2 s",
    "mca_train.reference": "help and completion take 0.1 s",
    "mca_train.run.plan_command": "only --plot and --dry_run need figures and the dry run",
    "mca_train.run.train": "a wrong configuration is reported before the trainer is imported, which takes 10 s",
    "mca_train.tasks": "help imports every kind of run; data and losses take 3 s",
}


def lazy_imports(source: Source) -> list[str]:
    """Imports of our own modules in functions of mca-train that no start-up asks for."""
    if source.package != "mca_train" or under(source.module, tuple(LAZY)):
        return []
    own = tuple(LADDERS)
    return [
        f"{source.module}:{found.line} imports {found.name} in a function"
        for found in imports(source.text)
        if found.lazy and under(found.name, own)
    ]


def more_any(source: Source) -> list[str]:
    """Report a module inside the borders with more `Any` than `ANY` allows."""
    if source.module in BORDER or "Any" not in source.text:
        return []
    found = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes(source.text))
    found += sum(isinstance(node, ast.Attribute) and node.attr == "Any" for node in nodes(source.text))
    allowed = ANY.get(source.module, 0)
    return [f"{source.module} has {found} Any, allowed are {allowed}"] if found > allowed else []


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


def _room(module: str, house: str) -> str:
    """The part of ``module`` right below ``house``; empty for the house itself."""
    return module.removeprefix(house).removeprefix(".").partition(".")[0] if under(module, (house,)) else ""


def arrows_up(source: Source) -> list[str]:
    """Imports of a room on the same rung or above, typing included; rooms that stand on no rung.

    The public names of a house stand above all its rooms: a room takes what it needs from where it is made.
    """
    problems = []
    for house, rungs in LADDERS.items():
        height = {room: number for number, rung in enumerate(rungs) for room in rung}
        room = _room(source.module, house)
        if not room:
            continue
        if room not in height:
            problems.append(f"{source.module} stands on no rung of {house}")
            continue
        for found in imports(source.text):
            target = _room(found.name, house)
            if not under(found.name, (house,)) or target == room:
                continue
            if height.get(target, len(rungs)) >= height[room]:
                problems.append(f"{source.module}:{found.line} imports {found.name}, which is not below it")
    return problems


def circles(sources: list[Source]) -> list[list[str]]:
    """Groups of modules that import one another, typing included."""
    known = {source.module for source in sources}
    graph = {
        source.module: {
            name if name in known else name.rpartition(".")[0] for name in map(_name, imports(source.text))
        }
        & known - {source.module}
        for source in sources
    }
    reached = {module: _reach(graph, module) for module in graph}
    groups = {
        frozenset(other for other in reached[m] if m in reached[other]) for m in graph if m in reached[m]
    }
    return sorted(sorted(group) for group in groups)


def _name(found: Import) -> str:
    return found.name


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen


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
    own |= {name for plugin, names in PLUGINS.items() if under(source.module, (plugin,)) for name in names}
    in_extra = under(source.module, EXTRA_ONLY)
    return [
        f"{source.module}:{found.line} imports {found.name}, which {source.package} does not declare"
        for found in imports(source.text)
        if not found.typing_only
        and found.name.partition(".")[0] not in own | (with_extras if in_extra or found.lazy else base)
    ]


def test_imports_follow_the_arrows():
    assert not report(wrong_arrows(source) for source in SOURCES)


def test_rooms_import_only_rooms_below():
    assert not report(arrows_up(source) for source in SOURCES)


def test_no_module_imports_itself_around_a_circle():
    assert not circles(SOURCES)


def test_any_stands_at_the_borders_and_is_not_spreading():
    assert not report(more_any(source) for source in SOURCES)


def test_our_own_modules_are_imported_at_the_top():
    assert not report(lazy_imports(source) for source in SOURCES)
    for module in LAZY:
        found = [source for source in SOURCES if under(source.module, (module,))]
        assert any(each.lazy for source in found for each in imports(source.text)), f"{module} needs no entry"


def test_a_planted_import_in_a_function_is_caught():
    text = "def f():\n    from mca_train.engine import engine"
    assert lazy_imports(Source("mca_train.trainer.loop", text))
    assert not lazy_imports(Source("mca_train.tasks.sft", text))


@pytest.mark.parametrize("text", ["x: Any = 1", "def f(x: typing.Any): ...", "Row = dict[str, Any]"])
def test_a_planted_any_is_caught(text):
    assert more_any(Source("mca_train.data.load", text))
    assert not more_any(Source("mca_train.types", text))


def test_every_import_is_declared():
    assert not report(undeclared_imports(source, *declared(source.package)) for source in SOURCES)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("mca_config.layout", "import mca_models"),
        ("mca_config.layout", "def f():\n    from mca_train import x"),
        ("mca_models.weights.rules", "from mca_convert.plan import Plan"),
        ("mca_models.megatron.load", "import mca_train"),
        ("mca_train.engine.engine", "from mca_convert import convert"),
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
        ("mca_train.data.load", "from mca_train.trainer.trainer import McaTrainer"),
        ("mca_train.losses.preference", "def f():\n    from mca_train.engine import engine"),
        ("mca_train.groups", "if TYPE_CHECKING:\n    from mca_train.lr_schedule import LearningRate"),
        ("mca_models.storage.copy_plan", "from mca_models.checkpoint.placement import stored"),
        ("mca_models.megatron.state.save", "from mca_models.megatron.virtual_models import VirtualModels"),
        ("mca_train.attic", "x = 1"),
        ("mca_train.data.samples", "from mca_train import McaTrainer"),
        ("mca_train.data.samples", "def f():\n    import mca_train"),
        ("mca_models.weights.rules", "if TYPE_CHECKING:\n    from mca_models import AutoModel"),
        ("mca_models.megatron.layers.norm", "from mca_models.megatron import VirtualModels"),
        ("mca_config.errors", "from mca_config.arguments import MegatronArguments"),
        ("mca_config.layout", "from mca_config.model_config import McaModelConfig"),
        ("mca_convert.fills", "from mca_convert.cli import main"),
        ("mca_convert.forecast", "from mca_convert.commands import RUN"),
    ],
)
def test_a_planted_arrow_up_is_caught(module, text):
    assert arrows_up(Source(module, text))


def test_a_planted_circle_is_caught():
    typed = "if TYPE_CHECKING:\n    from p.a import A"
    assert circles([Source("p.a", "from p import b"), Source("p.b", "import p.c"), Source("p.c", typed)])
    assert not circles(
        [Source("p.a", "from p import b"), Source("p.b", "import p.c"), Source("p.c", "x = 1")]
    )


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("mca_config.training", "import torch, transformers"),
        ("mca_models.megatron.load", "from megatron.core import parallel_state"),
        ("mca_models", "def __getattr__(name):\n    from mca_models.megatron import AutoModel"),
        ("mca_models", "if TYPE_CHECKING:\n    from mca_models.megatron import AutoModel"),
        ("mca_convert.plan", "from mca_models.checkpoint import placement\nimport numpy"),
        ("mca_train.engine.engine", "from mca_models.megatron import platform\nimport torchlike"),
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


FOUND_BY_NAME = {
    "mca-models": {
        "megatron/layers/alibi.py": "alibi_slopes",
        "megatron/features/dsa.py": "dsa_attention",
        "megatron/peft/linear.py": "LoraLinear",
        "megatron/state/export.py": "export_buckets",
        "megatron/state/fp8.py": "quantised",
    },
    "mca-train": {
        "batching/packing.py": "PackedDataset",
        "data/mixture.py": "Mixture",
        "engine/optimizer.py": "build_optimizer",
        "losses/mtp.py": "MtpLoss",
        "trainer/sigterm.py": "StopSignal",
    },
}
"""Files that somebody from Megatron opens for a feature by name alone, and the function or class that is there."""


@pytest.mark.parametrize("package", FOUND_BY_NAME)
def test_a_feature_is_in_the_file_of_its_name(package):
    source = ROOT / "packages" / package / "src" / package.replace("-", "_")
    for file, name in FOUND_BY_NAME[package].items():
        assert re.search(rf"^(def|class) {name}\b", (source / file).read_text(), re.MULTILINE), file
