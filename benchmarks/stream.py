"""Time a full stream of a model's weights against writing them as a Hugging Face checkpoint to memory (tmpfs).

    python benchmarks/stream.py [--layout tp2] [--hidden 1024] [--layers 12] [--experts 0] [--rounds 5]

Both take turns on one model, so that a busy machine slows both: `export_weights` to the first rank and to all, and
`save_pretrained_as_hf`. Prints the median of each on the slowest rank and the ratios to saving; then the
time with a consumer that sleeps as long as a stream takes: little more, as the next bucket is gathered meanwhile.

Then bytes that the last rank is handed and its peak of memory beyond the model, for a full stream, for one with slices
of experts (``--experts``), and for a `weight_sender`: the first send, without a change, after a change of one layer.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests" / "support"))

BUCKET = 64 << 20


def measure(document: dict[str, Any], layout: str, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of every turn on one rank; the first of each is not counted."""
    import torch.distributed as dist

    from layouts import arguments
    from mca_models import AutoModel
    from mca_models.templates import config_from_hf

    models = AutoModel.from_config(config_from_hf(document), arguments(layout), dtype="bfloat16")

    def stream(to: str, pause: float = 0.0) -> None:
        for bucket in models.export_buckets(to=to, bucket_bytes=BUCKET):
            time.sleep(pause)
            del bucket

    def save() -> None:
        models.save_pretrained_as_hf(folder / "saved", overwrite=True)

    turns: dict[str, Callable[[], None]] = {
        "first": lambda: stream("first"),
        "saving": save,
        "all": lambda: stream("all"),
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            dist.barrier()
            start = time.perf_counter()
            turn()
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - start)
    count = sum(1 for _ in models.export_buckets(bucket_bytes=BUCKET))
    start = time.perf_counter()
    stream("all", statistics.median(times["all"]) / count)
    dist.barrier()
    times["slow consumer"] = [time.perf_counter() - start]
    return times


def forms(document: dict[str, Any], layout: str) -> dict[str, tuple[int, int]]:
    """Return the bytes handed out and the peak of memory of each kind of send, on one rank."""
    from layouts import arguments
    from mca_models import AutoModel
    from mca_models.templates import config_from_hf
    from memory import peak

    models = AutoModel.from_config(config_from_hf(document), arguments(layout), dtype="bfloat16")
    sender = models.weight_sender(bucket_bytes=BUCKET, split_experts=True)

    def change_layer() -> Any:
        for name, tensor in models.canonical_parameters():
            if "layers.1." in name:
                tensor.data += 1
        return sender.buckets()

    sends: dict[str, Callable[[], Any]] = {
        "full": lambda: models.export_buckets(bucket_bytes=BUCKET),
        "slices of experts": lambda: models.export_buckets(bucket_bytes=BUCKET, split_experts=True),
        "first send": sender.buckets,
        "no change": sender.buckets,
        "one layer changed": change_layer,
    }
    found = {}
    for name, send in sends.items():
        nbytes = 0
        with peak() as most:
            for bucket in send():
                nbytes += bucket.buffer.numel()
                del bucket
        found[name] = (nbytes, most[0])
    return found


def print_times(document: dict[str, Any], layout: str, rounds: int, parent: Path) -> None:
    """Time the turns and print the medians."""
    from harness import run_ranks
    from layouts import world_size

    with tempfile.TemporaryDirectory(dir=parent) as folder:
        found = run_ranks(world_size(layout), measure, document, layout, rounds, Path(folder), timeout=900)
        nbytes = sum(file.stat().st_size for file in (Path(folder) / "saved").glob("*.safetensors"))
    medians = {name: max(statistics.median(rank[name]) for rank in found) for name in found[0]}
    print(f"{nbytes / 2**20:.0f} MiB on {layout}, medians of {rounds} turns")
    for name, seconds in medians.items():
        ratio = seconds / medians["saving"]
        print(f"{name:14} {seconds:6.3f} s  {nbytes / seconds / 2**30:5.2f} GiB/s  {ratio:.2f} of saving")


def main() -> None:
    """Run all turns and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=0, help="stacked experts of a layer; 0: a dense model")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns; 0: only bytes and memory")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    from harness import run_ranks
    from layouts import world_size

    document = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": args.hidden // 16,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if args.experts:
        document |= {
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": args.experts,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"] * args.layers,
            "rope_scaling": None,
        }
    size = world_size(args.layout)
    if args.rounds:
        print_times(document, args.layout, args.rounds, args.folder)
    sends = run_ranks(size, forms, document, args.layout, timeout=900)[-1]
    for name, (handed, most) in sends.items():
        print(
            f"{name:18} {handed / 2**20:7.0f} MiB handed out, peak {most / 2**20:6.0f} MiB beyond the model"
        )


if __name__ == "__main__":
    main()
