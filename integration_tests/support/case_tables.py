"""Tables of test cases by subject: the models on parallel layouts that ``pytest --cases all`` runs."""

from collections.abc import Iterable, Sequence

import tiny_vision
from tiny_hf import ALIKE

from cases import Case, can_have, product
from lora_cases import ALIKE as NAMED_ADAPTERS
from lora_cases import OWN as SPECIAL_ADAPTERS
from lora_cases import TRAINED as TRAINED_ADAPTERS
from parity import is_sparse
from reference import DENSE_CASES, FAMILY_CASES, MOE_CASES, NEWEST
from vision_passes import DENSE as DENSE_VISION
from vision_passes import SPARSE as SPARSE_VISION
from vision_passes import SPARSE_VIDEOS, VIDEOS


def _with_experts(models: Iterable[str], layouts: Sequence[str]) -> list[Case]:
    """Return every model on every layout; only models with experts have expert parallelism."""
    return [
        case
        for case in product(models, layouts)
        if "ep2" not in case.layout
        or ("moe" in case.model if case.model in tiny_vision.CASES else is_sparse(case.model))
    ]


_DENSE_LAYOUTS = (
    *("tp1", "tp2sp", "tp4", "tp2", "cp2", "pp2vpp2"),
    *("tp2cp2sp", "tp2pp2vpp2", "cp2pp2", "pp2", "dp2", "tp2pp2"),
)
_MOE_LAYOUTS = (
    *("tp1", "tp2sp", "dp2", "ep2", "cp2", "pp2vpp2"),
    *("tp2ep2etp1", "pp2vpp2ep2", "tp2cp2sp", "dp2etp2", "ep2allgather", "tp2etp2ep2"),
    *("cp2ep2", "tp2ep2etp1allgather", "tp2etp1sp", "tp2pp2ep2etp1", "cp2ep2pp2"),
)
GRADIENTS = (
    *product(DENSE_CASES, _DENSE_LAYOUTS),
    *product(MOE_CASES, _MOE_LAYOUTS),
    *product(["mixtral"], ("dp4etp4", "tp2dp2etp4sp", "tp4etp2sp", "pp2dp2etp2")),
)
"""Logits and gradients of the common families."""
EXPERT_BIASES = tuple(case for case in GRADIENTS if case.model in ("glm4_moe", "deepseek_v3"))
"""Models whose routers have biases that move by the counts of tokens."""

_DENSE_FAMILIES = (
    *("cwm", "granite", "gemma2", "olmo2", "olmo3", "exaone4", "exaone4-no-window", "glm4", "qwen3_5_text"),
    *("nemotron_h-dense", "phi3-short", "phi3-long", "phi3-partial", "gemma3-two-ropes", "olmo3-yarn"),
    "smollm3-windows",
)
_MOE_FAMILIES = (
    *("olmoe", "minimax_m2", "glm4_moe_lite", "gpt_oss", "deepseek_v2", "deepseek_v2-no-q-lora"),
    *("qwen3_next", "qwen3_5_moe_text", "nemotron_h", "nemotron_h-latent", "deepseek_v3-choice"),
)
_UNCUT_EXPERTS = ("gpt_oss",)
"""Experts with biases, which tensor parallelism cannot cut."""
FAMILY_GRADIENTS = tuple(
    case
    for case in (
        *product(
            [*_DENSE_FAMILIES, *(model for model in ALIKE if not is_sparse(model))],
            ("tp2cp2sp", "pp2vpp2", "tp1", "tp2", "tp2sp", "cp2"),
        ),
        *product(
            [*_MOE_FAMILIES, *(model for model in ALIKE if is_sparse(model))],
            ("tp2ep2etp1", "cp2ep2pp2", "tp1", "ep2", "cp2", "pp2vpp2ep2", "tp2etp2ep2"),
        ),
        Case("bamba", "tp4"),  # two tensor ranks for each group of heads with states
    )
    if not (case.model in _UNCUT_EXPERTS and "etp2" in case.layout)
)
"""Logits and gradients of families with special layers."""
PACKED_FAMILIES = tuple(
    case
    for case in product(
        [
            *("gpt_oss", "gemma3-two-ropes", "olmo2", "qwen3_5_text", "nemotron_h-dense", "deepseek_v32"),
            *(
                "bailing_hybrid",
                "gemma4_text",
                "gpt2",
                "granite_swa",
                "falcon_mamba",
                "jamba",
                "kimi_linear",
                "lfm2",
                "lfm3",
                "llama4_text",
                "mimo_v2_flash",
            ),
            *(
                "gemma4_text-e2b",
                "longcat_flash",
                "minimax",
                "minimax_m3_vl_text",
                "ministral3",
                "olmo_hybrid",
            ),
        ],
        ("tp1", "cp2", "tp2cp2sp"),
    )
    if case.layout == "tp1" or (case.model in _UNCUT_EXPERTS) == (case.layout == "cp2")
)
"""Packed rows of families with special layers."""
PACKED = tuple(
    product(("qwen3", "mistral", "qwen2-yarn", "deepseek_v3"), ("tp1", "cp2", "tp2sp", "tp2cp2sp"))
)
"""Packed rows of the common families."""

TRAINED_ADAPTER_CASES = (
    *product(
        [name for name, (base, _) in TRAINED_ADAPTERS.items() if not is_sparse(base)],
        ("tp1", "tp2", "tp2sp", "pp2", "pp2vpp2", "tp2pp2", "tp2pp2sp", "cp2", "tp2cp2sp"),
    ),
    *product(
        [name for name, (base, _) in TRAINED_ADAPTERS.items() if is_sparse(base)],
        ("tp1", "ep2", "pp2", "tp2ep2etp1sp", "tp2ep2etp2sp", "pp2ep2", "cp2ep2"),
    ),
)
"""Adapters that are trained, saved, loaded and merged; the models are names in `lora_cases`."""
_SPARSE_ADAPTERS = (
    *(name for name, (_, settings) in SPECIAL_ADAPTERS.items() if settings.get("target_parameters")),
    *(name for name in NAMED_ADAPTERS if is_sparse(name)),
)
ADAPTER_GRADIENTS = (
    *product(
        [name for name in (*SPECIAL_ADAPTERS, *NAMED_ADAPTERS) if name not in _SPARSE_ADAPTERS],
        ("tp2pp2", "tp1", "tp2cp2sp"),
    ),
    *product(_SPARSE_ADAPTERS, ("cp2ep2", "tp1", "tp2ep2etp1sp")),
    # on two ranks, each axis by itself
    *(Case("qwen2", "pp2"), Case("llama-saved", "tp2sp"), Case("gemma3_text", "cp2")),
    *(Case("gpt2", "tp2sp"), Case("gemma4_text-e2b", "tp2sp")),
)
"""Gradients of adapters; the models are names in `lora_cases`."""

_LOG_PROB_MODELS = (
    *("llama", "qwen3-tied", "gemma2", "granite"),
    *("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"),
)
LOG_PROBS = (
    *_with_experts(
        _LOG_PROB_MODELS,
        (
            *("tp1", "tp2sp", "tp2pp2", "pp2vpp2", "cp2tp2sp"),
            *("pp2cp2", "ep2", "tp2ep2etp1sp", "ep2pp2vpp2", "dp2tp2"),
        ),
    ),
    *_with_experts(NEWEST, ("tp1", "tp2pp2", "cp2tp2sp", "ep2pp2vpp2")),
    Case("llama", "pp2vpp2dp2"),
    Case("qwen3_moe", "tp2ep2etp1dp2sp"),
)
"""Log-probabilities and entropies of tokens."""

_ALL_MODELS = (*FAMILY_CASES, *tiny_vision.CASES)
WEIGHT_LOADING = (
    *_with_experts(_ALL_MODELS, ("tp2pp2sp", "tp2pp2vpp2sp", "tp2ep2etp1dp2sp")),
    Case("gpt_oss", "ep2pp2"),
    Case("gemma4_text-e2b", "tp2sp"),  # its layers cannot be split over pipeline stages
)
"""Hugging Face tensors that are loaded into a live model."""
WEIGHT_STREAMS = tuple(
    _with_experts(
        _ALL_MODELS, ("tp2pp2sp", "tp2pp2vpp2sp", "pp2dp2", "tp2cp2sp", "tp2ep2etp1dp2sp", "ep2pp2")
    )
)
"""Weights of a live model as a stream of Hugging Face tensors."""

_COMMON_VISION_LAYOUTS = (
    *("tp1", "tp2sp", "pp2", "cp2", "dp2", "cp2packed", "tp2cp2packed-sp", "pp2recompute", "dp2overlap"),
)
IMAGES = tuple(
    case
    for case in (
        *product(DENSE_VISION, (*_COMMON_VISION_LAYOUTS, "tp2", "tp2cp2sp", "pp2vpp2")),
        *product(SPARSE_VISION, (*_COMMON_VISION_LAYOUTS, "ep2", "tp2ep2etp1", "cp2ep2pp2")),
        *product(VIDEOS, (*_COMMON_VISION_LAYOUTS, "tp2cp2sp")),
        *product(SPARSE_VIDEOS, ("tp1", "ep2", "cp2packed")),
        *product(("minicpmv4_6-4x",), ("tp1", "tp2sp", "cp2packed")),
    )
    # vision features enter after each of the first two layers, so a first stage of one layer raises an error
    if not (case.model in ("qwen3_vl", "qwen3_vl_moe") and "vpp2" in case.layout)
)
"""Losses and gradients of rows with images and videos."""
MEDIA_LOG_PROBS = tuple(
    case
    for case in (
        *product(DENSE_VISION, ("tp1", "tp2sp", "pp2", "cp2")),
        *product(VIDEOS, ("tp1", "tp2sp", "pp2", "cp2")),
        *product(SPARSE_VISION, ("tp1", "ep2", "cp2")),
        *product(SPARSE_VIDEOS, ("tp1",)),
    )
)
"""Logits and log-probabilities of rows with media."""
IMAGE_STEPS = (
    *(
        Case(model, layout, ("distributed-optimizer",))
        for model in (*DENSE_VISION, *SPARSE_VISION)
        for layout in ("tp2sp", "pp2", "cp2", "dp2")
        if can_have(model, layout)
    ),
    *(Case("qwen2_5_vl", "tp2sp"), Case("gemma3", "dp2")),
)
"""Optimizer steps on rows with images."""
IMAGE_ADAPTERS = tuple(
    product(
        (
            *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "gemma3", "internvl", "mistral3"),
            *("gemma4-31b", "gemma4-e2b"),
            *("qwen2_audio", "qwen3_asr", "qwen2_5_omni_thinker", "gemma4_unified"),
            *("exaone4_5", "cohere2_vision", "deepseek_vl", "qianfan_ocr", "got_ocr2", "glm_ocr", "glmga"),
            "minicpmv4_6",
        ),
        ("tp2sp", "tp2", "pp2", "cp2packed", "dp2overlap"),
    )
)
"""Adapters on vision models."""
TEXT_OF_VISION_MODELS = tuple(
    Case(model, layout)
    for model in tiny_vision.CASES
    for layout in ("tp2ep2etp1" if "moe" in model else "tp2pp2vpp2", "pp2", "tp2sp", "cp2", "tp1")
    if can_have(model, layout)
)
"""Vision models on rows without images."""

TE_LAYERS = (
    *product(
        [model for model in FAMILY_CASES if not is_sparse(model)], ("tp2sp", "tp2pp2sp", "pp2vpp2", "tp2")
    ),
    *product(
        [model for model in FAMILY_CASES if is_sparse(model)],
        ("tp2ep2etp1sp", "pp2vpp2ep2", "tp2sp", "tp2ep2etp1", "ep2"),
    ),
)
"""Models of Transformer Engine's layers."""
TE_MEDIA = tuple(
    product(
        (
            *("qwen2_audio", "qwen3_asr", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
            *("gemma4-31b", "gemma4-e2b", "kimi_k25-moe", "cohere2_vision", "lfm3_vl", "lighton_ocr"),
            *("qianfan_ocr", "got_ocr2", "glm_ocr", "glmga", "minicpmv4_6"),
        ),
        ("tp2sp", "pp2", "cp2packed"),
    )
)
"""Models with images and audio of Transformer Engine's layers."""
TE_CONTEXT_PARALLEL = (
    *product(FAMILY_CASES, ("cp2",)),
    *(Case("qwen3", "tp2cp2sp"), Case("deepseek_v3", "tp2cp2sp"), Case("qwen2", "cp4")),
    *(Case("mixtral", "cp2ep2pp2"), Case("qwen3_moe", "cp2ep2")),
)
"""Context parallelism over Transformer Engine's attention."""
