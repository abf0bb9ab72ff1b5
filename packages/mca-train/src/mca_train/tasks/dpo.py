"""``mca-train dpo``: preference tuning on pairs, with DPO's losses, SimPO and ORPO.

This module has the keys and their checks; `losses.preference` computes the losses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from mca_config.errors import McaError
from mca_train.config.arguments import DataArguments, PairArguments, option
from mca_train.losses.options import PAIR_METRICS, REFUSED, LossType, pair_key_problems
from mca_train.tasks.task import Example, PairTask, ReferenceArguments, adapter_reference_problems

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PreTrainedTokenizerBase

    from mca_models import VirtualModels
    from mca_train.config.run_config import Settings
    from mca_train.data.encoding import RowEncoder
    from mca_train.data.streams import Row
    from mca_train.losses.preference import PreferenceLoss
    from mca_train.losses.preference_options import PreferenceOptions
    from mca_train.trainer.base import TrainerOptions
    from mca_train.trainer.dpo import DpoTrainer

_KEYS = """\
dpo_beta: 0.1                           # strength of the KL penalty
# dpo_loss: sigmoid                     # or hinge, ipo, orpo
"""


@dataclass(kw_only=True)
class DpoArguments(ReferenceArguments):
    """Options of ``mca-train dpo``."""

    dpo_loss: LossType = field(
        default="sigmoid",
        metadata={"help": "The loss; simpo and orpo need no reference model.", "refused": REFUSED},
    )
    dpo_beta: float = option(
        "Strength of the KL penalty against the reference; orpo: weight of the odds ratio.", 0.1
    )
    dpo_label_smoothing: float = option(
        "Assumed fraction of pairs in the wrong order (sigmoid, robust, exo_pair).", 0.0
    )
    simpo_gamma: float | None = option(
        "simpo: margin by which the better answer should be better; None: 0.5."
    )
    rpo_alpha: float | None = option(
        "Weight of the better answer's cross entropy, added to the loss; None: 0."
    )
    precompute_ref_log_probs: bool = option(
        "Compute the reference's log-probabilities before training, which then holds no reference.",
        False,
    )

    def __post_init__(self) -> None:
        if self.options().needs_reference:
            return
        for key in ("reference_model_name_or_path", "precompute_ref_log_probs"):
            if getattr(self, key):
                raise McaError(f"{key}: dpo_loss {self.dpo_loss} has no reference; remove it")

    def options(self) -> "PreferenceOptions":
        """Return the options of the loss."""
        from mca_train.losses.preference_options import PreferenceOptions

        return PreferenceOptions(
            kind=self.dpo_loss,
            beta=self.dpo_beta,
            label_smoothing=self.dpo_label_smoothing,
            simpo_gamma=self.simpo_gamma,
            rpo_alpha=self.rpo_alpha,
        )

    def loss(self) -> "PreferenceLoss":
        """Return the loss with these options."""
        from mca_train.losses.preference import PreferenceLoss

        return PreferenceLoss(**vars(self.options()))


class Dpo(PairTask):
    """Preference tuning on a prompt with a better and a worse answer."""

    name = "dpo"
    takes_images = True
    summary = (
        "on preferences: prompt, chosen and rejected; losses sigmoid, ipo, simpo, orpo and more (dpo_loss)"
    )
    data_arguments = PairArguments
    task_arguments = DpoArguments
    required_content = "both answers"
    example = Example(
        rows="rows with `prompt`, `chosen` and `rejected`", learning_rate="5.0e-7", task_lines=_KEYS
    )

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return rewards and log-probabilities of the two answers."""
        return PAIR_METRICS

    def encoder(
        self, names: Sequence[str], tokenizer: "PreTrainedTokenizerBase", data: DataArguments, key: str
    ) -> "RowEncoder":
        """Return the row encoder, as `AnswerTask.encoder`."""
        from mca_train.data.encoding import pair_encoder

        return pair_encoder(names, tokenizer, cast("PairArguments", data), key)

    def surely_has_target(
        self, tokenizer: "PreTrainedTokenizerBase", data: DataArguments
    ) -> "Callable[[Row], bool]":
        """Return the quick check for targets, as `AnswerTask.surely_has_target`."""
        from mca_train.data.streams import pair_target_check

        return pair_target_check(cast("PairArguments", data))

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yield an error for each setting that pairs do not support, or that leaves no reference."""
        arguments = _arguments(settings)
        yield from pair_key_problems(settings.training)
        yield from super().problems(settings)
        if arguments.precompute_ref_log_probs and settings.data.streaming:
            yield "precompute_ref_log_probs needs all rows before training; set streaming to false"
        if arguments.options().needs_reference:
            yield from adapter_reference_problems(settings, arguments)

    def problems_in_megatron(self, settings: "Settings", megatron: "TransformerConfig") -> Iterator[str]:
        """Yield an error for each loss that Megatron adds per token."""
        from mca_train.losses.preference import model_problems

        return model_problems(megatron)

    def extra_forward_passes(self, settings: "Settings") -> int:
        """Return 1 for the reference, unless it is precomputed."""
        arguments = _arguments(settings)
        return int(arguments.options().needs_reference and not arguments.precompute_ref_log_probs)

    def reference(self, settings: "Settings") -> str | None:
        """Return the configured reference or the initial model; None if the adapter's base model serves."""
        arguments = _arguments(settings)
        if not arguments.options().needs_reference:
            return None
        path = arguments.reference_model_name_or_path
        itself = settings.lora.is_enabled or arguments.precompute_ref_log_probs
        return settings.data.model_name_or_path if path is None and not itself else path

    def trainer(
        self, settings: "Settings", reference: "VirtualModels | None", options: "TrainerOptions"
    ) -> "DpoTrainer":
        """Return the trainer, as `Task.trainer`."""
        from mca_train.trainer.dpo import DpoTrainer

        arguments = _arguments(settings)
        return DpoTrainer(
            reference=reference,
            preference=arguments.loss(),
            precompute_ref_log_probs=arguments.precompute_ref_log_probs,
            **options,
        )


def _arguments(settings: "Settings") -> DpoArguments:
    return cast("DpoArguments", settings.own)
