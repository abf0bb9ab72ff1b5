"""The command ``mca-train plan``: the needs of a run as text."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.checks import positions_exceeded
from mca_config.model_config import McaModelConfig
from mca_train.config.model import model_config
from mca_train.config.run_config import Settings, given_values, keys_of_preferences, parse

if TYPE_CHECKING:
    from mca_models.lora.config import AdapterConfig
from mca_train.plan.memory import GIB, PARTS, Plan, make_plan


def print_plan(config: Path, overrides: list[str]) -> int:
    """Prints the plan of a configuration file; 1 if the run is impossible."""
    values, where = given_values(config, overrides)
    settings = parse(values, where)
    model = model_config(settings.data.model_name_or_path)
    world = settings.launch.local_ranks
    plan = make_plan(
        model,
        settings.training,
        settings.data.seq_length,
        world,
        adapter=_adapter(settings),
        reference=_reference(settings, model),
    )
    sys.stdout.write(render(plan, settings, model))
    if told := positions_exceeded(model, settings.data.seq_length):
        sys.stdout.write(f"seq_length {settings.data.seq_length}: {told}\n")
    return 2 if plan.problems else 0


def _adapter(settings: Settings) -> "AdapterConfig | None":
    from mca_models.lora.config import AdapterConfig

    if settings.lora.adapter_name_or_path is not None:
        return AdapterConfig.load(Path(settings.lora.adapter_name_or_path))
    return AdapterConfig.from_dict(settings.lora.config()) if settings.lora.wanted else None


def _reference(settings: Settings, model: McaModelConfig) -> McaModelConfig | None:
    """The frozen second model of ``dpo``, which is meant where a key of it is given."""
    if not keys_of_preferences(settings.values) or settings.dpo.dpo_loss == "orpo":
        return None
    path = settings.dpo.reference_model_name_or_path
    if path is None:
        return None if settings.lora.wanted else model
    return model_config(path)


def render(plan: Plan, settings: Settings, model: McaModelConfig) -> str:
    """The plan as text."""
    if plan.problems:
        return f"this run is impossible as {plan.layout}:\n" + "".join(f"  - {p}\n" for p in plan.problems)
    training, beside = settings.training, any(stage.reference for stage in plan.stages)
    host = any(stage.host for stage in plan.stages)
    columns = [*PARTS, *(["reference"] if beside else []), "total GiB", *(["on host"] if host else [])]
    lines = [
        f"model        {model.model_type}, {plan.total_parameters:,} parameters, {model.num_layers} layers"
        + ("" if plan.trained_parameters is None else f"; {plan.trained_parameters:,} trained (LoRA)"),
        f"ranks        {plan.world_size} = {plan.layout}, data parallel {plan.data_parallel_size}",
        f"global batch {plan.global_batch} samples, {plan.tokens_per_step:,} tokens = micro-batch "
        f"{training.per_device_train_batch_size} x accumulated {training.gradient_accumulation_steps} x data "
        f"parallel {plan.data_parallel_size}",
        f"bubble       {plan.bubble:.1%} of a step",
        "",
        _row("stage", "layers", "parameters", *columns),
    ]
    for pp, stage in enumerate(plan.stages):
        sizes = [stage.weights, stage.gradients, stage.optimizer, stage.activations]
        sizes += [*([stage.reference] if beside else []), stage.total, *([stage.host] if host else [])]
        lines.append(
            _row(str(pp), stage.layers, f"{stage.parameters:,}", *(f"{size / GIB:.3f}" for size in sizes))
        )
    lines.append("")
    lines.append("GiB per rank of the stage; activations are an estimate; kernels and buffers come on top")
    return "\n".join(lines) + "\n"


def _row(stage: str, layers: str, *cells: str) -> str:
    return f"{stage:>5}  {layers:<28}" + "".join(f"{cell:>15}" for cell in cells)
