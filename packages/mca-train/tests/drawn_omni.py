"""Tones, and a tokenizer and processors of Qwen's omni models that know of them."""

from importlib import import_module

import numpy as np
import transformers
from drawn_images import MARKS, processor
from drawn_videos import VIDEO_MARK, video_processor, video_tokenizer

KINDS = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}
AUDIO_MARKS = ("<|audio_start|>", "<|AUDIO|>", "<|audio_end|>")
PATCH = {"qwen2_5_omni": 14, "qwen3_omni_moe": 16}
DEFAULT_FPS = {"qwen2_5_omni": 2, "qwen3_omni_moe": 1}
RATE = 16000


def tone(seconds):
    """A tone that rises."""
    times = np.arange(int(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * (300 + 200 * times) * times)).astype(np.float32)


def omni_tokenizer():
    """The tokenizer of videos, with placeholders of audio, and the names that omni processors read."""
    tokenizer = video_tokenizer()
    tokenizer.add_tokens(list(AUDIO_MARKS), special_tokens=True)
    asked = "{% if part['type'] == 'video' %}"
    heard = "{% if part['type'] == 'audio' %}" + "".join(AUDIO_MARKS)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        asked, heard + asked.replace("{% if", "{% elif"), 1
    )
    names = dict(zip(("vision_bos", "image", "vision_eos"), MARKS, strict=True)) | {"video": VIDEO_MARK}
    names |= dict(zip(("audio_bos", "audio", "audio_eos"), AUDIO_MARKS, strict=True))
    for name, mark in names.items():
        setattr(tokenizer, f"{name}_token", mark)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(mark))
    return tokenizer


def extractor():
    """Spectrograms of 8 bands."""
    return transformers.WhisperFeatureExtractor(feature_size=8)


def whole_processor(kind, tokenizer, images):
    """The processor of transformers, without torchvision's images."""
    home = import_module(f"transformers.models.{kind}.processing_{kind}")

    class Processor(getattr(home, f"{KINDS[kind]}Processor")):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    return Processor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=video_processor("qwen2_5_omni", patch_size=PATCH[kind]),
        feature_extractor=extractor(),
        chat_template=tokenizer.chat_template,
    )


def expected(kind, tokenizer, said, files, images_processor=None, **options):
    """Return transformers' inputs for ``said`` and all frames of ``files``, which it samples itself."""
    import av

    videos, known = [], []
    for file in files:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
            known.append({"total_num_frames": len(frames), "fps": float(stream.average_rate)})
        videos.append(frames)
    return whole_processor(kind, tokenizer, images_processor or processor())(
        text=[said],
        **({"videos": videos, "video_metadata": known} if videos else {}),
        return_tensors="pt",
        **options,
    )
