"""Checkpoints of the model alone are rotated, and a run that needs more says what they lack."""

from pathlib import Path

import pytest

from harness import run_ranks
from interruptions import interruption
from train_cases import make_trainer, quietly, tiny_checkpoint

pytestmark = pytest.mark.ranks


def model_only(checkpoint: Path, output_dir: Path) -> str:
    from mca_config.errors import McaError
    from mca_models.checkpoint_kinds import open_checkpoint

    saving = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True, "save_total_limit": 2}
    saving |= {"gradient_accumulation_steps": 1}
    quietly(make_trainer(checkpoint, output_dir, max_steps=4, **saving).train)
    open_checkpoint(output_dir / "checkpoint-4")
    try:
        make_trainer(checkpoint, output_dir, max_steps=6).train(resume_from_checkpoint=True)
    except McaError as error:
        reported = str(error)
    megatron = {
        "ckpt_format": "torch_dist",
        "save_only_model": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "gradient_accumulation_steps": 1,
    }
    quietly(make_trainer(checkpoint, output_dir / "megatron", max_steps=2, **megatron).train)
    for resume in (True, "auto", str(output_dir / "megatron" / "checkpoint-1")):
        again = make_trainer(checkpoint, output_dir / "megatron", max_steps=3, **megatron)
        with pytest.raises(McaError, match=r"checkpoint-.: holds no optimizer state \(save_only_model\?\)"):
            again.train(resume_from_checkpoint=resume)
    stopped = make_trainer(checkpoint, output_dir / "stopped", max_steps=4, **saving)
    stopped.add_callback(interruption(2, "SIGTERM"))
    quietly(stopped.train)
    again = make_trainer(checkpoint, output_dir / "stopped", max_steps=4, **saving)
    quietly(lambda: again.train(resume_from_checkpoint="auto"))
    assert (stopped.state.global_step, again.started_at_step, again.state.global_step) == (2, 2, 4)
    return reported


def test_checkpoints_of_the_model_alone_are_rotated_and_not_resumed(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model", num_hidden_layers=2)
    (error,) = run_ranks(1, model_only, checkpoint, tmp_path)
    assert "holds no optimizer state (save_only_model?)" in error
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert not (tmp_path / "checkpoint-4" / "training").exists()
