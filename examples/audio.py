"""A model learns to hear: clips of two tones, a tiny Qwen2-Audio, and transformers to answer in the end.

    uv run examples/audio.py

Writes short clips with soundfile, in each two tones of any loudness and length, and writes them down as rows with an
`audios` column; makes a random Qwen2-Audio with a word tokenizer and a feature extractor; trains all of it on tensor
parallel 2 (`mca-train sft`, 2 CPU ranks), which exports to Hugging Face format in the end; and lets transformers name
both tones, in their order, in clips that were not used in training. A guess is right once in sixteen times. Takes about
two minutes on 2 free cores, and needs the extra `audio` of mca-train.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from steps import run, start_clean, step

TONES = {"low": 300, "middle": 600, "high": 1200, "shrill": 2400}  # hertz
QUESTION = "what sounds ?"
RATE, WINDOW, MELS = 16000, 1, 32  # samples per second; seconds that the model hears; bands of a spectrogram
MARKS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
CHAT = ("<|im_start|>", "<|im_end|>", "user", "assistant")
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'audio' %}"
    + " ".join(MARKS)
    + " {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def main() -> None:
    arguments = parse_arguments()
    out = arguments.output_dir.resolve()
    start_clean(out, "audio")
    started = time.monotonic()

    step(1, 4, "Make clips, and write down what sounds in which order")
    draw = random.Random(0)
    train = write_rows(out / "train", arguments.clips, draw)
    held_out = write_rows(out / "held_out", arguments.held_out, draw)

    step(2, 4, "Make a random Qwen2-Audio with transformers")
    make_checkpoint(out / "random")

    step(3, 4, "mca-train sft: tensor parallel 2, on 2 CPU ranks; tower, projector and text are trained")
    run("mca-train", "sft", write_config(out, train, arguments.steps))

    step(4, 4, "transformers: name both tones in clips that were held out")
    summary(answered(out / "trained" / "hf", held_out), time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("audio_out"), help="made again at each run")
    parser.add_argument("--steps", type=int, default=160, help="training steps (default 160)")
    parser.add_argument("--clips", type=int, default=1000, help="to train on (default 1000)")
    parser.add_argument("--held_out", type=int, default=96, help="to answer about (default 96)")
    return parser.parse_args()


def write_rows(folder: Path, count: int, draw: random.Random) -> Path:
    """Clips, and one JSON line ``{"messages": ..., "audios": [file]}`` for each."""
    import soundfile

    folder.mkdir()
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(count):
            first, second = draw.choice(list(TONES)), draw.choice(list(TONES))
            clip = np.concatenate([tone(first, draw), tone(second, draw)])
            soundfile.write(folder / f"{number}.flac", clip, RATE)
            turns = [
                {"role": "user", "content": f"<audio>{QUESTION}"},
                {"role": "assistant", "content": f"{first} {second}"},
            ]
            rows.write(json.dumps({"messages": turns, "audios": [f"{number}.flac"]}) + "\n")
    print(f"  {folder}: {count} clips of up to {WINDOW} s")
    return folder / "rows.jsonl"


def tone(name: str, draw: random.Random) -> Any:
    """A tone of any length, loudness and small deviation, and a little noise."""
    seconds, loudness = draw.uniform(0.2, 0.45), draw.uniform(0.1, 0.8)
    times = np.arange(round(seconds * RATE)) / RATE
    pitch = TONES[name] * draw.uniform(0.9, 1.1)
    noise = np.random.default_rng(draw.randrange(1 << 30)).normal(0, 0.02, len(times))
    return loudness * np.sin(2 * np.pi * pitch * times) + noise


def make_tokenizer() -> Any:
    """A token for each word that is ever said."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|pad|>", *MARKS, *CHAT, *QUESTION.split(), *TONES]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<|pad|>", *MARKS, *CHAT[:2]])
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def make_checkpoint(directory: Path) -> None:
    """Write what a published checkpoint has: weights, a tokenizer with a chat template, a feature extractor."""
    import torch
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=WINDOW)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.06,
    }
    audio = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": MELS,
        "max_source_positions": extractor.nb_max_frames // 2,
        "initializer_range": 0.1,
    }
    config = Qwen2AudioConfig(
        text_config=text,
        audio_config=audio,
        audio_token_index=tokenizer.convert_tokens_to_ids(MARKS[1]),
    )
    model = Qwen2AudioForConditionalGeneration(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    extractor.save_pretrained(directory)
    hearing = sum(x.numel() for x in model.model.audio_tower.parameters())
    print(f"  {directory}: {model.num_parameters():,} parameters, {hearing:,} of them hear; all random")


def write_config(out: Path, train_file: Path, steps: int) -> Path:
    config = f"""\
model_name_or_path: {out / "random"}
output_dir: {out / "trained"}
train_file: [{train_file}]
seq_length: 64
freeze: []                 # unset, the tower and the projector stay as they are
save_hf_model: true

tensor_model_parallel_size: 2
sequence_parallel: true

max_steps: {steps}
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
learning_rate: 2.0e-3
adam_beta2: 0.95
lr_scheduler_type: cosine
warmup_steps: 20
weight_decay: 0.0
logging_steps: 20
save_strategy: "no"
"""
    path = out / "train.yaml"
    path.write_text(config)
    return path


def answered(checkpoint: Path, rows: Path) -> list[tuple[str, str]]:
    """Return the right answer and transformers' answer for each row."""
    import soundfile
    import torch
    from transformers import AutoFeatureExtractor, AutoTokenizer, Qwen2AudioForConditionalGeneration
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    model = Qwen2AudioForConditionalGeneration.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    extractor = AutoFeatureExtractor.from_pretrained(checkpoint)
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    asked = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": QUESTION}]}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    found = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        clip, _ = soundfile.read(rows.parent / row["audios"][0], dtype="float32")
        heard = processor(text=[prompt], audio=[clip], sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            said = model.generate(
                **heard, max_new_tokens=2, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        words = tokenizer.decode(said[0, heard["input_ids"].shape[1] :], skip_special_tokens=True)
        found.append((row["messages"][1]["content"], words))
    return found


def summary(answers: list[tuple[str, str]], seconds: float) -> None:
    right = sum(truth == said for truth, said in answers) / len(answers)
    for truth, said in answers[:8]:
        print(f"  {truth:<16} transformers says: {said}")
    good = right > 0.6
    print(f"\nDone in {seconds:.0f} s")
    chance = 1 / len(TONES) ** 2
    print(
        f"  [{'ok' if good else 'FAILED'}] {right:.0%} of {len(answers)} right; a guess is right at {chance:.0%}"
    )
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
