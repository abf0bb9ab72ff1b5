"""Small clips that move, written by PyAV, and a tokenizer and processors that know of them."""

from fractions import Fraction

import numpy as np
from drawn_images import MARKS, TEMPLATE, image_tokenizer, processor

VIDEO_MARK = "<|video_pad|>"
SIZES = {"shortest_edge": 4 * 64, "longest_edge": 16 * 64}


def moving(frames, height=16, width=24):
    """Frames ``[frames, height, width, 3]`` in which a light square goes right on a changing ground."""
    found = np.zeros((frames, height, width, 3), np.uint8)
    for number in range(frames):
        found[number] = (20 * number % 256, 60, 200 - 10 * number % 200)
        at = number * 2 % (width - 6)
        found[number, 4:10, at : at + 6] = 250
    return found


def write(path, frames=12, rate=4, height=16, width=24, codec="libx264", sound=None, **options):
    """A clip of so many frames at ``path``, whose suffix names the container, with uncompressed ``sound`` at 16 kHz."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "10"} if codec == "libx264" else {}
        for name, value in options.items():
            setattr(stream, name, value)
        heard = None if sound is None else container.add_stream("pcm_f32le", rate=16000, layout="mono")
        for image in moving(frames, height, width):
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
        if heard is not None:
            frame = av.AudioFrame.from_ndarray(sound[None], format="flt", layout="mono")
            frame.sample_rate, frame.pts = 16000, 0
            for packet in (*heard.encode(frame), *heard.encode()):
                container.mux(packet)
    return path


def video_tokenizer():
    """The tokenizer of images, with a placeholder of videos."""
    tokenizer = image_tokenizer()
    tokenizer.add_tokens([VIDEO_MARK], special_tokens=True)
    written = MARKS[0] + VIDEO_MARK + MARKS[2]
    asked = "{% if part['type'] == 'image' %}"
    of_video = "{% if part['type'] == 'video' %}" + written + "{% elif part['type'] == 'image' %}"
    tokenizer.chat_template = TEMPLATE.replace(asked, of_video)
    return tokenizer


def video_processor(model_type="qwen2_5_vl", **different):
    """Frames of patches of 4 x 4 pixels, 2 x 2 of them a token."""
    if model_type.startswith(("qwen2", "exaone")):
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor as Processor
    else:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor as Processor

        different = {"size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64}, **different}
    return Processor(**{"patch_size": 4, "merge_size": 2, "size": SIZES, "min_frames": 2, **different})


GLM_MARKS = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
GLM_VIDEO = ("<|begin_of_video|>", "<|video|>", "<|end_of_video|>")


def glm_tokenizer():
    """A token per byte, and the marks of GLM-4V around images and videos."""
    tokenizer = image_tokenizer()
    tokenizer.add_tokens([*GLM_MARKS, *GLM_VIDEO], special_tokens=True)
    asked = "{% if part['type'] == 'image' %}" + "".join(MARKS)
    of_video = "{% if part['type'] == 'video' %}" + "".join(GLM_VIDEO) + "{% elif part['type'] == 'image' %}"
    tokenizer.chat_template = TEMPLATE.replace(asked, of_video + "".join(GLM_MARKS))
    return tokenizer


def glm_processors(model_type, tokenizer, **different):
    """GLM's video processor, and the whole one of transformers."""
    from importlib import import_module

    kind, name = ("glm4v", "Glm4v") if model_type in ("glm4v", "glm4v_moe") else ("glm46v", "Glm46V")
    of_videos = ("glmga", "Glmga") if model_type == "glmga" else (kind, name)
    home = f"transformers.models.{kind}"
    module = import_module("transformers.models.{0}.video_processing_{0}".format(of_videos[0]))
    Videos = getattr(module, f"{of_videos[1]}VideoProcessor")
    Whole = getattr(import_module(f"{home}.processing_{kind}"), f"{name}Processor")

    class Processor(Whole):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    sizes = {"shortest_edge": 4 * 64, "longest_edge": 64 * 64}
    videos = Videos(**{"patch_size": 4, "merge_size": 2, "size": sizes, **different})
    whole = Processor(
        image_processor=processor(),
        tokenizer=tokenizer,
        video_processor=videos,
        chat_template=tokenizer.chat_template,
    )
    return videos, whole


def whole_processor(model_type, tokenizer, **different):
    """The processor of transformers for text, images and videos, without torchvision's images."""
    from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
    from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    kinds = {
        "qwen2_vl": Qwen2VLProcessor,
        "qwen2_5_vl": Qwen2_5_VLProcessor,
        "exaone4_5": Exaone4_5_Processor,
        "lfm3_vl": Lfm3VlProcessor,
    }

    class Processor(kinds.get(model_type, Qwen3VLProcessor)):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    return Processor(
        image_processor=processor(),
        tokenizer=tokenizer,
        video_processor=video_processor(model_type, **different),
        chat_template=tokenizer.chat_template,
    )
