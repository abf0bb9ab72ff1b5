"""Small pictures, and a tokenizer and an image processor that know of them."""

from pathlib import Path

from PIL import Image
from tokenizers_for_tests import byte_tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}" + "".join(MARKS) + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def image_tokenizer():
    """A token per byte, the marks of a chat, and those around an image."""
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    return tokenizer


def image_token(tokenizer):
    """The id of the placeholder."""
    return tokenizer.convert_tokens_to_ids(MARKS[1])


def processor(**different):
    """Patches of 4 x 4 pixels, 2 x 2 of them a token, 4 to 16 tokens an image."""
    sizes = {"size": {"shortest_edge": 4 * 64, "longest_edge": 16 * 64}}
    return Qwen2VLImageProcessorPil(**{"patch_size": 4, "merge_size": 2, **sizes, **different})


def draw(path: Path, width: int, height: int, colour=(200, 30, 60)) -> Path:
    """A picture with a cross."""
    image = Image.new("RGB", (width, height), colour)
    for x in range(width):
        image.putpixel((x, x * height // width), (255, 255, 255))
    image.save(path)
    return path
