"""Times ``mca-train plan --search`` for Llama-3.1-405B on 1,024 devices: ``python benchmarks/plan_search.py``."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
RUN = "bf16: true\nmax_steps: 1\nseq_length: 4096\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 1\n"


def main() -> None:
    """Print the best layouts and the seconds."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        run = Path(folder) / "run.yaml"
        run.write_text(f"{RUN}model_name_or_path: {folder}\noutput_dir: {folder}/out\n")
        words = ["-m", "mca_train", "plan", "pretrain", str(run), "--search", "--gpus", "1024"]
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True)
        sys.stdout.write(f"{time.perf_counter() - start:.1f} s\n")


if __name__ == "__main__":
    main()
