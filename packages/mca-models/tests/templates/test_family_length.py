"""A family that is made of parts which others have is a file of at most 40 lines; those that are longer say why."""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

from mca_models.templates import FAMILIES

BOUND = 40
"""Lines of code: no blank ones, no comments, no docstrings, an import once however the formatter breaks it."""

LONGER = {
    "a table of a vision model's tensors": (
        *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "glmasr", "cohere2_vision", "idefics3"),
        *(
            "gemma4",
            "gemma4_unified",
            "glm4v",
            "got_ocr2",
            "kimi_k25",
            "lfm3_vl",
            "llama4",
            "minicpmv4_6",
            "minimax_m3_vl",
            "ovis2",
            "qwen2_vl",
        ),
    ),
    "layers with a state beside those with attention, under keys and names of their own": (
        *("bailing_hybrid", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm3", "mamba"),
        *("minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
    ),
    "a dense form and one with experts": ("qwen3_vl",),
    "windows, ropes, heads, norms or experts that differ by layer, in several forms of config.json": (
        *("afmoe", "cohere2_moe", "ernie4_5_moe", "gemma4_text", "granite_swa", "llama4_text"),
        "mimo_v2_flash",
    ),
    "older than Llama: names, arrangements and keys that no other family has": (
        *("bloom", "falcon", "gpt2", "gpt_neox", "gptj", "opt"),
    ),
    "an MTP layer before the final norm, under separate names": ("mimo",),
    "experts on a shortcut, and some without weights": ("longcat_flash",),
    "an indexer of blocks, and activations with limits": ("minimax_m3_vl_text",),
    "experts with biases, in one tensor and interleaved": ("gpt_oss",),
    "numbers of experts that files list by layer, and keys that transformers ignores": ("hunyuan_v1_moe",),
    "names of experts that differ between files and memory, and keys with other names": ("hy_v3",),
    "a rope with factors that must agree, and an option of SparseMixer for each of its draws": ("phimoe",),
}
"""Why a family's file is longer than `BOUND`."""

IMPORTED = list(FAMILIES.values())
FILES = {
    name.rpartition(".")[2]: Path(module.__file__)
    for name, module in sys.modules.items()
    if name.startswith("mca_models.templates.") and hasattr(module, "FAMILY") and module.__file__
}
_SILENT = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)


def lines_of_code(text: str) -> int:
    """Count lines of code, for `BOUND`."""
    tokens = (
        token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _SILENT
    )
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        last = (node.end_lineno or 0) + 1 if isinstance(node, ast.stmt) else 0
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines -= set(range(node.lineno + 1, last))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, last))
    return len(lines)


def test_a_family_of_known_parts_is_short() -> None:
    assert len(FILES) > 0.7 * len(IMPORTED)
    counts = {name: lines_of_code(file.read_text()) for name, file in FILES.items()}
    excused = {name for names in LONGER.values() for name in names}
    longer = {name: count for name, count in counts.items() if count > BOUND}
    unexcused = {name: count for name, count in longer.items() if name not in excused}
    assert not unexcused, "take what other families have from them, or say in LONGER why the file is longer"
    assert excused <= longer.keys(), "no longer needed in LONGER"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""Doc."""\n\nfrom a import (\n    b,\n    c,\n)\n\nX = {\n    1: 2,\n}\n"""Says more."""\n', 4),
        ('def f():\n    """One.\n\n    Two.\n    """\n    # why\n    return """a\nb"""\n', 3),
    ],
)
def test_lines_are_counted_as_said(text: str, count: int) -> None:
    assert lines_of_code(text) == count
