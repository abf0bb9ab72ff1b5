"""Plan of a model's training from its configuration and arguments, without a run."""

from dataclasses import replace

from mca_config.model_config import McaModelConfig
from mca_config.training import TrainingArguments
from mca_models.lora import rules_for_training
from mca_models.lora.config import AdapterConfig
from mca_train.config.model import resolve_layout
from mca_train.config.model_parts import trained_parts
from mca_train.plan.chunks import Implementation
from mca_train.plan.counts import ModelCounts
from mca_train.plan.memory import Plan, PlanInput, plan_layout


def make_plan(
    config: McaModelConfig,
    training: TrainingArguments,
    seq_length: int,
    world_size: int,
    *,
    sequences: int = 1,
    adapter: AdapterConfig | None = None,
    reference: McaModelConfig | None = None,
    implementation: Implementation = "local",
    on_gpu: bool = False,
) -> Plan:
    """Plan the training of ``config`` with the arguments ``training``.

    Args:
        config: Model configuration; weights are not read.
        training: Training arguments.
        seq_length: Tokens of a sequence.
        world_size: Number of ranks.
        sequences: Sequences per sample: 2 for preference pairs.
        adapter: Adapter to train; None: full fine-tuning.
        reference: Configuration of a separate reference model.
        implementation: Implementation of the layers.
        on_gpu: The run is on a GPU.
    """
    layout = resolve_layout(training, config)
    config = replace(config, layout=layout)
    plan_input = PlanInput(
        config=config,
        seq_length=seq_length,
        sequences=sequences,
        model=ModelCounts.for_model(config),
        adapter=ModelCounts.for_adapter(config, rules_for_training(config, adapter)) if adapter else None,
        frozen=ModelCounts.for_frozen(config, trained_parts(training, config)),
        reference=ModelCounts.for_model(replace(reference, layout=layout)) if reference else None,
        implementation=implementation,
        on_gpu=on_gpu,
    )
    return plan_layout(plan_input, training, layout, world_size)
