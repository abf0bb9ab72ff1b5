"""Short tones, a tokenizer with Qwen2-Audio's marks, and a feature extractor of two seconds."""

import numpy as np
from drawn_images import MARKS, TEMPLATE, image_tokenizer

AUDIO_MARKS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
RATE = 16000


def tone(pitch, seconds, rate=RATE, channels=1):
    """A sine of ``pitch`` hertz, ``[samples, channels]``; the second channel is silent."""
    times = np.arange(round(seconds * rate)) / rate
    found = np.zeros((len(times), channels), np.float32)
    found[:, 0] = 0.5 * np.sin(2 * np.pi * pitch * times)
    return found


def write(path, pitch=440, seconds=0.5, rate=RATE, channels=1):
    """A clip at ``path``, whose suffix names the format."""
    import soundfile

    soundfile.write(path, tone(pitch, seconds, rate, channels), rate)
    return path


def audio_tokenizer():
    """The tokenizer of images, with a placeholder of audio clips."""
    tokenizer = image_tokenizer()
    tokenizer.add_tokens(list(AUDIO_MARKS), special_tokens=True)
    asked = "{% if part['type'] == 'image' %}" + "".join(MARKS)
    heard = "{% if part['type'] == 'audio' %}" + "".join(AUDIO_MARKS) + "{% elif part['type'] == 'image' %}"
    tokenizer.chat_template = TEMPLATE.replace(asked, heard + "".join(MARKS))
    return tokenizer


def extractor(mels=8, seconds=2):
    """Spectrograms of a window of ``seconds``."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
