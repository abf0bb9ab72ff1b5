"""A model learns to see motion: clips of moving squares, a tiny Qwen2.5-VL, and transformers to answer in the end.

    uv run examples/video.py

Draws short clips with PyAV, in each a square of one colour that moves in one direction, and writes them down as rows
with a `videos` column; makes a random Qwen2.5-VL with a word tokenizer and a video processor; trains all of it on
pipeline 2 (`mca-train sft`, 2 CPU ranks), which exports to Hugging Face format in the end; and lets transformers name
colour and direction in clips that were not used in training. No single frame shows a direction. A guess is right once
in sixteen times. Takes about two minutes on 2 free cores, and needs the extra `video` of mca-train.
"""

import argparse
import json
import random
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from steps import run, start_clean, step

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
QUESTION = "where does it go ?"
SIDE, PATCH, MERGE = 32, 4, 2  # pixels of a frame, of a patch; patches of a token
FRAMES, RATE = 6, 4  # of a clip; frames per second
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CHAT = ("<|im_start|>", "<|im_end|>", "user", "assistant")
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'video' %}"
    + " ".join((MARKS[0], MARKS[3], MARKS[2]))
    + " {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def main() -> None:
    arguments = parse_arguments()
    out = arguments.output_dir.resolve()
    start_clean(out, "video")
    started = time.monotonic()

    step(1, 4, "Draw clips, and write down what moves where")
    draw = random.Random(0)
    train = write_rows(out / "train", arguments.clips, draw)
    held_out = write_rows(out / "held_out", arguments.held_out, draw)

    step(2, 4, "Make a random Qwen2.5-VL with transformers")
    make_checkpoint(out / "random")

    step(3, 4, "mca-train sft: pipeline 2, on 2 CPU ranks; tower, projector and text are trained")
    run("mca-train", "sft", write_config(out, train, arguments.steps))

    step(4, 4, "transformers: name colour and direction in clips that were held out")
    summary(answered(out / "trained" / "hf", held_out), time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("video_out"), help="made again at each run")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--clips", type=int, default=1000, help="to train on (default 1000)")
    parser.add_argument("--held_out", type=int, default=96, help="to answer about (default 96)")
    return parser.parse_args()


def write_rows(folder: Path, count: int, draw: random.Random) -> Path:
    """Clips, and one JSON line ``{"messages": ..., "videos": [file]}`` for each."""
    folder.mkdir()
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(count):
            colour, direction = draw.choice(list(COLOURS)), draw.choice(list(DIRECTIONS))
            write_clip(folder / f"{number}.mp4", colour, direction, draw)
            turns = [
                {"role": "user", "content": f"<video>{QUESTION}"},
                {"role": "assistant", "content": f"{colour} {direction}"},
            ]
            rows.write(json.dumps({"messages": turns, "videos": [f"{number}.mp4"]}) + "\n")
    print(f"  {folder}: {count} clips of {FRAMES} frames of {SIDE} x {SIDE} pixels")
    return folder / "rows.jsonl"


def write_clip(path: Path, colour: str, direction: str, draw: random.Random) -> None:
    """A square of any size that crosses the clip in one direction, on any grey."""
    import av

    size, grey = draw.randrange(8, 13), draw.randrange(60)
    room = SIDE - size
    across, dx, dy = draw.randrange(room), *DIRECTIONS[direction]
    start, speed = draw.randrange(3), draw.uniform(2.5, room / FRAMES)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(RATE))
        stream.width, stream.height, stream.pix_fmt, stream.options = SIDE, SIDE, "yuv420p", {"crf": "18"}
        for number in range(FRAMES):
            gone = round(start + speed * number)
            along = gone if dx + dy > 0 else room - gone
            left, top = (along, across) if dx else (across, along)
            image = np.full((SIDE, SIDE, 3), grey, np.uint8)
            image[top : top + size, left : left + size] = COLOURS[colour]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def make_tokenizer() -> Any:
    """A token for each word that is ever said."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|pad|>", *MARKS, *CHAT, *QUESTION.split(), *COLOURS, *DIRECTIONS]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<|pad|>", *MARKS, *CHAT[:2]])
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def make_checkpoint(directory: Path) -> None:
    """Write what a published checkpoint has: weights, a tokenizer with a chat template, a video processor."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "initializer_range": 0.06,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": SIDE,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    sizes = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": SIDE**2}
    Qwen2VLVideoProcessor(patch_size=PATCH, merge_size=MERGE, size=sizes).save_pretrained(directory)
    seeing = sum(x.numel() for x in model.model.visual.parameters())
    print(f"  {directory}: {model.num_parameters():,} parameters, {seeing:,} of them see; all random")


def write_config(out: Path, train_file: Path, steps: int) -> Path:
    config = f"""\
model_name_or_path: {out / "random"}
output_dir: {out / "trained"}
train_file: [{train_file}]
seq_length: 128
video_fps: {RATE}
freeze: []                 # unset, the tower and the projector stay as they are
save_hf_model: true

pipeline_model_parallel_size: 2

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
    import av
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer, AutoVideoProcessor

    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    processor = AutoVideoProcessor.from_pretrained(checkpoint)
    asked = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    clips = []
    for row in given:
        with av.open(str(rows.parent / row["videos"][0])) as container:
            clips.append(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))
    seen = processor(videos=clips, do_sample_frames=False, return_tensors="pt")
    tokens = int(seen["video_grid_thw"][0].prod()) // MERGE**2  # all alike, as the clips are
    text = prompt.replace(MARKS[3], " ".join([MARKS[3]] * tokens))
    asked_ids = tokenizer([text] * len(given), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        said = model.generate(
            input_ids=asked_ids,
            attention_mask=torch.ones_like(asked_ids),
            mm_token_type_ids=2 * (asked_ids == model.config.video_token_id).int(),
            second_per_grid_ts=torch.full((len(given),), processor.temporal_patch_size / RATE),
            **seen,
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    words = tokenizer.batch_decode(said[:, asked_ids.shape[1] :], skip_special_tokens=True)
    return [(row["messages"][1]["content"], word) for row, word in zip(given, words, strict=True)]


def summary(answers: list[tuple[str, str]], seconds: float) -> None:
    right = sum(truth == said for truth, said in answers) / len(answers)
    for truth, said in answers[:8]:
        print(f"  {truth:<16} transformers says: {said}")
    good = right > 0.6
    print(f"\nDone in {seconds:.0f} s")
    chance = 1 / len(COLOURS) / len(DIRECTIONS)
    print(
        f"  [{'ok' if good else 'FAILED'}] {right:.0%} of {len(answers)} right; a guess is right at {chance:.0%}"
    )
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
