"""``DPOConfig``, the options of the preference loss."""

from dataclasses import dataclass

from mca_config.errors import McaError
from mca_config.types import Values
from mca_train.losses.options import LossType
from mca_train.losses.preference import PreferenceLoss


@dataclass(kw_only=True)
class DPOConfig:
    """Options of the preference loss; ``pref_loss`` is ``dpo_loss`` of ``mca-train dpo``."""

    beta: float = 0.1
    pref_loss: LossType = "sigmoid"
    label_smoothing: float = 0.0

    def loss(self, client: Values) -> PreferenceLoss:
        """Return the loss, with the options that LLaMA-Factory does not pass: ``pref_ftx`` and ``simpo_gamma``.

        Raises:
            McaError: An option is not supported.
        """
        try:
            return PreferenceLoss(
                kind=self.pref_loss,
                beta=self.beta,
                label_smoothing=self.label_smoothing,
                simpo_gamma=client.get("simpo_gamma") if self.pref_loss == "simpo" else None,
                rpo_alpha=client.get("pref_ftx") or None,
            )
        except McaError as error:
            raise McaError(
                f"{error} (dpo_loss is pref_loss of LLaMA-Factory, rpo_alpha is pref_ftx)"
            ) from None
