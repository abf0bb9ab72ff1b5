"""Bytes that McaTrainer and what it is timed against need in one process, counted for Qwen3 before any of it is made.

States of both stand beside each other. Activations do not, as one is done before the other begins: what is freed is
taken again, so that only the larger counts. It is arithmetic, which no GPU has confirmed.
"""

from typing import Any

STATE = {"mca": 18, "bare": 18, "hf": 16}
"""Bytes a parameter: Megatron has bf16 weights, fp32 gradients and weights, and Adam's two; Trainer all in fp32."""
CAST = {"hf": 2}
"""Bytes a parameter of what autocast makes of the weights and the graph holds."""
SCORES = 12
"""Bytes a token and word: scores in bf16 and fp32, their softmax, and a gradient."""
SHARE = 0.92
"""Usable share of the device: the rest is CUDA's context, workspaces and fragmentation."""


def parameters_of(document: dict[str, Any]) -> int:
    """Elements of a Qwen3."""
    hidden, queries, keys, inner = _widths(document)
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner
    embeddings = 1 if document["tie_word_embeddings"] else 2
    words: int = document["vocab_size"]
    return int(document["num_hidden_layers"]) * layer + embeddings * words * hidden


def _widths(document: dict[str, Any]) -> tuple[int, int, int, int]:
    heads, groups, width = (
        int(document[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return document["hidden_size"], heads * width, groups * width, document["intermediate_size"]


def activations_of(document: dict[str, Any], whose: str) -> int:
    """Bytes that a token leaves behind for the backward pass, with its scores."""
    hidden, queries, keys, inner = _widths(document)
    if whose == "hf":  # the residual, norms and rotations in fp32; a cast of what each matrix is given
        layer = 26 * hidden + 16 * queries + 10 * keys + 8 * inner
    else:  # all in bf16: what norms, matrices, rotations, attention and the activation function were given
        layer = 8 * hidden + 8 * queries + 8 * keys + 6 * inner
    return int(document["num_hidden_layers"]) * layer + SCORES * int(document["vocab_size"])


def needed(document: dict[str, Any], rival: str, length: int) -> int:
    """Bytes of McaTrainer and ``rival`` together on samples of ``length`` tokens, one at a time."""
    fixed = parameters_of(document) * (STATE["mca"] + STATE[rival])
    cast = parameters_of(document) * CAST.get(rival, 0)
    theirs = activations_of(document, rival) * length + cast
    return fixed + max(activations_of(document, "mca") * length, theirs)


def length_for(document: dict[str, Any], rival: str, there: int | None, longest: int) -> tuple[int, int]:
    """Tokens of a sample, the same for both, and the bytes they need.

    Args:
        document: The ``config.json`` of a Qwen3.
        rival: A key of `STATE`.
        there: Bytes of the device; None where they are not known.
        longest: The most tokens, which are halved until there is the memory.

    Raises:
        RuntimeError: A quarter of them needs too much.
    """
    for length in (longest, longest // 2, longest // 4):
        bytes_needed = needed(document, rival, length)
        if there is None or bytes_needed <= SHARE * there:
            return length, bytes_needed
    raise RuntimeError(
        f"mca and {rival} need {bytes_needed / 2**30:.1f} GiB by arithmetic for samples of {length} tokens, "
        f"and {SHARE:.0%} of this device are {SHARE * (there or 0) / 2**30:.1f} GiB"
    )
