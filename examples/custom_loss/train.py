"""A custom loss: focal loss, which gives less weight to tokens that the model already predicts well.

    python train.py                                # one process, a few seconds on a CPU
    torchrun --nproc-per-node 2 train.py --tp 2    # the same numbers, over two tensor ranks

The model is a random one of two layers, so nothing has to be downloaded.
"""

import argparse
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

GAMMA = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor_model_parallel_size")
    size = parser.parse_args().tp
    with tempfile.TemporaryDirectory() as folder:
        losses = train(folder, size)
    if int(os.environ.get("RANK", "0")) == 0:
        print("loss:", " ".join(f"{loss:.4f}" for loss in losses))


def train(folder: str, tensor_parallel: int) -> list[float]:
    """Ten steps; the loss of each."""
    if (
        not dist.is_initialized()
    ):  # one process without a launcher; under torchrun its environment says how many
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            os.environ.setdefault(name, value)
        if os.environ["WORLD_SIZE"] == "1":
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo")

    from mca_config import TrainingArguments
    from mca_models import AutoModel
    from mca_models.templates import config_from_hf
    from mca_train import McaTrainer, MicroBatch, TokenDataset

    class FocalTrainer(McaTrainer):
        """Minimises ``(1 - p)^gamma * cross entropy`` instead of the cross entropy."""

        metric_names = ("cross_entropy", "certainty")  # logged with the loss

        def compute_loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            # output: cross entropy of each token [b, s]; only targets count
            probability = torch.exp(-output)
            targets = batch.loss_mask.sum()
            loss = ((1 - probability) ** GAMMA * output * batch.loss_mask).sum()
            sums = {
                "cross_entropy": (output * batch.loss_mask).sum(),
                "certainty": (probability * batch.loss_mask).sum(),
            }
            self.metrics.add(sums, targets)
            # the sum and the number: the trainer divides by the number of the whole global batch, so the result
            # is the same however samples and tokens are spread over ranks
            return loss, targets.int()

    args = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        tensor_model_parallel_size=tensor_parallel,
        max_steps=10,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModel.from_config(config_from_hf(TINY), args, dtype="float32")
    rows = [(np.arange(start, start + 24) % 64, np.ones(24, bool)) for start in range(64)]
    trainer = FocalTrainer(model=model, args=args, train_dataset=TokenDataset.from_samples(rows))
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
}

if __name__ == "__main__":
    main()
