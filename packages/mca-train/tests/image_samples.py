"""Rows with images, and the samples that they become."""

import json
from types import SimpleNamespace

from drawn_images import MARKS, draw, processor

from mca_train.data.image_rows import ImageReader
from mca_train.tasks import TASKS
from mca_train.tasks.load import load_stream, load_tokenized

ANSWER = {"role": "assistant", "content": "red"}


def pictures(folder):
    """Pictures of 2 x 2, 2 x 3 and 4 x 4 tokens, one that is none, and a processor's directory."""
    draw(folder / "small.png", 16, 16)
    draw(folder / "wide.png", 24, 16, (10, 200, 30))
    draw(folder / "large.png", 64, 64)
    (folder / "broken.png").write_bytes(b"no picture")
    processor().save_pretrained(folder / "model")


def reader(tokenizer, folder, vision=True):
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    config = SimpleNamespace(model_type="qwen2_5_vl", vision_fields=ids if vision else None)
    return ImageReader(config=config, directories=(folder / "model",))


def load(rows, tokenizer, folder, vision=True, kind="sft", arguments=None, **others):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (arguments or TASKS[kind].data_arguments)(model_name_or_path="m", **others)
    images = reader(tokenizer, folder, vision)
    return load_tokenized(TASKS[kind], [str(file)], tokenizer, given, images=images)


def asked(*content):
    return {"messages": [{"role": "user", "content": list(content)}, ANSWER]}


def text(words):
    return {"type": "text", "text": words}


def placed(sample):
    return [(place.start, place.rows, place.columns) for place in sample["images"].places]


def streamed(rows, tokenizer, folder, kind="sft", **arguments):
    (folder / "stream.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = TASKS[kind].data_arguments(model_name_or_path="m", streaming=True, **arguments)
    files, images = [str(folder / "stream.jsonl")], reader(tokenizer, folder)
    return list(load_stream(TASKS[kind], files, tokenizer, given, seed=None, images=images))
