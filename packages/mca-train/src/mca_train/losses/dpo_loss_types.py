"""The names of the losses over pairs of answers; their formulas are in `preference` and `compared`."""

from typing import Literal

LossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "simpo",
    "orpo",
]

_SORTED = "it compares sorted pairs of a micro-batch: its loss would depend on the layout; take another"
REFUSED = {
    "aot": _SORTED,
    "aot_unpaired": _SORTED,
    "sft": "it is no preference; set rpo_alpha, which adds it to another loss, or run mca-train sft",
    "kto": "it takes answers that are good or bad, each alone; run mca-train kto",
    "kto_pair": "it takes answers that are good or bad, each alone; run mca-train kto",
}
"""Losses that other programs have under these names, and why there is none here."""
