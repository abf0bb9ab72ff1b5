"""GRPO: a model learns from rewards for what it generates, with mca as the trainer and transformers as the engine.

    torchrun --nproc-per-node 4 examples/grpo.py                 # tensor 2 x pipeline 2, two minutes on a CPU
    torchrun --nproc-per-node 1 examples/grpo.py --tp 1 --pp 1   # the same on one process

The task can be checked by a program: a prompt is one letter, and each of the four letters of the answer that repeats it
is worth a quarter. A random model of two layers gets 1 / 12; the mean reward is printed and rises to nearly 1.

Each round takes three steps, in this order, on all ranks:

1. *Roll out.* The weights are streamed to the engine (`VirtualModels.export_weights`), which answers every prompt
   several times. Here the engine is a transformers model on rank 0; where yours (vLLM, SGLang) goes is marked ENGINE.
2. *Score.* The answers of one prompt are compared with one another: the advantage of an answer is its reward less the
   mean of its group, over the group's deviation. `VirtualModels.log_probs` says how probable each token was.
3. *Train*, twice on the same answers: the clipped loss of PPO, of log-probabilities that `McaTrainer` hands to
   `compute_loss` because the class asks for `token_values`.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

LETTERS, ANSWER, GROUP, PROMPTS = 12, 4, 8, 12
START, END = LETTERS, LETTERS + 1  # two more tokens: before the prompt and after it
CLIP, UPDATES = 0.2, 2  # how far a probability may move; updates of one round
ROWS, LENGTH = PROMPTS * GROUP, 3 + ANSWER


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size")
    parser.add_argument("--pp", type=int, default=2, help="pipeline_model_parallel_size")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rewards = train(folder, options.tp, options.pp, options.rounds)
    if int(os.environ.get("RANK", "0")) == 0:
        print("mean reward:", " ".join(f"{reward:.2f}" for reward in rewards))


def train(folder: str, tensor_parallel: int, pipeline_parallel: int, rounds: int) -> list[float]:
    """The mean reward of each round."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    from mca_config import TrainingArguments
    from mca_models import AutoModel
    from mca_models.megatron.log_probs.vocabulary import TokenValues
    from mca_models.templates import config_from_hf
    from mca_train import McaTrainer, MicroBatch

    class GrpoTrainer(McaTrainer):
        """The clipped loss over the answers' tokens."""

        token_values = TokenValues(temperature=1.0)  # what compute_loss is given of each token
        metric_names = ("clipped",)  # logged with the loss

        def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            # output: log-probability of each *next* token [b, s]; beside it what `Rollouts` keeps of each sample,
            # wherever its tokens lie: packed, or cut over context-parallel ranks
            advantage = batch.values[batch.segments, 0].to(output)
            ratio = torch.exp(output - batch.next_values(1, LENGTH))
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
            mask = batch.loss_mask
            self.metrics.add({"clipped": ((ratio != clipped).float() * mask).sum()}, mask.sum())
            return (loss * mask).sum(), mask.sum().int()

    args = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        max_steps=rounds * UPDATES,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        per_device_train_batch_size=ROWS // 4,
        gradient_accumulation_steps=4,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModel.from_config(config_from_hf(TINY), args, dtype="float32")
    rollouts = Rollouts(model, rounds * UPDATES)
    trainer = GrpoTrainer(model=model, args=args, train_dataset=rollouts, callbacks=[rollouts.callback()])
    rollouts.refill()
    trainer.train()
    return rollouts.rewards


class Rollouts(Dataset[dict[str, Tensor]]):
    """The answers of the running round; every step of the round trains on all of them."""

    def __init__(self, model: object, steps: int) -> None:
        self.model, self.steps = model, steps
        self.rewards: list[float] = []
        self.engine = None
        if dist.get_rank() == 0:  # ENGINE: yours is started here, or stands elsewhere already
            config = AutoConfig.for_model(**TINY)
            self.engine = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            torch.manual_seed(1)

    def __len__(self) -> int:
        return ROWS * self.steps

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index % ROWS]
        labels = ids.clone()
        labels[:-ANSWER] = -100  # the prompt is no target
        row = index % ROWS
        known = torch.cat([self.advantages[row : row + 1], self.old[row].cpu()])
        return {"input_ids": ids, "labels": labels, "values": known.double()}

    def refill(self) -> None:
        """A new round: collective, all ranks call it at the same point."""
        self.stream_weights()
        answers: list[Tensor | None] = [self.generate() if self.engine is not None else None]
        dist.broadcast_object_list(answers, src=0)
        self.tokens: Tensor = answers[0]
        rewards = (self.tokens[:, -ANSWER:] == self.tokens[:, 1:2]).float().mean(1)
        self.rewards.append(float(rewards.mean()))
        groups = rewards.view(PROMPTS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        self.advantages = advantages.flatten()
        self.old = self.model.log_probs(self.tokens, micro_batch_size=ROWS // 4).log_probs

    def stream_weights(self) -> None:
        """ENGINE: what you give to its ``load_weights``, or send through its transport, bucket by bucket."""
        weights = self.model.export_weights(to="first", bucket_bytes=1 << 20)
        if self.engine is None:
            for _ in weights:  # nothing arrives here, but every rank sends
                pass
            return
        own = self.engine.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def generate(self) -> Tensor:
        """ENGINE: a group of answers for each prompt ``[rows, prompt and answer]``; temperature 1, as above."""
        letters = torch.arange(LETTERS).repeat_interleave(GROUP)
        prompts = torch.stack([torch.full_like(letters, START), letters, torch.full_like(letters, END)], 1)
        return self.engine.generate(
            prompts.to(self.engine.device),
            attention_mask=torch.ones_like(prompts).to(self.engine.device),
            do_sample=True,
            top_k=0,
            min_new_tokens=ANSWER,
            max_new_tokens=ANSWER,
            pad_token_id=START,
        ).cpu()

    def callback(self) -> TrainerCallback:
        """Begins a new round after the last update of one."""

        class Rounds(TrainerCallback):
            def on_step_end(_, args: object, state: object, control: object, **__: object) -> None:
                if state.global_step % UPDATES == 0 and state.global_step < state.max_steps:
                    self.refill()

        return Rounds()


TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": LETTERS + 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}

if __name__ == "__main__":
    main()
