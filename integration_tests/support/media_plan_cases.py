"""Runs with media on which the plan is compared with the dry run, for towers that the table of `plan_cases` lacks."""

import json
from pathlib import Path

from dry_run_cases import be_no_rank
from plan_cases import _BASE as BASE
from plan_cases import _TOWER as TOWER
from plan_cases import MODELS as OTHERS
from plan_cases import Values

LLAMA = BASE | {"model_type": "llama"}
QWEN = BASE | {"model_type": "qwen2", "use_sliding_window": False}
HEARS: Values = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
MODELS: dict[str, Values] = {
    "row and column tiles": {
        "model_type": "idefics3",
        "image_token_id": 31990,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": LLAMA,
        "vision_config": TOWER | {"model_type": "idefics3_vision", "image_size": 448, "num_hidden_layers": 4},
    },
    "joined tiles": {
        "model_type": "llava_next",
        "image_token_index": 31990,
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[336, 672], [672, 336]],
        "text_config": LLAMA,
        "vision_config": TOWER | {"model_type": "clip_vision_model", "image_size": 336},
    },
    "lone tiles": {
        "model_type": "llava_onevision",
        "image_token_index": 31990,
        "video_token_index": 31991,
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[336, 336]],
        "text_config": QWEN,
        "vision_config": TOWER
        | {"model_type": "siglip_vision_model", "image_size": 336}
        | {"vision_use_head": False},
    },
    "thumbnails": {
        "model_type": "lfm2_vl",
        "image_token_id": 31990,
        "projector_hidden_size": 1024,
        "text_config": BASE
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
        | {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
        "vision_config": TOWER | {"model_type": "siglip2_vision_model", "patch_size": 16, "num_patches": 256},
    },
    "convolutions": {
        "model_type": "lfm3_vl",
        "image_token_id": 31990,
        "video_token_id": 31991,
        "vision_start_token_id": 31992,
        "vision_end_token_id": 31993,
        "projector_hidden_size": 1024,
        "text_config": {key: value for key, value in BASE.items() if key != "rope_theta"}
        | {"model_type": "lfm3", "tie_word_embeddings": True},
        "vision_config": TOWER | {"model_type": "lfm3_vl_vision", "num_key_value_heads": 4, "patch_size": 16},
    },
    "fused layers": {
        "model_type": "qianfan_ocr",
        "image_token_id": 31990,
        "tie_word_embeddings": False,
        "text_config": BASE | {"model_type": "qwen3"},
        "vision_config": TOWER
        | {"model_type": "qianfan_ocr_vision", "image_size": [448, 448], "patch_size": [14, 14]},
    },
    "norms of heads": {
        "model_type": "glm_ocr",
        "image_token_id": 31990,
        "tie_word_embeddings": False,
        "text_config": BASE
        | {"model_type": "glm_ocr_text", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "vision_config": {key: value for key, value in TOWER.items() if key[:4] != "num_"}
        | {
            "model_type": "glm_ocr_vision",
            "depth": 12,
            "num_heads": 8,
            "out_hidden_size": BASE["hidden_size"],
        },
    },
    "kept scores": {
        "model_type": "got_ocr2",
        "image_token_index": 31990,
        "tie_word_embeddings": False,
        "text_config": QWEN,
        "vision_config": {key: value for key, value in TOWER.items() if key != "intermediate_size"}
        | {"model_type": "got_ocr2_vision", "mlp_dim": TOWER["intermediate_size"], "output_channels": 256}
        | {"image_size": 512, "patch_size": 16, "global_attn_indexes": [2, 5]},
    },
    "merged windows": {
        "model_type": "minicpmv4_6",
        "image_token_id": 31990,
        "insert_layer_id": 5,
        "tie_word_embeddings": False,
        "text_config": BASE
        | {"model_type": "qwen3_5_text", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        | {"layer_types": ["full_attention"] * 4, "head_dim": 64},
        "vision_config": TOWER | {"model_type": "minicpmv4_6_vision", "image_size": 980},
    },
    "visual words": {
        "model_type": "ovis2",
        "image_token_id": 31990,
        "visual_indicator_token_ids": [31991, 31992, 31993, 31994, 31995],
        "hidden_size": BASE["hidden_size"],
        "vocab_size": BASE["vocab_size"],
        "text_config": QWEN,
        "vision_config": TOWER
        | {"model_type": "ovis2_vision", "image_size": 448, "hidden_stride": 2, "vocab_size": 16384},
    },
    "windows of clips": {
        "model_type": "voxtral",
        "audio_token_id": 31990,
        "text_config": LLAMA,
        "audio_config": HEARS | {"model_type": "voxtral_encoder"},
    },
    "masked windows": {
        "model_type": "audioflamingo3",
        "audio_token_id": 31990,
        "text_config": QWEN,
        "audio_config": HEARS | {"model_type": "audioflamingo3_encoder"},
    },
    "rotated clips": {
        "model_type": "glmasr",
        "audio_token_id": 31990,
        "text_config": LLAMA,
        "audio_config": HEARS | {"model_type": "glmasr_encoder"},
    },
    "conformer": OTHERS["pooled"]
    | {"audio_config": HEARS | {"model_type": "gemma4_audio", "output_proj_dims": 512}},
    "images": OTHERS["images"],
    "pooled": OTHERS["pooled"],
}
REQUESTS: dict[str, tuple[str, Values, Values]] = {
    **{
        name: (name, {"images": 2}, {"freeze": []})
        for name in (
            "row and column tiles",
            "thumbnails",
            "convolutions",
            "fused layers",
            "kept scores",
            "norms of heads",
            "visual words",
            "lone tiles",
        )
    },
    "joined tiles": ("joined tiles", {"images": 1, "image_size": 500}, {"freeze": []}),
    "joined tiles frozen": ("joined tiles", {"images": 1, "image_size": 500}, {}),
    "convolutions frozen": ("convolutions", {"images": 2}, {}),
    "kept scores frozen": ("kept scores", {"images": 2}, {}),
    # so many that a tower without merged windows is caught
    "merged windows": ("merged windows", {"images": 24}, {"freeze": []}),
    "merged windows frozen": ("merged windows", {"images": 2}, {}),
    "visual words frozen": ("visual words", {"images": 2}, {}),
    **{
        f"{name} of videos": (name, {"videos": 2, "video_frames": 6}, {"freeze": []})
        for name in ("images", "lone tiles", "merged windows", "pooled")
    },
    **{
        name: (name, {"clips": 2}, {"freeze": []})
        for name in ("windows of clips", "masked windows", "rotated clips")
    },
    "conformer": ("conformer", {"images": 0, "clips": 2}, {"freeze": []}),
}
"""Model, requested media, and changes of a plain run."""


def plan_and_dry_run(name: str, folder: Path) -> tuple[int, int]:
    """Return the bytes that the dry run finds, and those that the plan says; runs in a separate process."""
    from mca_train.dry_run.stages import count_micro_batches
    from mca_train.dry_run.step import measure_step
    from mca_train.plan.memory import plan_layout
    from mca_train.plan.options import PlanOptions
    from mca_train.run.plan_input import make_plan_input, planned_media
    from mca_train.run.rules import check
    from mca_train.run.settings import make_settings
    from mca_train.tasks import TASKS

    be_no_rank()
    model, requested, changes = REQUESTS[name]
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    values = {
        "model_name_or_path": str(folder),
        "output_dir": f"{folder}/out",
        "seq_length": 4096,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "bf16": True,
        **changes,
    }
    findings = check(TASKS["sft"], make_settings(TASKS["sft"], values, "test"), lambda *_: 1)
    assert not findings.impossible, findings.impossible
    run = findings.run
    media = planned_media(run, PlanOptions(**requested))
    assert media is not None
    plan = plan_layout(make_plan_input(run, "local", media=media), run.settings.training, run.layout, 1)
    count = count_micro_batches(2, run.layout, 0)
    found = measure_step(run.task, run.settings, run.model, 0, 1, count, media)
    (needs,) = plan.stages
    return found.peak, needs.total
