"""Gemma 4's own processors for small patches, and a tokenizer with the tokens that they write."""

from importlib import import_module
from types import SimpleNamespace

from tokenizers_for_tests import byte_tokenizer

MARKS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
VIDEO = "<|video|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|image|>{% elif part['type'] == 'video' %}"
    "<|video|>{% elif part['type'] == 'audio' %}<|audio|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def gemma4_tokenizer():
    """A token per byte, and the marks of media, which the tokenizer knows by their names."""
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_tokens([*MARKS.values(), VIDEO, "\n\n\n"], special_tokens=True)
    for name, mark in MARKS.items():
        setattr(tokenizer, name, mark)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(mark))
    return tokenizer


def token_ids(tokenizer):
    """The keys of ``config.json`` that name these tokens."""
    found = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in MARKS}
    found["eoa_token_index"] = found.pop("eoa_token_id")
    return found | {"video_token_id": tokenizer.convert_tokens_to_ids(VIDEO)}


def gemma4_processors(model_type, tokenizer, patch=4, **sound):
    """The image, video and audio processors, and the whole one; images and frames have up to 70 tokens."""
    home = f"transformers.models.{model_type}"
    name = "Gemma4Unified" if model_type == "gemma4_unified" else "Gemma4"

    def made(module, suffix, **options):
        return getattr(import_module(f"{home}.{module}_{model_type}"), name + suffix)(**options)

    sizes = {"patch_size": patch, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    backend = ("image_processing_pil", "ImageProcessorPil")
    if model_type == "gemma4_unified":
        backend = ("image_processing", "ImageProcessor")
    images, videos = made(*backend, **sizes), made("video_processing", "VideoProcessor", **sizes)
    Whole = getattr(import_module(f"{home}.processing_{model_type}"), f"{name}Processor")

    class Processor(Whole):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    audio = made("feature_extraction", "AudioFeatureExtractor", **sound)
    whole = Processor(audio, images, tokenizer, videos)
    return SimpleNamespace(images=images, videos=videos, audio=audio, whole=whole)
