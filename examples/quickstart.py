"""The whole job on a laptop: a Hugging Face checkpoint through Megatron training and back.

    uv run examples/quickstart.py

Trains a tokenizer on the Python standard library's own source files, makes a small random Qwen3 checkpoint
with transformers, trains it with tensor x pipeline x virtual-pipeline parallelism on 4 CPU ranks
(`mca-train pretrain`), converts the result to Hugging Face format (`mca-convert`), and loads that with
transformers: its loss on held-out text must be the trainer's own. Takes about three minutes on 2 cores.
"""

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steps import run, start_clean, step

VOCAB, SEQ_LENGTH, EVAL_FILES = 512, 128, 6


def main() -> None:
    arguments = parse_arguments()
    out = arguments.output_dir.resolve()
    start_clean(out, "quickstart")
    started = time.monotonic()

    step(1, 5, "Collect real text: the standard library's own source")
    train_file, eval_file = write_corpus(out / "data")

    step(2, 5, "Train a tokenizer and make a random Qwen3 checkpoint with transformers")
    tokenizer = train_tokenizer(train_file)
    make_checkpoint(out / "hf_random", tokenizer)

    step(3, 5, "mca-train: tensor 2 x pipeline 2 x virtual pipeline 2, on 4 CPU ranks")
    config = write_config(out, train_file, eval_file, arguments.steps)
    run("mca-train", "pretrain", config)
    log = read_log(out / "trained")

    step(4, 5, "mca-convert: back to a Hugging Face checkpoint")
    run("mca-convert", "--checkpoint_path", out / "trained", "--output_path", out / "hf_trained")

    step(5, 5, "transformers: load it, check its loss, let it write")
    loss, sample = use_with_transformers(out / "hf_trained", eval_file)

    plot(log, out / "loss.png")
    summary(log, loss, sample, out, time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("quickstart_out"), help="made anew at each run"
    )
    parser.add_argument("--steps", type=int, default=240, help="training steps (default 240)")
    return parser.parse_args()


def write_corpus(directory: Path) -> tuple[Path, Path]:
    """One JSON line ``{"text": ...}`` per source file; a few files are held out for evaluation."""
    directory.mkdir()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [source.read_text(encoding="utf-8", errors="replace") for source in sources]
    small = [text for text in texts if 4_000 < len(text) < 60_000]
    files = directory / "train.jsonl", directory / "eval.jsonl"
    for path, part in zip(files, (small[EVAL_FILES:], small[:EVAL_FILES]), strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        print(f"  {path}: {len(part)} files, {sum(map(len, part)):,} characters")
    return files


def texts_of(file: Path) -> Iterator[str]:
    with file.open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_tokenizer(train_file: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(train_file), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def make_checkpoint(directory: Path, tokenizer: Any) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"  {directory}: {sum(p.numel() for p in model.parameters()):,} parameters, random")


def write_config(out: Path, train_file: Path, eval_file: Path, steps: int) -> Path:
    config = f"""\
model_name_or_path: {out / "hf_random"}
output_dir: {out / "trained"}
train_file: [{train_file}]
eval_file: [{eval_file}]
seq_length: {SEQ_LENGTH}

tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
virtual_pipeline_model_parallel_size: 2

max_steps: {steps}
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
per_device_eval_batch_size: 8
learning_rate: 5.0e-3
adam_beta2: 0.95
lr_scheduler_type: cosine
warmup_steps: 10
weight_decay: 0.0
logging_steps: 5
eval_strategy: "no"
save_strategy: "no"
do_eval: true
"""
    path = out / "train.yaml"
    path.write_text(config)
    return path


def read_log(directory: Path) -> dict[str, Any]:
    """The trainer's own JSON-lines log: the loss by step, and the last evaluation."""
    records = [json.loads(line) for line in (directory / "train_log.jsonl").read_text().splitlines()]
    losses = [(r["step"], r["loss"]) for r in records if "loss" in r]
    evaluation = [r["eval_loss"] for r in records if "eval_loss" in r][-1]
    return {"losses": losses, "eval_loss": evaluation}


def use_with_transformers(directory: Path, eval_file: Path) -> tuple[float, str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = [
        t for text in texts_of(eval_file) for t in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
    ]
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens), SEQ_LENGTH):
            block = torch.tensor([tokens[start : start + SEQ_LENGTH]])
            targets = block.shape[1] - 1
            if targets:
                total += model(block, labels=block).loss.item() * targets
                count += targets
        prompt = tokenizer("def ", return_tensors="pt").input_ids
        written = model.generate(prompt, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=20)
    return total / count, tokenizer.decode(written[0])


def plot(log: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps, losses = zip(*log["losses"], strict=True)
    axes.plot(steps, losses, label="training")
    axes.axhline(math.log(VOCAB), color="grey", linestyle=":", label="ln(vocabulary): a random guess")
    axes.scatter([steps[-1]], [log["eval_loss"]], color="tab:orange", zorder=3, label="held-out text")
    axes.set(xlabel="step", ylabel="loss", title="mca quickstart: tp 2 x pp 2 x vpp 2 on CPU", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def summary(log: dict[str, Any], loss: float, sample: str, out: Path, seconds: float) -> None:
    random_guess, last = math.log(VOCAB), log["losses"][-1][1]
    checks: list[tuple[str, bool]] = [
        (
            f"loss fell from {log['losses'][0][1]:.3f} to {last:.3f} (ln(vocab) is {random_guess:.3f})",
            last < 0.8 * random_guess,
        ),
        (
            f"held-out loss: trainer {log['eval_loss']:.5f}, transformers {loss:.5f}",
            abs(log["eval_loss"] - loss) < 1e-3,
        ),
    ]
    print("\nThe trained model writes:\n")
    print("    " + sample.replace("\n", "\n    "))
    print(f"\nDone in {seconds:.0f} s")
    for text, good in checks:
        print(f"  [{'ok' if good else 'FAILED'}] {text}")
    made = {
        "loss curve": out / "loss.png",
        "training log": out / "trained" / "train_log.jsonl",
        "Megatron checkpoint": out / "trained",
        "Hugging Face checkpoint": out / "hf_trained",
    }
    for name, path in made.items():
        print(f"  {name + ':':<25}{path}")
    if not all(good for _, good in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
