"""Small models, data and runs for the trainer's tests; the functions run on every rank."""

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 6
VOCAB = 130  # not a multiple of 4: padded rows take part
SHORT = {"max_steps": 2, "gradient_accumulation_steps": 2, "count": 4, "warmup_steps": 0}


def tiny_checkpoint(folder: Path, config_class: Any = None, model_class: Any = None, **changes: Any) -> Path:
    """A random Qwen3 (or another model) of 4 layers, norms that are not all one, and a head's bias that is not 0."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    settings = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    config = (config_class or Qwen3Config)(**(settings | changes))
    model = (model_class or Qwen3ForCausalLM)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name == "score.bias":
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def sparse_checkpoint(folder: Path, **changes: Any) -> Path:
    """A Qwen3 MoE: experts in every layer, top 2 of 4."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }
    return tiny_checkpoint(folder, Qwen3MoeConfig, Qwen3MoeForCausalLM, **(experts | changes))


def samples(count: int, *, longest: int = 32, seed: int = 0, vocab: int = VOCAB) -> Any:
    """Ragged samples with some tokens that are no targets."""
    from mca_train import TokenDataset

    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(draw.integers(8, longest + 1))
        start = draw.integers(0, vocab)
        tokens = (start + np.arange(length) * draw.integers(1, 4)) % vocab
        mask = np.arange(length) >= draw.integers(0, 6)
        rows.append((tokens, mask))
    return TokenDataset.from_samples(rows)


def filled_packs(
    packs: int, of: int, *, length: int = 32, seed: int = 1, vocab: int = VOCAB, unit: int = 4
) -> Any:
    """Samples of which every ``of`` in a row fill one pack of ``length`` to the last token, in units of tokens."""
    from mca_train import TokenDataset

    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(packs):
        cuts = sorted(draw.choice(np.arange(1, length // unit), of - 1, replace=False))
        for size in unit * np.diff([0, *cuts, length // unit]):
            tokens = (draw.integers(0, vocab) + np.arange(size) * draw.integers(1, 4)) % vocab
            rows.append((tokens, np.arange(size) >= draw.integers(0, 3)))
    return TokenDataset.from_samples(rows)


def arguments(output_dir: Path, **changes: Any) -> Any:
    from mca_config import TrainingArguments

    settings: dict[str, Any] = dict(
        output_dir=str(output_dir),
        max_steps=STEPS,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    return TrainingArguments(**(settings | changes))


def make_trainer(checkpoint: Path, output_dir: Path, *, count: int = 22, **changes: Any) -> Any:
    """A trainer (of class ``kind``) on this rank; ``count`` samples at 4 a step leave a short step in every epoch."""
    logging.disable(logging.WARNING)
    from mca_models import AutoModel
    from mca_train import McaTrainer

    data, pack_length = changes.pop("train_dataset", None), changes.pop("pack_length", None)
    held_out, adapter = changes.pop("eval_dataset", None), changes.pop("adapter", None)
    callbacks, kind = changes.pop("callbacks", None), changes.pop("kind", McaTrainer)
    args = arguments(output_dir, **changes)
    model: Any = AutoModel.from_pretrained(checkpoint, args)
    if adapter is not None:
        from mca_models.megatron.peft import load_adapter

        model = load_adapter(model, adapter)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return kind(
            model=model,
            args=args,
            train_dataset=samples(count) if data is None else data,
            eval_dataset=samples(7, seed=9) if held_out is None else held_out,
            callbacks=callbacks,
            pack_length=pack_length,
        )


def quietly(call: Any) -> Any:
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return call()


def history(trainer: Any, key: str) -> list[float]:
    return [log[key] for log in trainer.state.log_history if key in log]


def train_losses(checkpoint: Path, output_dir: Path, **changes: Any) -> dict[str, list[float]]:
    """Trains and evaluates; losses and gradient norms of every step."""
    trainer = make_trainer(checkpoint, output_dir, **changes)
    quietly(trainer.train)
    quietly(trainer.evaluate)
    return {key: history(trainer, key) for key in ("loss", "grad_norm", "learning_rate", "eval_loss")}


def stop_and_resume(checkpoint: Path, output_dir: Path, at: int = 5, **changes: Any) -> dict[str, Any]:
    """Trains with a checkpoint at step ``at``, then again from there with a new trainer; what both logged."""
    straight = make_trainer(checkpoint, output_dir, save_strategy="steps", save_steps=at, **changes)
    quietly(straight.train)
    resumed = make_trainer(checkpoint, output_dir, save_strategy="no", **changes)
    quietly(lambda: resumed.train(resume_from_checkpoint=str(output_dir / f"checkpoint-{at}")))
    keys = ("loss", "grad_norm", "learning_rate", "epoch")
    return {
        "straight": {key: history(straight, key) for key in keys},
        "resumed": {key: history(resumed, key) for key in keys},
        "state": {
            "steps": resumed.state.global_step,
            "equal_weights": _equal_weights(straight.model, resumed.model),
        },
    }


def _equal_weights(one: Any, other: Any) -> bool:
    others = dict(other.canonical_parameters())
    return all(bool((tensor == others[name]).all()) for name, tensor in one.canonical_parameters())


def tokens(count: int) -> Any:
    """Samples of 16 tokens, all of them targets."""
    from mca_train import TokenDataset

    draw = np.random.default_rng(count)
    return TokenDataset.from_samples([(draw.integers(0, 64, 16), np.ones(16, bool)) for _ in range(count)])


def trained(checkpoint: Path, output: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Parameters by name after a short run, and what it logged."""
    trainer = make_trainer(checkpoint, output, **(SHORT | changes))
    quietly(trainer.train)
    keys = ("loss", "grad_norm", "learning_rate")
    parameters = {name: tensor.detach().clone() for name, tensor in trainer.model.canonical_parameters()}
    return parameters, {key: history(trainer, key) for key in keys}
