"""Memory at the ends of a model, against sums by hand: logits, evaluation, images, the embedding's gradient."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config import TrainingArguments
from mca_models.templates import config_from_hf
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.chunks import (
    _LAYERS,
    ChunkSpec,
    PassMemory,
    _boundary_tensors,
    _recomputed_blocks,
    chunk_memory,
    forward_only_memory,
)
from mca_train.plan.local_layers import running
from mca_train.plan.sizes import Sizes
from mca_train.plan.vision_memory import plan_images

ROOT = Path(__file__).parents[4]
TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256
LLAMA_8B = ROOT / "tools/recipes/llama-3.1-8b.json"
GEMMA_27B = ROOT / "packages/mca-models/tests/data/vision_configs/gemma-3-27b.json"


def model_of(folder: Path, file: Path = LLAMA_8B, *, tokens: int = TOKENS, **changes: Any) -> ChunkSpec:
    """A model on one rank; ``softcap`` is of its final logits."""
    softcap = changes.pop("softcap", None)
    settings = {"output_dir": str(folder), "bf16": True, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(**settings | {"per_device_train_batch_size": 1})
    for key, value in changes.items():
        setattr(args, key, value)
    config = config_from_hf(json.loads(file.read_text())).replace_fields(final_logit_softcapping=softcap)
    return ChunkSpec(config, args, Sizes.for_training(config, args, tokens), "local", False)


def forward_of(model: ChunkSpec) -> float:
    """More than what is kept, at the worst moment of the forward pass."""
    ((chunk,),) = model.config.pipeline_plan().chunks
    return chunk_memory(model, chunk).forward


def kept_of(model: ChunkSpec) -> float:
    ((chunk,),) = model.config.pipeline_plan().chunks
    return chunk_memory(model, chunk).kept


def test_the_forward_pass_takes_logits_in_bf16_before_their_softmax(tmp_path: Path) -> None:
    assert forward_of(model_of(tmp_path)) == TOKENS * VOCABULARY * 2


@pytest.mark.parametrize(("softcap", "numbers"), [(None, 2 + 4), (30.0, 2 + 2 + 4)])
def test_a_chunk_of_logits_is_there_in_bf16_and_fp32(
    softcap: float | None, numbers: int, tmp_path: Path
) -> None:
    model = model_of(tmp_path, loss_chunk_size=1024, softcap=softcap)
    assert forward_of(model) == 1024 * VOCABULARY * numbers


def test_a_fused_loss_keeps_logits_in_bf16_instead_of_fp32(tmp_path: Path) -> None:
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    more = kept_of(model_of(tmp_path)) - kept_of(model_of(tmp_path, **fused))
    assert more == TOKENS * VOCABULARY * (4 - 2)


def test_the_loss_keeps_the_logits_of_mtp_layers_on_another_chunk(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    ((chunk,),) = model.config.pipeline_plan().chunks
    last = replace(chunk, layers=(), has_embedding=False)
    predicting = replace(model, config=model.config.replace_fields(mtp_num_layers=2))
    more = chunk_memory(predicting, last).kept - chunk_memory(model, last).kept
    assert more == 2 * TOKENS * VOCABULARY * 4 + 2 * model.hidden_bytes  # and their hidden states, received


def test_evaluation_takes_its_input_the_final_norm_and_logits_twice(tmp_path: Path) -> None:
    """The norm: its input and what it normalizes in fp32, its output in bf16; logits: bf16, softmax in fp32."""
    model = model_of(tmp_path)
    ((chunk,),) = model.config.pipeline_plan().chunks
    assert forward_only_memory(model, chunk) == TOKENS * (
        2 * HIDDEN + (4 + 4 + 2) * HIDDEN + (2 + 4) * VOCABULARY
    )


def test_evaluation_of_a_layer_takes_what_the_layer_keeps_and_runs_with(tmp_path: Path) -> None:
    """Without the loss: two norms, queries, keys and values of every head, output, sums, and an MLP of five tensors."""
    model = model_of(tmp_path)
    ((chunk,),) = model.config.pipeline_plan().chunks
    query, heads, inner = 4096, 32, 14336
    kept = 2 * 10 * HIDDEN + 4 * 2 * query + 4 * heads + 5 * 2 * inner
    middle = replace(chunk, has_embedding=False, has_loss=False)
    assert forward_only_memory(model, middle) == TOKENS * (2 * HIDDEN + kept + 2 * 2 * HIDDEN)


def test_the_gradient_of_the_embedding_is_the_fullest_moment_of_few_tokens(tmp_path: Path) -> None:
    """Its matrix in bf16, less what the backward pass has freed by then: all that was kept."""
    model = model_of(tmp_path, tokens=64)
    ((chunk,),) = model.config.pipeline_plan().chunks
    first = replace(chunk, has_loss=False, layers=chunk.layers[:1])
    found = chunk_memory(model, first)
    assert found.backward + found.kept == VOCABULARY * HIDDEN * 2


def test_a_frozen_tower_takes_one_block_at_a_time(tmp_path: Path) -> None:
    """SigLIP: 64 x 64 patches of an image, the widest of the MLP's four tensors, and two of the hidden size."""
    model = model_of(tmp_path, GEMMA_27B)
    images = plan_images(model.config, frozenset({"language"}), TOKENS, takes=True)
    assert images is not None
    taken = 64 * 64 * (4 * 4304 + 2 * 1152) * 2
    assert images.running(model.sizes) == taken
    ((chunk,),) = model.config.pipeline_plan().chunks
    tower = replace(chunk, has_loss=False, layers=())
    text_input = TOKENS * 5376 * 2
    media = PlannedMedia(images=images)
    assert forward_only_memory(replace(model, media=media), tower) == text_input + taken
    assert chunk_memory(replace(model, media=media), tower).forward == taken


def test_what_layers_keep_later_is_not_there_when_the_tower_runs(tmp_path: Path) -> None:
    model = model_of(tmp_path, GEMMA_27B, tokens=64)
    images = plan_images(model.config, frozenset({"language"}), TOKENS, takes=True)
    assert images is not None
    ((chunk,),) = model.config.pipeline_plan().chunks
    first = replace(chunk, has_loss=False, layers=chunk.layers[:1])
    kept = model.layer(0).kept
    assert 0 < kept < images.running(model.sizes)
    forward = chunk_memory(replace(model, media=PlannedMedia(images=images)), first).forward
    assert forward == images.running(model.sizes) - kept


def test_a_chunk_in_the_middle_keeps_its_input_and_output_for_the_schedule(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    ((chunk,),) = model.config.pipeline_plan().chunks
    first, middle = (replace(chunk, has_embedding=is_first, has_loss=False) for is_first in (True, False))
    between = TOKENS * HIDDEN * 2
    assert chunk_memory(model, middle).kept - chunk_memory(model, first).kept == between
    assert (
        chunk_memory(model, replace(chunk, layers=(), has_embedding=False, has_loss=False)).kept
        == 2 * between
    )


def test_a_dense_backward_pass_needs_two_gradients_of_the_mlp_and_one_of_its_input(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    assert running(model.config, model.sizes, 0) == (
        2 * TOKENS * HIDDEN * 2,
        TOKENS * (2 * 14336 + HIDDEN) * 2,
    )


def test_embeddings_of_every_layer_take_their_channels_in_bf16(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    assert (model.hidden_bytes, model.per_layer) == (TOKENS * HIDDEN * 2, 0)
    config: Any = SimpleNamespace(per_layer_input_size=256, num_layers=30)
    assert replace(model, config=config).per_layer == TOKENS * 30 * 256 * 2


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({}, 2),
        ({"has_loss": True}, 1),
        ({"has_embedding": True}, 1),
        ({"has_embedding": True, "has_loss": True}, 0),
        ({"width": 4}, 1),  # an fp32 input is not copied
        ({"recompute": "full"}, 1),
        ({"recompute": "selective"}, 2),
        ({"implementation": "transformer_engine"}, 1),
        ({"on_gpu": True}, 2),
        ({"on_gpu": True, "waits": True}, 1),
        ({"waits": True}, 2),
        ({"mtp": 1}, 4),  # features for an MTP layer in both
        ({"mtp": 2, "has_embedding": True}, 3),
        ({"mtp": 1, "has_loss": True}, 2),
        ({"mtp": 1, "on_gpu": True, "waits": True}, 2),
        ({"mtp": 1, "media": None}, 2),
        (
            {"mtp": 2, "media": None, "mtp_layers": (0, 1)},
            4,
        ),  # hidden states of MTP layers, for another stage
        ({"mtp": 2, "media": None, "has_loss": True}, 3),
        ({"mtp": 2, "media": None, "has_loss": True, "mtp_layers": (0, 1)}, 1),
    ],
)
def test_inputs_and_outputs_that_only_the_schedule_references(changes: dict[str, Any], tensors: int) -> None:
    case = {
        "has_loss": False,
        "has_embedding": False,
        "width": 2,
        "recompute": None,
        "implementation": "local",
    }
    case |= {"on_gpu": False, "waits": False, "mtp": 0, "mtp_layers": (), "media": True} | changes
    model: Any = SimpleNamespace(
        hidden_bytes=10,
        on_gpu=case["on_gpu"],
        implementation=case["implementation"],
        sizes=SimpleNamespace(width=case["width"], waits_for_sends=case["waits"]),
        training=SimpleNamespace(recompute_granularity=case["recompute"]),
        config=SimpleNamespace(mtp_num_layers=case["mtp"], layout=SimpleNamespace(pp=2)),
        media=(case["mtp"] and case["media"]) or None,
    )
    chunk: Any = SimpleNamespace(**{name: case[name] for name in ("has_loss", "has_embedding", "mtp_layers")})
    assert _boundary_tensors(model, chunk) == 10 * tensors


@pytest.mark.parametrize("again", [(), ("mlp",)])
def test_a_layers_backward_pass_has_gradients_of_embeddings_and_what_is_recomputed(
    again: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [SimpleNamespace(bytes=3.0, module="mlp"), SimpleNamespace(bytes=5.0, module="")]
    monkeypatch.setattr(ChunkSpec, "lines", lambda self, number, worst: lines)
    layers: Any = SimpleNamespace(running=lambda config, sizes, number: (7.0, 11.0))
    monkeypatch.setitem(_LAYERS, "local", layers)
    training: Any = SimpleNamespace(recompute_granularity="selective", recompute_modules=[*again] or ["moe"])
    config: Any = SimpleNamespace(per_layer_input_size=13, num_layers=2)
    sizes: Any = SimpleNamespace(split=17, width=4)
    spec = ChunkSpec(config, training, sizes, "local", False)
    dropped = 3 if again else 0
    assert spec.layer(0) == PassMemory(8 - dropped, 7, 11 + dropped + 2 * 17 * 2 * 13 * 4)


@pytest.mark.parametrize(
    ("method", "count", "kept"),
    [
        ("uniform", 1, [10, 10 + 10, 10, 10 + 10]),  # the second of a pair has the experts' output too
        ("uniform", 2, [10, 10]),
        ("uniform", 3, [10, 10 + 10]),
        ("block", 2, [10, 10 + 10, 1, 1]),
        ("block", 5, [10, 10 + 10, 10, 10 + 10]),
    ],
)
def test_a_recomputed_block_keeps_its_inputs(method: str, count: int, kept: list[int]) -> None:
    training: Any = SimpleNamespace(
        recompute_num_layers=count, recompute_method=method, distribute_saved_activations=False
    )
    sizes: Any = SimpleNamespace(layout=SimpleNamespace(tp=2), moe=SimpleNamespace(shortcut=True))
    model: Any = SimpleNamespace(training=training, sizes=sizes, hidden_bytes=10)
    layers = [PassMemory(1, 2, 3)] * 4
    assert [block.kept for block in _recomputed_blocks(model, layers)] == kept
    sizes.moe = None
    recomputed = min(len(kept), count) if method == "block" else len(kept)
    assert [block.kept for block in _recomputed_blocks(model, layers)] == [10] * recomputed + kept[
        recomputed:
    ]
    training.distribute_saved_activations = True
    assert _recomputed_blocks(model, layers)[0].kept == 5
