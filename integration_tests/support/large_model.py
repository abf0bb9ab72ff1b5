"""A model so large that what it takes can be reported from all else."""

import os
from pathlib import Path

import numpy as np

from mca_models.checkpoint.hf_writer import METADATA
from mca_models.storage.safetensors import plan_file
from mca_models.storage.writer import SafetensorsWriter

LAYERS = int(os.environ.get("MCA_TEST_LAYERS", "4"))
HIDDEN, FFN, ROWS = 768, 2560, 12000


def make_model(folder: Path) -> Path:
    """A llama of 93 MiB in bf16 with 4 layers (14.5 MiB a layer)."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=ROWS,
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    plan = plan_file(
        folder / "model.safetensors", [(n, "BF16", shape) for n, shape in shapes.items()], METADATA
    )
    random = np.random.default_rng(1)
    block = random.integers(0, 0x4000, 1 << 22, dtype=np.uint16)
    with SafetensorsWriter(plan) as writer:
        for name, info in plan.tensors.items():
            writer.write(name, np.resize(block, info.nbytes // 2).view(np.uint8))
    return folder
