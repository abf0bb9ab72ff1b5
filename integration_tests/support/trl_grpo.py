"""GRPO on fixed answers, by TRL's trainer and by a loss of log-probabilities through ``McaTrainer``.

Every second step the answers are others. Their log-probabilities are taken of the model as it is then and as it
began, and two steps are made of them, so that ratios move away from one and some are clipped.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train_cases import history, quietly

STEPS, UPDATES, ROWS = 6, 2, 4
CLIP, BETA, TEMPERATURE = 0.01, 0.2, 0.8
PROMPT, ANSWER, VOCAB = 7, 13, 256
WIDTH = PROMPT + ANSWER
METRICS = ("kl", "clipped")
TRL_NAMES = {"kl": "kl", "clipped": "clip_ratio/region_mean"}


class Rollout:
    """Answers of one round: ids and mask ``[rows, width]``, prompts padded on the left, answers on the right."""

    def __init__(self, number: int) -> None:
        draw = np.random.default_rng(number)
        self.prompts = [draw.integers(0, VOCAB, draw.integers(2, PROMPT + 1)) for _ in range(ROWS)]
        self.answers = [draw.integers(0, VOCAB, draw.integers(3, ANSWER + 1)) for _ in range(ROWS)]
        self.advantages = torch.from_numpy(draw.normal(size=ROWS)).float()
        self.ids = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
        self.mask = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
        for row, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            cut = slice(PROMPT - len(prompt), PROMPT + len(answer))
            self.ids[row, cut] = torch.from_numpy(np.concatenate([prompt, answer]))
            self.mask[row, cut] = 1


def by_trl(folder: Path, run: dict[str, Any], loss: str) -> dict[str, list[float]]:
    """Return the logs of TRL."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    class Fixed(GRPOTrainer):  # type: ignore[misc]
        """Answers are given instead of generated."""

        rounds = 0

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
            rollout, self.rounds = Rollout(self.rounds), self.rounds + 1
            with torch.no_grad():
                old, known = (
                    self._get_per_token_logps_and_entropies(model, rollout.ids, rollout.mask, ANSWER)[0]
                    for model in (self.model, self.ref_model)
                )
            return {
                "prompt_ids": rollout.ids[:, :PROMPT],
                "prompt_mask": rollout.mask[:, :PROMPT],
                "completion_ids": rollout.ids[:, PROMPT:],
                "completion_mask": rollout.mask[:, PROMPT:],
                "advantages": rollout.advantages,
                "old_per_token_logps": old,
                "ref_per_token_logps": known,
                "num_items_in_batch": rollout.mask[:, PROMPT:].sum(),
            }

    args = GRPOConfig(
        **run,
        output_dir=str(folder / f"trl-{loss}"),
        loss_type=loss,
        beta=BETA,
        epsilon=CLIP,
        temperature=TEMPERATURE,
        num_iterations=UPDATES,
        num_generations=2,
        max_completion_length=ANSWER,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = Fixed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()
    found = {key: history(trainer, key) for key in ("loss", "grad_norm")}
    return found | {name: history(trainer, theirs) for name, theirs in TRL_NAMES.items()}


def by_mca(folder: Path, output: Path, run: dict[str, Any], loss: str) -> dict[str, list[float]]:
    """Return the logs of mca's trainer. Runs on every rank."""
    from mca_config import TrainingArguments
    from mca_models import AutoModel
    from mca_models.megatron.log_probs.vocabulary import TokenValues
    from mca_train import McaTrainer, MicroBatch

    class Grpo(McaTrainer):
        token_values = TokenValues(temperature=TEMPERATURE)
        metric_names = METRICS

        def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            assert batch.values is not None
            advantage, length = batch.values[batch.segments, :2].float().unbind(-1)
            old, known = batch.next_values(2, WIDTH), batch.next_values(2 + WIDTH, WIDTH)
            ratio = torch.exp(output - old)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            kl = (torch.exp(known - output) - (known - output) - 1) * ratio  # of the policy that answered
            losses = -torch.minimum(ratio * advantage, clipped * advantage) + BETA * kl
            mask, ended = batch.loss_mask, (batch.tokens_remaining == 0).sum()
            bound = (ratio < clipped) & (advantage < 0) | (ratio > clipped) & (advantage > 0)
            self.metrics.add({"kl": (kl * mask).sum(), "clipped": (bound * mask).sum()}, mask.sum())
            if loss == "dapo":  # a mean over tokens
                return (losses * mask).sum(), mask.sum()
            return (losses * mask / length).sum(), ended  # a mean over answers, of means over their tokens

    args = TrainingArguments(output_dir=str(output), **run)
    model, reference = (AutoModel.from_pretrained(folder / "model", args) for _ in range(2))
    data = _Data(model, reference)
    trainer = Grpo(model=model, args=args, train_dataset=data, pack_length=64)
    trainer.add_callback(data.callback())
    data.refill()
    quietly(trainer.train)
    return {key: history(trainer, key) for key in ("loss", "grad_norm", *METRICS)}


class _Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The answers of the running round, with what is known of each of their tokens."""

    def __init__(self, model: Any, reference: Any) -> None:
        self._models, self._rounds = (model, reference), 0
        self.lengths = np.concatenate(
            [
                [len(p) + len(a) for p, a in zip(rollout.prompts, rollout.answers, strict=True)]
                for rollout in (Rollout(step // UPDATES) for step in range(STEPS))
            ]
        )

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index % ROWS]

    def refill(self) -> None:
        """Collective."""
        rollout, self._rounds = Rollout(self._rounds), self._rounds + 1
        old, known = (
            model.log_probs(rollout.ids, mask=rollout.mask.bool(), temperature=TEMPERATURE).log_probs
            for model in self._models
        )
        self._samples = []
        for row, (prompt, answer) in enumerate(zip(rollout.prompts, rollout.answers, strict=True)):
            cut = rollout.mask[row].bool()
            ids = rollout.ids[row, cut]
            labels = ids.clone()
            labels[: len(prompt)] = -100
            rest = (0, WIDTH - len(ids))
            numbers = [torch.nn.functional.pad(each[row, cut].double().cpu(), rest) for each in (old, known)]
            front = torch.tensor([float(rollout.advantages[row]), len(answer)], dtype=torch.float64)
            self._samples.append({"input_ids": ids, "labels": labels, "values": torch.cat([front, *numbers])})

    def callback(self) -> Any:
        """Begins a new round after the last update of one."""
        from transformers import TrainerCallback

        data = self

        class Rounds(TrainerCallback):
            def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
                if state.global_step % UPDATES == 0 and state.global_step < STEPS:
                    data.refill()

        return Rounds()
