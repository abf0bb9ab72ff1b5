"""Names of the losses over pairs of answers; formulas in `preference`, code in `preference` and `dpo`."""

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

_SORTED = "it sorts the pairs of a micro-batch, so the loss would depend on the layout; set another dpo_loss"
REFUSED = {
    "aot": _SORTED,
    "aot_unpaired": _SORTED,
    "sft": "it is supervised fine-tuning; set rpo_alpha, which adds it to another loss, or run mca-train sft",
    "kto": "it needs unpaired answers with a label; run mca-train kto",
    "kto_pair": "it needs unpaired answers with a label; run mca-train kto",
}
"""Names of TRL losses that are not supported, with the reason."""
