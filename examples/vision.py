"""A model learns to see: pictures of coloured shapes, a tiny Qwen3-VL, and transformers to answer in the end.

    uv run examples/vision.py

Draws small pictures with PIL, each one shape of one colour at any place and size, and writes them down as rows with an
`images` column; makes a random Qwen3-VL with a word tokenizer and an image processor; trains all of it, the vision
tower and the projector too, on tensor 2 x pipeline 2 (`mca-train sft`, 4 CPU ranks), which exports to Hugging Face
format in the end; and lets transformers name what is on pictures that were not used in training. A guess is right
once in sixteen times. Takes about two minutes on 2 cores.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from steps import run, start_clean, step

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
QUESTION = "what is this ?"
SIDE, PATCH, MERGE = 32, 4, 2  # pixels of a picture, of a patch; patches of a token
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CHAT = ("<|im_start|>", "<|im_end|>", "user", "assistant")
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}" + " ".join(MARKS[:3]) + " "
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def main() -> None:
    arguments = parse_arguments()
    out = arguments.output_dir.resolve()
    start_clean(out, "vision")
    started = time.monotonic()

    step(1, 4, "Draw pictures, and write down what is on them")
    draw = random.Random(0)
    train = write_rows(out / "train", arguments.pictures, draw)
    held_out = write_rows(out / "held_out", arguments.held_out, draw)

    step(2, 4, "Make a random Qwen3-VL with transformers")
    make_checkpoint(out / "random")

    step(3, 4, "mca-train sft: tensor 2 x pipeline 2, on 4 CPU ranks; tower, projector and text are trained")
    run("mca-train", "sft", write_config(out, train, arguments.steps))

    step(4, 4, "transformers: name what is on pictures that were held out")
    answers = answered(out / "trained" / "hf", held_out)
    summary(answers, time.monotonic() - started)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("vision_out"), help="made anew at each run")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--pictures", type=int, default=2000, help="to train on (default 2000)")
    parser.add_argument("--held_out", type=int, default=160, help="to answer about (default 160)")
    return parser.parse_args()


def write_rows(folder: Path, count: int, draw: random.Random) -> Path:
    """Pictures, and one JSON line ``{"messages": ..., "images": [file]}`` for each."""
    folder.mkdir()
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(count):
            shape, colour = draw.choice(SHAPES), draw.choice(list(COLOURS))
            picture(shape, colour, draw).save(folder / f"{number}.png")
            turns = [
                {"role": "user", "content": f"<image>{QUESTION}"},
                {"role": "assistant", "content": f"{colour} {shape}"},
            ]
            rows.write(json.dumps({"messages": turns, "images": [f"{number}.png"]}) + "\n")
    print(f"  {folder}: {count} pictures of {SIDE} x {SIDE} pixels")
    return folder / "rows.jsonl"


def picture(shape: str, colour: str, draw: random.Random) -> Image.Image:
    """A shape of any size at any place, of nearly its colour, on any grey."""
    grey = draw.randrange(60)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    size = draw.randrange(SIDE // 2, SIDE - 2)
    left, top = (draw.randrange(SIDE - size) for _ in range(2))
    fill = tuple(min(255, max(0, value + draw.randrange(-25, 26))) for value in COLOURS[colour])
    pen, box = ImageDraw.Draw(image), (left, top, left + size, top + size)
    if shape == "circle":
        pen.ellipse(box, fill)
    elif shape == "square":
        pen.rectangle(box, fill)
    elif shape == "triangle":
        pen.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill)
    else:
        third = size // 3
        pen.rectangle((left + third, top, left + size - third, top + size), fill)
        pen.rectangle((left, top + third, left + size, top + size - third), fill)
    return image


def make_tokenizer() -> Any:
    """A token for each word that is ever said."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<|pad|>", *MARKS, *CHAT, *QUESTION.split(), *COLOURS, *SHAPES]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<|pad|>", *MARKS, *CHAT[:2]])
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def make_checkpoint(directory: Path) -> None:
    """Write what a published checkpoint has: weights, a tokenizer with a chat template, an image processor."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
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
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    sizes = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": SIDE**2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=sizes).save_pretrained(directory)
    seeing = sum(x.numel() for x in model.model.visual.parameters())
    print(f"  {directory}: {model.num_parameters():,} parameters, {seeing:,} of them see; all random")


def write_config(out: Path, train_file: Path, steps: int) -> Path:
    config = f"""\
model_name_or_path: {out / "random"}
output_dir: {out / "trained"}
train_file: [{train_file}]
seq_length: 64
freeze: []                 # unset, the tower and the projector stay as they are
save_hf_model: true

tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
sequence_parallel: true

max_steps: {steps}
per_device_train_batch_size: 16
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
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    processor = AutoImageProcessor.from_pretrained(checkpoint)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    seen = processor(
        images=[Image.open(rows.parent / row["images"][0]) for row in given], return_tensors="pt"
    )
    tokens = [
        int(grid.prod()) // MERGE**2 for grid in seen["image_grid_thw"]
    ]  # all alike, as the pictures are
    texts = [prompt.replace(MARKS[1], " ".join([MARKS[1]] * count)) for count in tokens]
    asked_ids = tokenizer(texts, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        said = model.generate(
            input_ids=asked_ids,
            attention_mask=torch.ones_like(asked_ids),
            mm_token_type_ids=(asked_ids == model.config.image_token_id).int(),
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
    chance = 1 / len(SHAPES) / len(COLOURS)
    print(
        f"  [{'ok' if good else 'FAILED'}] {right:.0%} of {len(answers)} right; a guess is right at {chance:.0%}"
    )
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
