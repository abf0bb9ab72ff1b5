"""Images, videos and audio: the loss and the gradient of every parameter, the vision model's too, are transformers'.

`--cases all` tests all families on all layouts.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import vision_reference
from case_tables import IMAGES
from cases import Case, as_params, group_for_forks, needed
from checkpoint_files import read
from gradients import worst_errors
from harness import run_ranks
from layouts import arguments, world_size
from mca_models.templates import config_from_hf, get_family
from parity import TOLERANCE
from vision_passes import (
    DENSE,
    SPARSE,
    VIDEOS,
    compute_each,
    compute_gradients,
    forward_backward,
    of_all_parts,
    sizes,
    wrapped,
)
from vision_reference import Mixed, mixed

pytestmark = pytest.mark.ranks


Computed = tuple[Path, dict[str, Mixed], dict[Case, list[Any]]]


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    cases, folder = needed(request), tmp_path_factory.mktemp("images")
    references = {model: mixed(model, folder) for model in {case.model for case in cases}}
    ranks: dict[Case, list[Any]] = {}
    for group in group_for_forks(cases):
        work = {case: references[case.model] for case in group}
        for rank in run_ranks(group[0].num_ranks, compute_each, work, folder, timeout=300):
            for case, found in zip(group, rank, strict=True):
                ranks.setdefault(case, []).append(found)
    return folder, references, ranks


@pytest.mark.cases(
    0,
    always=[
        *("qwen2_5_vl-tp2cp2packed-sp", "mistral3-tp2sp", "gemma4-31b-cp2packed", "gemma4_unified-pp2"),
        *("qwen3_5_moe-tp2ep2etp1", "glm4v_moe-cp2packed", "kimi_k25-moe-tp1"),
        *("qwen2_5_vl-video-cp2packed", "qwen3_omni_moe_thinker-cp2packed"),
    ],
)
@pytest.mark.parametrize("case", as_params(IMAGES))
def test_losses_and_gradients_equal_transformers(case: Case, computed: Computed) -> None:
    folder, references, ranks = computed
    found, reference = ranks[case], references[case.model]
    assert all(isinstance(each, list) for each in found), found
    if case.layout in ("tp1", "tp2", "tp2sp"):  # where each rank has all tokens of all rows
        assert found[0] == pytest.approx(reference.losses.tolist(), rel=1e-5)
    worst = worst_errors(reference.gradients, folder / case.id)
    assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.cases(0, always=["qwen2_5_vl", "gemma3", "qwen3_vl_moe"])
@pytest.mark.parametrize("case", (*DENSE, *SPARSE, *VIDEOS))
def test_references_are_not_trivial(case: str, tmp_path: Path) -> None:
    """Images reach the loss, and every parameter of the vision model that its family uses has a gradient."""
    reference = mixed(case, tmp_path)
    gradients = read(reference.gradients)
    tower = {
        name: x
        for name, x in gradients.items()
        if re.search("visual|(vision|audio)_(tower|model|embedder|encoder)", name)
        and not (case.endswith("-video") and "audio" in name)
    }
    assert len(tower) > 8
    config = config_from_hf(json.loads((reference.path / "config.json").read_text()))
    unused = get_family(config.model_type).vision.unused(config)  # type: ignore[union-attr]
    zero = {name for name, x in tower.items() if not x.any()}
    assert zero == {name for name in tower if any(part in name for part in unused)}
    assert vision_reference.vision_model(case).config.model_type in case


def _averaged() -> None:
    from mca_models.megatron.features import media

    def average(parameter: Any, *, sequence_parallel: bool) -> None:
        parameter.average_gradients_across_tp_domain = True

    media.mark_replicated_gradient = average


def _one_position() -> None:
    from mca_models.megatron.features.mrope import MRope

    forward = MRope.forward

    def plain(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.positions = None
        return forward(self, *args, **kwargs)

    MRope.forward = plain


def _features_in_a_closure() -> None:
    from mca_models.megatron.features import media

    latest: dict[str, Any] = {}
    before = media._ImageInputs.before_chunk

    def remember(self: Any, model: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = before(self, model, args, kwargs)
        latest["context"] = (kwargs.get("extra_block_kwargs") or {}).get("context")
        return args, kwargs

    def hook(number: int) -> Any:
        def add(layer: Any, args: Any, output: Any) -> Any:
            context = latest["context"]
            return output if context is None else (output[0] + context[number], output[1])

        return add

    media._ImageInputs.before_chunk, media._with_inner_features = remember, hook


def _no_part_without_images() -> None:
    from mca_models.megatron.features import media

    media.empty_features = lambda vision, config, trained: None


def _summed() -> None:
    from mca_models.megatron.features import media

    def count_twice(parameter: Any, *, sequence_parallel: bool) -> None:
        parameter.sequence_parallel = True

    media.mark_replicated_gradient = count_twice


def _all_frames_count() -> None:
    import transformers.masking_utils

    transformers.masking_utils.create_bidirectional_mask = lambda **settings: None


def _clips_exchanged() -> None:
    from mca_models.megatron.features import media_features

    def exchange(model: Any, clips: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = run_audio(model, clips)
        return rows if len(clips["input_features"]) < 2 else torch.cat([rows[4:], rows[:4]])

    run_audio = media_features.run_audio
    media_features.run_audio = exchange


def _shared_gradients_stay_apart() -> None:
    from mca_models.megatron.features import media_features

    shared = media_features._GatherFeatures

    def own_alone(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[ctx.own], None, None

    shared.backward = staticmethod(own_alone)


def dealt_with_draws(reference: Mixed) -> tuple[list[int], torch.Tensor]:
    """Return the number of draws of this rank's vision model, and the random state after them. Runs on every rank."""
    model, chunks = of_all_parts(reference, "tp2")
    drawn: list[int] = []

    def draw(module: Any, args: Any, kwargs: Any) -> None:
        pixels = args[0] if args else kwargs["hidden_states"]
        drawn.append(torch.rand(len(pixels)).numel())  # as dropout does

    chunks[0].module.vision_model.visual.register_forward_pre_hook(draw, with_kwargs=True)
    torch.manual_seed(3)
    forward_backward(reference, "tp2", model, chunks, [])
    return drawn, torch.get_rng_state()


def test_dealt_images_leave_random_states_alike(tmp_path: Path) -> None:
    """Tensor ranks without sequence parallelism drop alike what they all hold."""
    (first, state), (second, other) = run_ranks(2, dealt_with_draws, mixed("qwen2_5_vl", tmp_path))
    assert first != second
    assert torch.equal(state, other)


def moved_biases(reference: Mixed) -> list[bool]:
    """Return True if a step changes router biases, with the text part frozen and trained."""
    from mca_models.megatron import AutoModel

    found = []
    for parts in ({"vision", "projector"}, {"vision", "projector", "language"}):
        settings = {"calculate_per_token_loss": True, "moe_router_bias_update_rate": 0.1}
        model = AutoModel.from_pretrained(reference.path, arguments("tp1", **settings))
        model.train_parts(parts)
        chunks = wrapped(model, "tp1")
        biases = [x for name, x in chunks[0].named_buffers() if name.endswith("expert_bias")]
        before = [x.clone() for x in biases]
        forward_backward(reference, "tp1", model, chunks, [])
        found.append(any(not torch.equal(*both) for both in zip(biases, before, strict=True)))
    return found


def test_biases_of_frozen_routers_stay(tmp_path: Path) -> None:
    assert run_ranks(1, moved_biases, mixed("glm4v_moe", tmp_path)) == [[False, True]]


def _causal_placeholders() -> None:
    from mca_models.megatron.layers.attention import CoreAttention

    attend = CoreAttention._attend_queries

    def causal(self: Any, query: Any, key: Any, value: Any, start: int, ends: Any) -> Any:
        return attend(self, query, key, value, start, None)

    CoreAttention._attend_queries = causal  # type: ignore[method-assign]


def _bidirectional_everywhere() -> None:
    from mca_models.megatron.features import media

    build = media.image_attention
    media.image_attention = lambda reach, *, windowed: build(reach, windowed=False)  # type: ignore[assignment]


def _own_ids_of_placeholders() -> None:
    from mca_models.megatron.features.per_layer_embedding import _PerLayerInputs

    _PerLayerInputs._without_placeholders = lambda self, tokens: tokens  # type: ignore[method-assign]


def _exchanged_images() -> None:
    from mca_models.megatron.features import media

    compute_features = media.compute_image_features

    def exchanged(vision: Any, inputs: Any, config: Any, trained: Any) -> Any:
        return compute_features(vision, {name: x.flip(0) for name, x in inputs.items()}, config, trained)

    media.compute_image_features = exchanged


def _all_frames_of_clips() -> None:
    from mca_models.megatron.features import media_features

    run_audio = media_features.run_audio

    def whole(model: Any, clips: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = len(run_audio(model, clips))
        return run_audio(model, {**clips, "feature_attention_mask": clips["feature_attention_mask"] * 0 + 1})[
            :kept
        ]

    media_features.run_audio = whole


def _short_clips_padded() -> None:
    from mca_models.megatron.features import media_features

    def together(model: Any, clips: Any, config: Any, audio: Any) -> torch.Tensor:
        return media_features.run_audio(model, clips)

    media_features.run_clips = together


def _with_times(change: Any) -> None:
    from mca_models.megatron.features.media import _ImageInputs

    before = _ImageInputs.before_chunk

    def changed(self: Any, model: Any, args: Any, kwargs: Any) -> Any:
        positions = kwargs["position_ids"].clone()
        positions[0] = change(positions[0])
        return before(self, model, args, {**kwargs, "position_ids": positions})

    _ImageInputs.before_chunk = changed


def _rounded_times() -> None:
    _with_times(torch.floor)


def _slower_clock() -> None:
    _with_times(lambda times: (times * 0.9).long())


def _exchanged_marks() -> None:
    from mca_models.megatron.features import media_features

    order = media_features.tile_order
    others = {2: 3, 3: 2}
    media_features.tile_order = lambda rows, columns: [
        mark if mark is None else others.get(mark, mark) for mark in order(rows, columns)
    ]


FAULTS = {
    "marks of rows between columns of tiles": (_exchanged_marks, "ovis2", "tp1"),
    "images of a row are exchanged": (_exchanged_images, "llava_onevision", "tp1"),
    "times of frames are rounded": (_rounded_times, "qwen3_omni_moe_thinker", "tp1"),
    "a clock that is slow": (_slower_clock, "qwen2_5_omni_thinker", "tp1"),
    "all frames of a clip count": (_all_frames_of_clips, "qwen2_5_omni_thinker", "tp1"),
    "short clips see the padding of others": (_short_clips_padded, "qwen3_omni_moe_thinker", "tp1packed"),
    "clips next to images exchanged": (_clips_exchanged, "qwen2_5_omni_thinker", "tp1packed"),
    "all media counted on each tensor rank": (_summed, "qwen2_5_omni_thinker", "tp2"),
    "gradients of media of all kinds stay apart": (
        _shared_gradients_stay_apart,
        "qwen3_omni_moe_thinker",
        "cp2packed",
    ),
    "attention inside images is causal": (_causal_placeholders, "gemma4-31b", "tp1"),
    "attention inside images is bidirectional in all layers": (
        _bidirectional_everywhere,
        "gemma4-31b",
        "tp1",
    ),
    "placeholders have per-layer embeddings": (_own_ids_of_placeholders, "gemma4-e2b", "tp2sp"),
    "images are exchanged": (_exchanged_images, "gemma4-31b", "tp1"),
    "frames are in another order": (_exchanged_images, "gemma4-e2b-video", "tp1"),
    "gradients of shared images stay apart": (_shared_gradients_stay_apart, "qwen2_5_vl", "cp2"),
    "gradients of shared frames stay apart": (_shared_gradients_stay_apart, "qwen2_5_vl-video", "tp2sp"),
    "averaged over tensor ranks": (_averaged, "qwen2_5_vl", "tp2sp"),
    "clips counted on each tensor rank": (_summed, "qwen2_audio", "tp2"),
    "mask of audio lengths ignored": (_all_frames_count, "qwen2_audio", "tp1"),
    "features of two clips exchanged": (_clips_exchanged, "qwen2_audio", "tp1"),
    "no part without clips": (_no_part_without_images, "qwen2_audio", "dp2overlap"),
    "gradients of shared clips stay apart": (_shared_gradients_stay_apart, "qwen2_audio", "cp2"),
    "one position for each token": (_one_position, "qwen2_5_vl", "tp1"),
    "inner features in a closure": (_features_in_a_closure, "qwen3_vl", "pp2recompute"),
    "no part without images": (_no_part_without_images, "qwen2_vl", "dp2overlap"),
}


def compute_with(fault: str, work: list[Mixed], layout: str, folder: Path) -> list[str | list[float]]:
    """`compute_gradients` with a fault planted. Runs on every rank."""
    FAULTS[fault][0]()
    return compute_gradients(work, layout, folder)


@pytest.mark.cases(0)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, tmp_path: Path) -> None:
    _, case, layout = FAULTS[fault]
    reference = mixed(case, tmp_path)
    each_rank = run_ranks(world_size(sizes(layout)), compute_with, fault, [reference], layout, tmp_path)
    if all(isinstance(found, list) for (found,) in each_rank):
        worst = worst_errors(reference.gradients, tmp_path / f"{case}-{layout}")
        assert worst[0][1] > 100 * TOLERANCE, worst
