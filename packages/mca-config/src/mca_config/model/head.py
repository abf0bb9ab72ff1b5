"""Outputs: logits of the language model or scores of a classification head, and MTP layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mca_config.model.section import ModelSizes, Positive, Range, Section, Width

HeadKind = Literal["causal_lm", "sequence_classification", "token_classification"]
"""Kind of Hugging Face class: ``...ForCausalLM``, ``...ForSequenceClassification``, ..."""


@dataclass(frozen=True, kw_only=True)
class OutputHead(Section):
    """The output layer of a model."""

    head_kind: HeadKind = "causal_lm"
    """Kind of head: language-model logits, or sequence- or token-classification logits."""
    num_labels: Width | None = None
    """Outputs of a classification head; None: the head is a language-model head."""
    tie_word_embeddings: bool = False
    """The output layer shares the embedding's weight."""
    output_bias: bool = False
    """The output layer adds a bias to the logits."""
    logits_scaling: Positive = 1.0
    """Divisor of the output layer's logits."""
    final_logit_softcapping: float | None = None
    """Soft cap of the output layer's logits; None: no cap."""

    def problems(self, model: ModelSizes) -> Iterator[str]:
        """Yield a number of labels that does not fit the kind of head."""
        if (self.head_kind == "causal_lm") != (self.num_labels is None):
            yield (
                f"num_labels is {self.num_labels} with head {self.head_kind}; a classification head needs at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Mtp(Section):
    """MTP layers, which follow the decoder layers."""

    mtp_num_layers: Annotated[int, Range(least=0, most=100)] = 0
    mtp_before_final_norm: bool = False
    """MTP layers take the output of the last decoder layer without the final norm."""
