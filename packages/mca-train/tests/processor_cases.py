"""Families with images: their processors in transformers, and the tokens that these write."""

import sys
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import image_kinds
import numpy as np
import pytest
from drawn_images import processor
from transformers import ProcessorMixin
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.cohere2_vision.image_processing_cohere2_vision import Cohere2VisionImageProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.glmga.image_processing_pil_glmga import GlmgaImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

SIDE = {"height": 16, "width": 16}


def with_pixtral_images(module, processor):
    """The class, whose module imports one that needs torchvision for a function that is not called."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    stand_in = ModuleType(name)
    stand_in.get_resize_output_image_size = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, stand_in)
        return getattr(import_module(f"transformers.models.{module}"), processor)


def pixtral_processor():
    return with_pixtral_images("pixtral.processing_pixtral", "PixtralProcessor")


def got_ocr2_processor():
    class Processor(GotOcr2Processor):
        """One of chats, also without images, which the tower of the tests makes four features of."""

        num_image_tokens = 4

        def prepare_inputs_layout(self, images=None, text=None, **kwargs):
            if not images:
                return ProcessorMixin.prepare_inputs_layout(self, text=text)
            flat = [image for own in images for image in own]
            return super().prepare_inputs_layout(images=flat, text=text, **kwargs)

        def validate_inputs(self, *args, **kwargs):
            """Allow chats without images."""

    return Processor


def lighton_processor():
    return with_pixtral_images("lighton_ocr.processing_lighton_ocr", "LightOnOcrProcessor")


@dataclass(frozen=True)
class Case:
    """A family.

    Args:
        processor: The class of transformers.
        mark: What its chat template writes for an image.
        tokens: The special tokens of images, by their names in the tokenizer.
        images: The image processor.
        vision: What ``config.json`` says of images, from the ids of the tokens.
        options: For the class.
        written: Tokens that the processor writes without naming them in ``image_token_ids``.
    """

    processor: Any
    mark: str
    tokens: dict[str, str]
    images: Any
    vision: Any
    options: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()


def qwen(processor_class):
    return Case(
        lambda: processor_class,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
        processor,
        lambda ids: {f"{name}_id": ids[name] for name in ids},
    )


def omni(processor_class):
    marks = {
        f"{kind}_{side}_token": f"<|{kind}_{side}|>"
        for kind in ("vision", "audio")
        for side in ("bos", "eos")
    }
    names = {"vision_bos_token": "vision_start_token_id", "vision_eos_token": "vision_end_token_id"}
    return Case(
        lambda: processor_class,
        "<|vision_bos|><|IMAGE|><|vision_eos|>",
        {"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>", **marks},
        processor,
        lambda ids: {names.get(name, f"{name}_id"): ids[name] for name in ids},
    )


def media_ids(ids):
    return {f"{name}_id": ids[name] for name in ("image_token", "video_token")}


def glm(processor_class=Glm4vProcessor):
    sizes = {"size": {"shortest_edge": 4 * 64, "longest_edge": 16 * 64}}
    return Case(
        lambda: processor_class,
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>",
        },
        lambda: Glm4vImageProcessorPil(patch_size=4, merge_size=2, **sizes),
        lambda ids: {f"{name}_id": ids[name] for name in ids},
    )


INTERNVL = Case(
    lambda: InternVLProcessor,
    "<IMG_CONTEXT>",
    {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
    lambda: GotOcr2ImageProcessorPil(size=SIDE, max_patches=6),
    lambda ids: {
        "image_token_id": ids["context_image_token"],
        "image_seq_length": 4,
        "vision_config": {},
    },
    {"image_seq_length": 4},
)
QIANFAN = replace(
    INTERNVL,
    processor=lambda: QianfanOCRProcessor,
    mark="<image>",
    tokens={name: token for name, token in INTERNVL.tokens.items() if name != "video_token"},
)
GOT = Case(
    got_ocr2_processor,
    "<img><imgpad></img>",
    {"image_token": "<imgpad>", "start_image_token": "<img>", "end_image_token": "</img>"},
    lambda: GotOcr2ImageProcessorPil(size=SIDE),
    lambda ids: {
        "image_token_index": ids["image_token"],
        "vision_config": {"image_size": 16, "patch_size": 2},
    },
)
MISTRAL = Case(
    pixtral_processor,
    "[IMG]",
    {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    lambda: image_processing_pil_pixtral.PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=4),
    lambda ids: {
        "image_token_index": ids["image_token"],
        "spatial_merge_size": 2,
        "vision_config": {"patch_size": 4},
    },
    {"patch_size": 4, "spatial_merge_size": 2},
)
LIGHTON = replace(
    MISTRAL,
    processor=lighton_processor,
    mark="<|image_pad|>",
    tokens={
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    },
    vision=lambda ids: {
        "image_token_id": ids["image_token"],
        "spatial_merge_size": 2,
        "vision_config": {"patch_size": 4},
    },
)
GEMMA = Case(
    lambda: Gemma3Processor,
    "<start_of_image>",
    {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    lambda: Gemma3ImageProcessorPil(size=SIDE),
    lambda ids: {
        "image_token_index": ids["image_token"],
        "boi_token_index": ids["boi_token"],
        "eoi_token_index": ids["eoi_token"],
        "mm_tokens_per_image": 4,
        "vision_config": {},
    },
    {"image_seq_length": 4},
)


def gemma4(processor_class, images):
    return Case(
        lambda: processor_class,
        "<|image|>",
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        lambda: images(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70),
        lambda ids: {f"{name}_id": ids[name] for name in ids},
        {},
        ("<|image>", "<image|>"),
    )


LLAVA = Case(
    lambda: LlavaProcessor,
    "<image>",
    {"image_token": "<image>"},
    lambda: CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=SIDE),
    lambda ids: {
        "image_token_index": ids["image_token"],
        "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
    },
    {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
)
LLAVA_NEXT = replace(
    LLAVA,
    processor=lambda: LlavaNextProcessor,
    images=lambda: LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size=SIDE, image_grid_pinpoints=[[16, 32], [32, 32]]
    ),
    vision=lambda ids: {**LLAVA.vision(ids), "image_grid_pinpoints": [[16, 32], [32, 32]]},
)
ONEVISION = Case(
    lambda: LlavaOnevisionProcessor,
    "<image>",
    {"image_token": "<image>", "video_token": "<video>"},
    lambda: LlavaOnevisionImageProcessorPil(size=SIDE, image_grid_pinpoints=[[16, 32], [32, 32]]),
    lambda ids: {
        "image_token_index": ids["image_token"],
        "image_grid_pinpoints": [[16, 32], [32, 32]],
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {"image_size": 16, "patch_size": 4},
    },
    {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
)


def smolvlm_processor():
    """The class, which needs a package to spell the number of a video's frames."""
    processing_smolvlm.num2words = processing_smolvlm.num2words or str

    class Processor(processing_smolvlm.SmolVLMProcessor):
        apply_chat_template = ProcessorMixin.apply_chat_template  # its own asks the video processor

    return Processor


IDEFICS = Case(
    lambda: Idefics3Processor,
    "<image>",
    {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        **{
            f"row_{row}_col_{column}": f"<row_{row}_col_{column}>"
            for row in range(1, 4)
            for column in range(1, 4)
        },
    },
    lambda: Idefics3ImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 16}),
    lambda ids: {
        "image_token_id": ids["image_token"],
        "scale_factor": 2,
        "vision_config": {"image_size": 16, "patch_size": 4},
    },
    {"image_seq_len": 4},
)
IDEFICS = replace(IDEFICS, written=tuple(IDEFICS.tokens.values()))
LLAMA4 = Case(
    lambda: Llama4Processor,
    "<|image|>",
    {
        "image_token": "<|image|>",
        "patch_token": "<|patch|>",
        "start_of_image_token": "<|image_start|>",
        "end_of_image_token": "<|image_end|>",
        "tile_x_separator_token": "<|tile_x_separator|>",
        "tile_y_separator_token": "<|tile_y_separator|>",
    },
    lambda: Llama4ImageProcessor(size=SIDE, max_patches=6),
    lambda ids: {
        "image_token_index": ids["patch_token"],
        "vision_config": {"image_size": 16, "patch_size": 4},
    },
    {"patch_size": 4},
    ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)
AYA = Case(
    lambda: AyaVisionProcessor,
    "<image>",
    {
        "patch_token": "<|IMG_PATCH|>",
        "start_token": "<|START_OF_IMG|>",
        "end_token": "<|END_OF_IMG|>",
        "break_token": "<|IMG_LINE_BREAK|>",
    },
    lambda: GotOcr2ImageProcessorPil(size=SIDE, max_patches=6),
    lambda ids: {
        "image_token_index": ids["patch_token"],
        "vision_config": {"image_size": 16, "patch_size": 4},
    },
    {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
    ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
)
COMMAND_A = Case(
    lambda: Cohere2VisionProcessor,
    "<|IMG_PATCH|>",
    {
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    },
    lambda: Cohere2VisionImageProcessor(size=SIDE, max_patches=6, patch_size=2),
    lambda ids: {
        "image_token_id": ids["image_token"],
        "vision_config": {"image_size": 16, "patch_size": 4},
    },
)
KIMI = Case(
    lambda: Kimi_K25Processor,
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    {
        "image_token": "<|media_pad|>",
        "video_token": "<|kimi_k25_video_placeholder|>",
        "start_token": "<|media_begin|>",
        "content_token": "<|media_content|>",
        "end_token": "<|media_end|>",
    },
    lambda: Kimi_K25ImageProcessor(
        patch_size=4, merge_size=2, max_patches=64, size={"max_height": 8, "max_width": 8}
    ),
    lambda ids: {"image_token_id": ids["image_token"], "video_token_id": ids["video_token"]},
)
DEEPSEEK = Case(
    lambda: DeepseekVLProcessor,
    "<image_placeholder>",
    {"image_token": "<image_placeholder>"},
    lambda: DeepseekVLImageProcessorPil(size=SIDE, min_size=8),
    lambda ids: {
        "image_token_id": ids["image_token"],
        "vision_config": {"image_size": 16, "patch_size": 8},
    },
    {"num_image_tokens": 4},
)


class OvisProcessor(Ovis2Processor):
    """One that takes lists, of which its own counts no tiles."""

    def replace_image_token(self, image_inputs, image_idx, **options):
        grids = [np.array(grid) for grid in image_inputs["grids"]]
        return super().replace_image_token({**image_inputs, "grids": grids}, image_idx, **options)


OVIS = Case(
    lambda: OvisProcessor,
    "<image>",
    {
        "image_token": "<image>",
        "atom_token": "<IMG_ATOM>",
        **{f"{name.lower()}_mark": f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")},
    },
    lambda: Ovis2ImageProcessorPil(size=SIDE, crop_to_patches=True, max_patches=6),
    lambda ids: {
        "image_token_id": ids["atom_token"],
        "visual_indicator_token_ids": [token for name, token in ids.items() if name.endswith("_mark")],
        "vision_config": {"image_size": 16, "patch_size": 4, "hidden_stride": 2},
    },
    {"image_seq_length": 4},
)
OVIS = replace(OVIS, written=tuple(OVIS.tokens.values()))
LFM2 = Case(
    lambda: Lfm2VlProcessor,
    "<image>",
    {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
        "image_end_token": "<|image_end|>",
        **{
            f"row_{row}_col_{column}": f"<|img_row_{row}_col_{column}|>"
            for row in range(1, 5)
            for column in range(1, 5)
        },
    },
    lambda: Lfm2VlImageProcessor(
        **{"tile_size": 16, "encoder_patch_size": 4, "max_tiles": 4},
        **{"min_image_tokens": 2, "max_image_tokens": 4},
    ),
    lambda ids: {"image_token_id": ids["image_token"]},
)
LFM2 = replace(LFM2, written=tuple(LFM2.tokens.values()))
MINICPM = Case(
    lambda: image_kinds.MiniCPM,
    "<|image_pad|>",
    image_kinds.MINICPM,
    lambda: image_kinds.MiniCPMV4_6ImageProcessorPil(scale_resolution=16, patch_size=2, max_slice_nums=6),
    lambda ids: {
        **{"image_token_id": ids["image_token"], "video_token_id": ids["video_token"]},
        "vision_config": {"patch_size": 2},
    },
    written=tuple(image_kinds.MINICPM.values()),
)
CASES = {
    "aya_vision": AYA,
    "cohere2_vision": COMMAND_A,
    "qwen2_vl": qwen(Qwen2VLProcessor),
    "qwen2_5_vl": qwen(Qwen2_5_VLProcessor),
    "qwen2_5_omni_thinker": omni(Qwen2_5OmniProcessor),
    "qwen3_omni_moe_thinker": omni(Qwen3OmniMoeProcessor),
    "qwen3_vl": qwen(Qwen3VLProcessor),
    "qwen3_vl_moe": qwen(Qwen3VLProcessor),
    "qwen3_5": qwen(Qwen3VLProcessor),
    "qwen3_5_moe": qwen(Qwen3VLProcessor),
    "glm4v": glm(),
    "glm4v_moe": glm(),
    "glm46v": glm(Glm46VProcessor),
    "glm_ocr": glm(Glm46VProcessor),
    "glmga": replace(
        glm(Glm46VProcessor),
        images=lambda: GlmgaImageProcessorPil(
            patch_size=4, merge_size=2, size={"shortest_edge": 4 * 64, "longest_edge": 16 * 64}
        ),
    ),
    "internvl": INTERNVL,
    "qianfan_ocr": QIANFAN,
    "got_ocr2": GOT,
    "mistral3": MISTRAL,
    "lighton_ocr": LIGHTON,
    "gemma3": GEMMA,
    "gemma4": gemma4(Gemma4Processor, Gemma4ImageProcessorPil),
    "gemma4_unified": gemma4(Gemma4UnifiedProcessor, Gemma4UnifiedImageProcessor),
    "llava": LLAVA,
    "vipllava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": ONEVISION,
    "idefics3": IDEFICS,
    "lfm2_vl": LFM2,
    "minicpmv4_6": MINICPM,
    "lfm3_vl": qwen(Lfm3VlProcessor),
    "ovis2": OVIS,
    "smolvlm": replace(
        IDEFICS,
        processor=smolvlm_processor,
        images=lambda: SmolVLMImageProcessorPil(
            size={"longest_edge": 48}, max_image_size={"longest_edge": 16}
        ),
    ),
    "exaone4_5": replace(qwen(Exaone4_5_Processor), mark="<|image_pad|>", vision=media_ids),
    "deepseek_vl": DEEPSEEK,
    "llama4": LLAMA4,
    "kimi_k25": KIMI,
}
