"""``ModelConverter``: Hugging Face tensors of single parameters, from the shards that ROLL gathers."""

from collections.abc import Mapping, Sequence

from torch import Tensor

import mca_models
from mca_config.errors import McaError
from mca_models.lora.peft_directory import ExpertFactors
from mca_models.megatron.peft import PeftModels
from mca_models.templates import get_family
from mca_models.weights import Param
from mca_train.clients.chunk_lora import FACTORS
from mca_train.types import Upstream


class DistConverter:
    """Canonical names of live parameters.

    Args:
        models: The model.
        params: Its parameters by canonical name.
    """

    def __init__(self, models: mca_models.VirtualModels, params: Mapping[str, Param]) -> None:
        self._params = params
        self._live = models.live_names()

    def preprocess_layer_index(self, name: str, vp_stage: int) -> str:
        """Return the canonical name, with global layer and expert, of ``name`` in the chunk ``vp_stage``."""
        if name.startswith(FACTORS):
            return name.removeprefix(FACTORS)
        if name not in self._live[vp_stage]:
            raise McaError(f"{name}: chunk {vp_stage} of this rank has no such parameter in a checkpoint")
        return self._live[vp_stage][name].mca_name()

    def is_expert_parallel_weight(self, name: str) -> bool:
        """Return whether the canonical ``name`` is an expert's."""
        return self._params[name].expert is not None


class ModelConverter:
    """Converter from shards to Hugging Face tensors.

    Args:
        mca_config: Megatron's configuration of a facade's model.
        to_hf: Must be True.
        efficient_mode: Ignored: shards are never compared.
        pipeline_model_parallel_rank: Ignored: names are those of the whole model.
    """

    def __init__(
        self,
        mca_config: Upstream,
        to_hf: bool = False,
        efficient_mode: bool = False,
        pipeline_model_parallel_rank: int | None = None,
    ) -> None:
        self.mca_config = mca_config
        models: mca_models.VirtualModels = mca_config.mca_models
        config, family = models.config, get_family(models.config.model_type)
        self._params = {param.mca_name(): param for param in family.params(config)}
        self._factors: ExpertFactors | None = None
        if any(param.stacked for param in self._params.values()):
            raise McaError(
                f"{config.model_type}: its Hugging Face tensors hold all experts of a layer, which ROLL's weight "
                "update cannot send; use VirtualModels.export_weights"
            )
        if not to_hf:
            raise McaError(
                "ModelConverter(to_hf=False) is not supported; load with AutoModel.from_pretrained"
            )
        if isinstance(models, PeftModels):
            self._params |= {param.mca_name(): param for param in models.rules.params}
            self._factors = ExpertFactors(models.rules, config)
        twins = family.duplicated_hf_tensors(config)
        self._twins = {twin: twins[twin] for twin in config.extra.get("hf_duplicates", ()) if twin in twins}
        self._vocab_size = config.vocab_size
        self.dist_converter = DistConverter(models, self._params)

    def convert_to_hf(
        self,
        mca_state_dict: Mapping[str, Sequence[Tensor]],
        vp_stage: int = 0,
        layer_index_preprocessed: bool = False,
        lora_rank: int = 0,
    ) -> dict[str, Tensor]:
        """Return Hugging Face names and tensors.

        Args:
            mca_state_dict: Names with the shards of all (expert-)tensor-parallel ranks, in rank order.
            vp_stage: The chunk of live names.
            layer_index_preprocessed: Names are those of ``preprocess_layer_index``.
            lora_rank: Ignored: factors of an adapter are converted by their names.
        """
        found: dict[str, Tensor] = {}
        for name, shards in mca_state_dict.items():
            if not layer_index_preprocessed:
                name = self.dist_converter.preprocess_layer_index(name, vp_stage)
            param = self._params[name]
            if param.alias_of is not None:
                continue  # a tied head is the embedding, which is sent under its names
            full: Tensor = param.shard.join(list(shards))
            if self._factors is not None and name in self._factors.names:
                found |= self._factors.split(name, full)
                continue
            tensors = param.from_full(full[: self._vocab_size] if param.vocab else full)
            found |= dict(zip(param.hf_names(), tensors, strict=True))
        return found | {twin: found[name] for twin, name in self._twins.items() if name in found}
