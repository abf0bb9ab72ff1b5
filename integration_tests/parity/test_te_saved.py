"""Tensors that Transformer Engine's modules save for backward passes: `plan.te_layers` against their source.

Its kernels need a GPU; which tensors it saves is Python. A tensor more or less in a newer version fails here.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from mca_train.plan import te_layers

SPEC = importlib.util.find_spec("transformer_engine")
MEGATRON = importlib.util.find_spec("megatron.core")
CALLS = ("prepare_for_saving", "save_for_backward")
SAVED = "tensors_to_save"
# constant of te_layers -> where it is saved, what is counted of it, what is not: weights, and numbers of rows or ranks
SOURCES: dict[str, tuple[str, set[str], set[str]]] = {
    "_NORM_LINEAR": (
        "_LayerNormLinear",
        {"inputmat", "ln_out_to_save"},
        {"wt_save", "origin_weight", "bias", "ln_weight", "mu", "rsigma"},
    ),
    "_NORM": ("RMSNorm", {"x"}, {"rstdevs"}),
    "_LINEAR": ("_linear_setup_ctx", {"saved_inputmat"}, {"wt_save", "saved_weight", "saved_bias"}),
    "_GROUPED": (
        "_GroupedLinear",
        {"inputmats", "input_to_save"},  # of the two ways through it one each
        {"weights_fp8", "saved_weights", "biases", "weights_to_save", "split_sizes", "base_split_offsets"}
        | {"input_tensor_offsets", "output_tensor_offsets"},
    ),
    "_ATTENTION": (
        "_fused_attn_forward_impl",
        {
            "f16_tensors",
            "softmax_stats",
        },  # q, k, v and the output, each once: what is an input is not kept again
        {"fp8_tensors", "rng_state"},
    ),
    "_SWIGLU": ("SwiGLUFunction", {"input_for_backward"}, set()),
    "_WEIGHTED": ("WeightedSwiGLUFunction", {"input_for_backward"}, {"weights"}),
}


def source(constant: str) -> Path:
    """The file that a constant names."""
    package, _, rest = str(getattr(te_layers, constant)).partition(":")[0].partition("/")
    spec = SPEC if package == "transformer_engine" else MEGATRON
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not there")
    folder = Path(spec.submodule_search_locations[0])
    return folder / rest.removeprefix("core/")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def names(values: list[ast.expr]) -> set[str]:
    return {part.id for value in values for part in ast.walk(value) if isinstance(part, ast.Name)}


def kept(node: ast.AST) -> set[str]:
    """Return the tensors that a function saves, or passes to the function that saves them."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            called = part.func.id if isinstance(part.func, ast.Name) else getattr(part.func, "attr", "")
            found |= names(part.args) if called in CALLS else set()
        elif (
            isinstance(part, ast.Assign)
            and names(part.targets) == {SAVED}
            and isinstance(part.value, ast.Tuple)
        ):
            found |= names([part.value])
        elif isinstance(part, ast.Return) and isinstance(part.value, ast.Tuple) and is_setup(node):
            found |= names([part.value])
    return found - {SAVED, "tensors_to_save_from_setup"}


def is_setup(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.endswith("_setup_ctx")


@pytest.mark.parametrize("constant", SOURCES)
def test_a_line_is_what_its_module_saves(constant: str) -> None:
    place, counted, beside = SOURCES[constant]
    (node,) = [n for n in ast.walk(tree(source(constant))) if getattr(n, "name", "") == place]
    assert kept(node) == counted | beside


@pytest.mark.parametrize("module", ["attention.py", "multi_latent_attention.py"])
def test_the_projection_behind_attention_saves_its_original_input(module: str) -> None:
    place = source("_PROJECTION").with_name(module)
    calls = [node for node in ast.walk(tree(place)) if isinstance(node, ast.Call)]
    assert "set_save_original_input(self.linear_proj)" in map(ast.unparse, calls)
