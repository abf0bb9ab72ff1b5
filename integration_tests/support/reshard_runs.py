"""Runs up to a step and on from the checkpoint of another run, of whole models and of adapters."""

from pathlib import Path
from typing import Any

from train_cases import history, make_trainer, quietly

FIRST, ALL = 1, 3
EXPERTS_ALONE = {"target_parameters": ["mlp.experts.gate_up_proj"]}
WITH_EXPERTS = EXPERTS_ALONE | {"target_modules": ["q_proj"]}


def run(
    checkpoint: Path,
    output_dir: Path,
    steps: int,
    resume: Path | None = None,
    *,
    first: int = FIRST,
    **changes: Any,
) -> Any:
    """Train up to ``steps``, from the beginning or from ``resume``, and leave a checkpoint of step ``first``."""
    from transformers import TrainerCallback

    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == first and not resume

    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "learning_rate": 2e-3}
    settings["gradient_accumulation_steps"] = 4
    settings["overwrite_output_dir"] = resume is None  # a longer curve starts again
    data = changes.pop("data", None)
    data = {"count": 200} if data is None else {"train_dataset": data()}
    trainer = make_trainer(checkpoint, output_dir, max_steps=steps, **settings | data | changes)
    trainer.add_callback(Save())
    quietly(lambda: trainer.train(resume_from_checkpoint=str(resume) if resume else None))
    return {key: history(trainer, key) for key in ("loss", "grad_norm")}


def adapter_of(case: str, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """A model, and PEFT's files of an adapter on it whose factors are both random."""
    import peft
    import transformers

    from reference import make_reference

    model = make_reference(case, folder / "model").path
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    chosen = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **settings)
    peft.get_peft_model(base, chosen).save_pretrained(folder / "adapter")
    return model, folder / "adapter"
