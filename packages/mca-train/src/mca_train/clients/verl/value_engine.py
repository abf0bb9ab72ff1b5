"""Engine ``mca`` for verl's critic: a model with one value per token."""

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.workers.engine import EngineRegistry

from mca_config.errors import McaError
from mca_train.clients.verl.batches import VerlMicroBatch, flat_outputs
from mca_train.clients.verl.engine import McaEngine
from mca_train.types import VirtualModels


@EngineRegistry.register(model_type="value_model", backend=["mca"], device=["cuda", "cpu"])
class McaValueEngine(McaEngine):
    """Critic of verl's PPO trainer.

    The model has a token-classification head with one label. It is new, drawn from the seed, if the checkpoint has a
    language-model head. A reward model keeps its head, which has no bias.
    """

    _wants_logits = True

    def _load(self) -> VirtualModels:
        from mca_models import AutoModel, open_checkpoint
        from mca_models.templates.classification_head import Head

        path = self.model_config.local_path
        stored = open_checkpoint(path).config.head
        if stored.num_labels not in (None, 1):
            raise McaError(
                f"critic.model.path is {path}, whose head has {stored.num_labels} labels; expected a language model, "
                "or a model with one label"
            )
        head = None if stored.num_labels else Head(kind="token_classification", labels=("LABEL_0",))
        return AutoModel.from_pretrained(
            path, self.args, dtype=self.engine_config.dtype, seed=self.args.seed, head=head
        )

    def _prepare_output(self, data: TensorDict) -> None:
        """Do nothing: the model returns the values of all tokens."""

    def _model_output(self, output: Tensor, batch: VerlMicroBatch) -> dict[str, Tensor]:
        values, offsets = flat_outputs(output.float().movedim(-1, 0), batch)
        return {"values": torch.nested.nested_tensor_from_jagged(values[:, 0], offsets)}
