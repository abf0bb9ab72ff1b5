"""``DPOTrainer``, which LLaMA-Factory imports."""

from mca_train.clients.unsupported import reject_dpo


class DPOTrainer:
    """Trainer on preference pairs; raises an error because it is not supported yet."""

    def __init__(self, **options: object) -> None:
        reject_dpo()
