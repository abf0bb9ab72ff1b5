"""Arguments of the towers by image, frame or clip, the rows of their features, and their order."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_config.errors import McaError
from mca_models.media import ImageSpan
from mca_models.megatron.features import media_features, processor_media
from mca_models.megatron.features.media_features import (
    _feature_rows,
    _GatherFeatures,
    _run_alone_and_together,
    assign_images,
    split_clips,
    split_images,
)
from mca_models.megatron.features.processor_media import _items, _videos

GRIDS = torch.tensor([[1, 4, 2], [2, 2, 6]])
NONE = ("tokens_of_size", "tokens_per_frame", "tokens_together", "tokens_per_image", "audio", "video_rules")


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A family whose rules a test sets."""
    vision = SimpleNamespace(
        **dict.fromkeys(NONE), video_tokens="frames", image_tokens="grid", tokens_per_second=None
    )
    for module in (media_features, processor_media):
        monkeypatch.setattr(module, "get_family", lambda kind: SimpleNamespace(vision=vision))
    return vision


def config(tower: dict[str, Any] | None = None, **more: Any) -> Any:
    fields = {"vision_config": tower or {}, **more}
    return SimpleNamespace(
        vision_fields=fields, model_type="kind", vision="vision", mrope="mrope", hidden_size=2
    )


def test_a_rank_alone_splits_no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting would draw dropout apart from the shared random state."""
    monkeypatch.setattr(
        "megatron.core.parallel_state.get_tensor_and_context_parallel_group",
        lambda: SimpleNamespace(size=lambda: 1),
    )
    monkeypatch.setattr(media_features, "_with_inner_columns", lambda features, config: features)
    whole = media_features._Medium({"pixels": 1}, lambda vision, given: given["pixels"], pytest.fail, [])
    assert media_features._compute_medium(None, whole, config()) == 1


def rows(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count * 3.0).view(count, 3)


@pytest.mark.parametrize(
    ("tower", "merged"),
    [
        ({}, 4),
        ({"spatial_merge_size": 1}, 1),
        ({"merge_kernel_size": [2, 1]}, 2),
        ({"merge_kernel_size": []}, 4),
    ],
)
def test_images_with_grids_are_split_by_their_patches(
    tower: dict[str, Any], merged: int, family: Any
) -> None:
    pixels = rows(32)
    first, second = split_images({"pixel_values": pixels, "image_grid_thw": GRIDS}, config(tower))
    assert (first.load, second.load) == (8, 24) and (first.rows, second.rows) == (8 // merged, 24 // merged)
    assert torch.equal(first.arguments["pixel_values"], pixels[:8])
    assert torch.equal(second.arguments["pixel_values"], pixels[8:])
    assert first.arguments["image_grid_thw"].tolist() == [[1, 4, 2]]
    assert second.arguments["image_grid_thw"].tolist() == [[2, 2, 6]]


@pytest.mark.parametrize(("tower", "side"), [({}, 16 * 3), ({"patch_size": 2, "pooling_kernel_size": 1}, 2)])
def test_images_with_positions_have_a_feature_for_each_pooled_patch(
    tower: dict[str, Any], side: int, family: Any
) -> None:
    positions = torch.tensor([[[0, 0], [0, 1], [1, 0]], [[0, 0], [-1, -1], [-1, 5]]])
    pixels = torch.zeros(2, 3, 3 * side**2)
    first, second = split_images({"pixel_values": pixels, "image_position_ids": positions}, config(tower))
    assert (first.load, first.rows, second.load, second.rows) == (3, 3, 3, 1)
    assert second.arguments["image_position_ids"].tolist() == [positions[1].tolist()]
    assert first.arguments["pixel_values"].shape == (1, 3, 3 * side**2)


def test_images_of_one_size_have_a_fixed_number_of_features(family: Any) -> None:
    family.tokens_per_image = lambda config: 7
    found = split_images({"pixel_values": rows(3)}, config())
    assert [(each.load, each.rows, each.arguments["pixel_values"].tolist()) for each in found] == [
        (1, 7, [row]) for row in rows(3).tolist()
    ]


@pytest.mark.parametrize("name", ["image_sizes", "spatial_shapes"])
def test_the_size_of_an_image_gives_its_features(name: str, family: Any) -> None:
    family.tokens_of_size = lambda config, high, wide: 10 * high + wide
    images = {"pixel_values": rows(2), name: torch.tensor([[3, 4], [5, 6]])}
    found = split_images(images, config())
    assert [(each.load, each.rows) for each in found] == [(34, 34), (56, 56)]
    for number, each in enumerate(found):
        assert each.arguments[name].tolist() == [images[name][number].tolist()]
        assert each.arguments["pixel_values"].tolist() == [rows(2)[number].tolist()]


def test_patches_without_padding_belong_to_the_images_of_their_sizes(family: Any) -> None:
    family.tokens_of_size = lambda config, high, wide: 10 * high + wide
    images = {"pixel_values": rows(7), "target_sizes": torch.tensor([[1, 3], [2, 2]])}
    first, second = split_images(images, config())
    assert [(each.load, each.rows) for each in (first, second)] == [(3, 13), (4, 22)]
    assert torch.equal(first.arguments["pixel_values"], rows(7)[:3])
    assert torch.equal(second.arguments["pixel_values"], rows(7)[3:])
    assert second.arguments["target_sizes"].tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("together", "frame", "expected"),
    [
        (20, 5, [34, 20, 1 + 3 * 5]),
        (None, 5, [34, 56, 16]),
        (20, None, [34, 20, 78]),
        (None, None, [34, 56, 78]),
    ],
)
def test_an_image_among_others_and_a_video_have_other_numbers_of_features(
    together: int | None, frame: int | None, expected: list[int], family: Any
) -> None:
    family.tokens_of_size = lambda config, high, wide: 10 * high + wide
    family.tokens_together = None if together is None else lambda config: together
    family.tokens_per_frame = None if frame is None else lambda config: frame
    images = {
        "pixel_values": rows(3),
        "image_sizes": torch.tensor([[3, 4], [5, 6], [7, 8]]),
        "batch_num_images": torch.tensor([1, 2, -3]),
    }
    assert [each.rows for each in split_images(images, config())] == expected


def test_tiles_have_marks_between_them(family: Any) -> None:
    """One tile alone has three marks, 2 x 2 tiles and the whole image have 7: see `tile_order`."""
    family.tokens_per_image = lambda config: 4
    images = {"pixel_values": rows(6), "grids": torch.tensor([[1, 1], [2, 2]])}
    one, four = split_images(images, config())
    assert (one.load, one.rows) == (1, 1 * 4 + 3) and (four.load, four.rows) == (5, 5 * 4 + 6)
    assert torch.equal(four.arguments["pixel_values"], rows(6)[1:])
    assert (one.arguments["grids"].tolist(), four.arguments["grids"].tolist()) == ([[1, 1]], [[2, 2]])


@pytest.mark.parametrize("mask", [None, "input_features_mask"])
def test_clips_have_the_features_of_their_frames(mask: str | None, family: Any) -> None:
    family.audio = SimpleNamespace(mask=mask, tokens=lambda config, frames: 100 + frames)
    clips = {"input_features": torch.zeros(2, 3, 8)}
    if mask:
        clips[mask] = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    first, second = split_clips(clips, config())
    assert (first.load, second.load) == (8, 8)
    assert (first.rows, second.rows) == (108, 105 if mask else 108)
    assert second.arguments.keys() == clips.keys()
    assert all(torch.equal(second.arguments[name], clips[name][1:]) for name in clips)


def test_the_largest_image_goes_to_the_rank_with_the_least_load() -> None:
    assert assign_images([1, 9, 4, 4, 2], 2) == [0, 0, 1, 1, 1], "9 + 1 and 4 + 4 + 2"
    assert assign_images([5, 5, 5], 3) == [0, 1, 2]
    assert assign_images([], 2) == []


def test_features_return_to_the_order_of_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of 1, 2, 1 and 3 rows on ranks 1, 0, 1 and 2 of four; the features of row r are (r, 10 r)."""
    by_rank = _feature_rows([1, 2, 1, 3], [1, 0, 1, 2], 4, torch.device("cpu"))
    assert [each.tolist() for each in by_rank] == [[1, 2], [0, 3], [4, 5, 6], []]
    everyone = [torch.stack([own.float(), own * 10.0], 1) for own in by_rank]
    padded = torch.cat([torch.nn.functional.pad(own, (0, 0, 0, 3 - len(own)), value=7) for own in everyone])

    def gather(out: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        assert own.shape == (3, 2) and torch.equal(own[: len(everyone[rank])], everyone[rank])
        assert not own[len(everyone[rank]) :].any()
        out.copy_(padded)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: total.mul_(2))
    for rank in range(4):
        group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 4)
        local = everyone[rank].clone().requires_grad_()
        found = _GatherFeatures.apply(local, by_rank, group)
        assert found.tolist() == [[row, 10 * row] for row in range(7)]
        weights = torch.arange(14.0).view(7, 2)
        (gradient,) = torch.autograd.grad((found * weights).sum(), local)
        assert torch.equal(gradient, 2 * weights[by_rank[rank]])


class Tower:
    """A tower whose features name the images that it got together."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def get_image_features(
        self, *, pixel_values: Any, image_sizes: Any, batch_num_images: Any, return_dict: bool
    ) -> Any:
        self.calls.append((pixel_values[:, 0, 0].tolist(), image_sizes[:, 0].tolist(), batch_num_images))
        return SimpleNamespace(pooler_output=[own[:1] for own in pixel_values])

    def get_video_features(self, pixels: Any, return_dict: bool) -> Any:
        self.calls.append(pixels[..., 0].tolist())
        return SimpleNamespace(pooler_output=[pixels[0]])


@pytest.mark.parametrize(
    ("counts", "calls"),
    [
        ([1, 1], [([0, 4], [0, 1], [1, 1])]),
        ([2, 2], [([0, 4], [0, 1], [2])]),
        ([3, 1, 3], [([4], [1], [1]), ([0, 8], [0, 2], [2])]),
        ([2], [([0, 0], [0, 0], [2])]),
        ([1, -2, 2], [[[4, 5]], ([0], [0], [1]), ([8, 8], [2, 2], [2])]),
        ([-4, 1], [[[0, 1, 2, 3]], ([4], [1], [1])]),
    ],
)
def test_images_alone_and_together_and_videos_are_computed_apart(counts: list[int], calls: list[Any]) -> None:
    """Image of four frames of one number each; a video takes the number of frames that it has."""
    tower: Any = Tower()
    pixels = torch.arange(4.0 * len(counts)).view(len(counts), 4, 1)
    sizes = torch.arange(len(counts))[:, None]
    images = {"pixel_values": pixels, "image_sizes": sizes, "batch_num_images": torch.tensor(counts)}
    found = _run_alone_and_together(tower, images)
    assert tower.calls == calls
    expected = [
        value
        for own, count in zip(pixels, counts, strict=True)
        for value in own[: max(-count, 1), 0].tolist()
    ]
    assert found[:, 0].tolist() == expected


@pytest.mark.parametrize("rules", [None, SimpleNamespace(exact=True), SimpleNamespace(exact=False)])
def test_a_video_without_text_between_its_frames_is_one_item(rules: Any, family: Any) -> None:
    family.video_tokens, family.tokens_per_second, family.video_rules = "together", 3, rules
    inputs = {
        "pixel_values_videos": rows(8 + 24),
        "video_grid_thw": torch.tensor([[1, 4, 2], [2, 2, 6]]),
        "second_per_grid_ts": torch.tensor([0.5, 2.0]),
    }
    first, second = _videos(inputs, config({"tokens_per_second": 4}, position_id_per_seconds=25))
    assert torch.equal(second.arguments["pixel_values"], rows(32)[8:])
    assert second.arguments["image_grid_thw"].tolist() == [[1, 2, 6]] * 2
    assert first.arguments["image_grid_thw"].tolist() == [[1, 4, 2]]
    assert (first.tokens, second.tokens) == (2, 6)
    if rules is None:
        spans = [ImageSpan(0, 2, 1, 1, 2.0, 1.0), ImageSpan(0, 1, 3, 2, 8.0, 1.0)]
    else:
        spans = [
            ImageSpan(0, *sides, interval, 25.0, past_time=True, exact=rules.exact)
            for sides, interval in (((2, 1, 1), 0.5), ((1, 3, 2), 2.0))
        ]
    assert [first.span, second.span] == spans
    for wrong in ({}, {"second_per_grid_ts": torch.ones(1)}):
        with pytest.raises(McaError, match="must have one number for each of 2 videos"):
            list(_videos({k: v for k, v in inputs.items() if k != "second_per_grid_ts"} | wrong, config()))


@pytest.mark.parametrize("rules", [None, SimpleNamespace(exact=True)])
def test_a_family_has_its_own_time_positions_of_a_second(rules: Any, family: Any) -> None:
    family.video_tokens, family.tokens_per_second, family.video_rules = "together", 3, rules
    inputs = {
        "pixel_values_videos": rows(8),
        "video_grid_thw": torch.tensor([[1, 4, 2]]),
        "video_second_per_grid": torch.tensor([0.5]),
    }
    (item,) = _videos(inputs, config())
    span: Any = item.span
    assert (span.interval, span.per_second) == ((1.5, 1.0) if rules is None else (0.5, 3.0))
    family.tokens_per_second = None
    (item,) = _videos(inputs, config())
    span = item.span
    assert (span.interval, span.per_second) == (1.0, 1.0)


def test_frames_with_text_between_them_are_images(family: Any) -> None:
    inputs = {"pixel_values_videos": rows(24), "video_grid_thw": torch.tensor([[2, 2, 6]])}
    found = list(_videos(inputs, config({"spatial_merge_size": 1})))
    assert [each.arguments["image_grid_thw"].tolist() for each in found] == [[[1, 2, 6]]] * 2
    assert [each.arguments["pixel_values"].tolist() for each in found] == [
        rows(24)[:12].tolist(),
        rows(24)[12:].tolist(),
    ]
    assert [(each.tokens, each.span) for each in found] == [(12, ImageSpan(0, 2, 6))] * 2


def test_other_videos_are_frames_with_positions_or_pooled_together(family: Any) -> None:
    pixels = torch.zeros(1, 2, 3, 3 * 4)
    positions = torch.tensor([[[[0, 0], [0, 1], [1, 1]], [[0, 0], [-1, -1], [-1, -1]]]])
    inputs = {"pixel_values_videos": pixels, "video_position_ids": positions}
    found = list(_videos(inputs, config({"patch_size": 2, "pooling_kernel_size": 1})))
    assert [each.tokens for each in found] == [3, 1]
    assert found[1].arguments["image_position_ids"].tolist() == positions[0, 1:].tolist()
    family.video_tokens, family.tokens_of_size = "pooled", lambda config, high, wide: 0
    family.tokens_per_frame = lambda config: 7
    videos = torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 3, 1, 5, 6)
    first, second = _videos({"pixel_values_videos": videos}, config())
    assert (first.tokens, second.tokens) == (1 + 3 * 7, 1 + 3 * 7)
    assert second.arguments["batch_num_images"].tolist() == [-3]
    assert second.arguments["image_sizes"].tolist() == [[5, 6]]
    assert second.arguments["pixel_values"].flatten().unique().tolist() == [1]
    family.video_tokens = "frames"
    with pytest.raises(McaError, match="without video_grid_thw or video_position_ids"):
        list(_videos({"pixel_values_videos": videos}, config()))
    family.video_tokens = None
    with pytest.raises(McaError, match="videos of kind are not supported"):
        list(_videos({"pixel_values_videos": videos}, config()))


def test_outputs_of_a_processor_are_media_by_their_names(family: Any) -> None:
    family.audio = SimpleNamespace(inputs=("input_features", "mask"), mask="mask", tokens=lambda config, n: n)
    images = {"pixel_values": rows(8), "image_grid_thw": GRIDS[:1]}
    videos = {"pixel_values_videos": rows(24), "video_grid_thw": GRIDS[1:]}
    clips = {"input_features": torch.zeros(1, 2, 4), "mask": torch.tensor([[1, 1, 1, 0]])}
    found = _items(images | videos | clips, config())
    assert {name: [each.tokens for each in own] for name, own in found.items()} == {
        "image": [2],
        "video": [3, 3],
        "audio": [3],
    }
    assert found["image"][0].span == ImageSpan(0, 2, 1) and _items({}, config()) == {}
    with pytest.raises(McaError, match="image_grid_thw has an image of 2 frames; expected 1"):
        _items({"pixel_values": rows(24), "image_grid_thw": GRIDS[1:]}, config())
    plain = config()
    plain.mrope = None
    assert _items({"pixel_values": rows(24), "image_grid_thw": GRIDS[1:]}, plain)["image"][0].span is None
    with pytest.raises(McaError, match=r"^mask is missing among the processor's outputs"):
        _items({"input_features": clips["input_features"]}, config())
    with pytest.raises(McaError, match=r"^other: no output of the processor of kind that mca takes"):
        _items(images | {"other": rows(1)}, config())
    family.video_tokens = "second_after"
    assert _items(videos, config()).keys() == {"image"}
    with pytest.raises(McaError, match="has images and videos, whose placeholders are the same"):
        _items(images | videos, config())
    family.audio = None
    with pytest.raises(McaError, match=r"^input_features, mask: no output"):
        _items(clips, config())
    text = config()
    text.vision = None
    with pytest.raises(McaError, match="a kind model takes no media"):
        _items({}, text)


@pytest.mark.parametrize("inner", [0, 2])
@pytest.mark.parametrize(("trains", "gradients"), [(True, True), (True, False), (False, True)])
def test_a_rank_without_images_has_no_rows_and_gradients_of_zero(
    inner: int, trains: bool, gradients: bool
) -> None:
    tower: Any = torch.nn.Linear(3, 5).bfloat16()
    settings = config()
    settings.vision = SimpleNamespace(deepstack_layers=inner)
    trained = [tower.weight, tower.bias] if trains else []
    with torch.set_grad_enabled(gradients):
        none = media_features.empty_features(tower, settings, trained)
    assert none.shape == (0, 2 * (1 + inner)) and none.dtype == torch.bfloat16
    assert none.requires_grad is (trains and gradients)
    if none.requires_grad:
        none.sum().backward()
        assert [each.grad.shape for each in trained] == [(5, 3), (5,)]
        assert not any(each.grad.any() for each in trained)
    own = torch.ones(3, 2)
    wide = media_features._with_inner_columns(own, settings)
    assert wide.tolist() == [[1, 1] + [0, 0] * inner] * 3


@pytest.mark.parametrize("inner", [[], [2.0, 3.0]])
@pytest.mark.parametrize("projects", [False, True])
def test_features_of_inner_layers_are_further_columns(inner: list[float], projects: bool) -> None:
    """Images are one tensor of rows, or a list of one for each; Llama 4's tower leaves the projection out."""
    last = torch.full((2, 3, 1), 5.0)
    output = SimpleNamespace(
        pooler_output=None if projects else [last[0], last[1]],
        last_hidden_state=last,
        deepstack_features=[torch.full((6, 1), value) for value in inner],
    )
    asked: list[Any] = []
    tower: Any = SimpleNamespace(
        get_image_features=lambda **images: asked.append(images) or output,
        multi_modal_projector=lambda states: states * 10,
    )
    found = media_features._run_vision(tower, {"pixel_values": "pixels"})  # type: ignore[dict-item]
    assert asked == [{"pixel_values": "pixels", "return_dict": True}]
    assert found.tolist() == [[50.0 if projects else 5.0, *inner]] * 6
