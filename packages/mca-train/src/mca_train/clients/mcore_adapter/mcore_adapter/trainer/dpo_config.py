"""``DPOConfig``, which LLaMA-Factory imports."""

from mca_train.clients.unsupported import reject_dpo


class DPOConfig:
    """Options of the preference loss; raises an error because `DPOTrainer` is not supported yet."""

    def __init__(self, **options: object) -> None:
        reject_dpo()
