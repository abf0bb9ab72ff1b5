"""`render` makes the text of a plan. It computes nothing: the numbers are those of `plan.memory`."""

from mca_config.model_config import McaModelConfig
from mca_train.config.run_config import Settings
from mca_train.plan.memory import GIB, PARTS, Plan


def render(plan: Plan, settings: Settings, model: McaModelConfig) -> str:
    """The plan as text."""
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
