"""Images and audio of a micro-batch: from pixels and spectrograms to the embeddings of their placeholders.

A chunk of a multimodal model takes arguments in addition to Megatron's: ``images`` (arguments of the towers by name),
``feature_rows`` (``[b, s]``: the feature row of each placeholder, or -1), as ``position_ids`` the three positions of
each token, and ``attention_ends`` with bidirectional images (``[b, s]``: how many tokens of its sequence are up to
the last that a token attends to). Only the first stage needs the first two. Rows say which feature goes where, and are
sharded as the tokens are. A video is given as its frames, each a grid of one frame, between which no tower attends.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mca_config.errors import McaError
from mca_config.layout import ParallelLayout
from mca_config.model_config import McaModelConfig
from mca_config.pipeline import pipeline_plan
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_models.megatron.features.feature import Context, Feature, SpecChanges
from mca_models.megatron.features.media_features import compute_image_features, empty_features
from mca_models.megatron.features.mrope import MRope, position_problems
from mca_models.megatron.features.per_layer_embedding import padding_problems
from mca_models.megatron.layers.attention import CoreAttention, image_attention
from mca_models.megatron.types import GptModel, HfModel, MegatronConfig, MegatronModule, Upstream
from mca_models.templates import get_family

Arguments = tuple[object, ...]


def image_reach(config: McaModelConfig) -> int:
    """Return how many later tokens an image token attends to at most; 0 with causal attention."""
    vision = get_family(config.model_type).vision
    return 0 if vision is None or config.vision is None else vision.reach(config)


def image_problems(config: McaModelConfig, layout: ParallelLayout, megatron: MegatronConfig) -> list[str]:
    """Return every reason why ``config`` on ``layout`` cannot take images; empty if it can."""
    return list(_image_problems(config, layout, megatron))


def _image_problems(
    config: McaModelConfig, layout: ParallelLayout, megatron: MegatronConfig
) -> Iterator[str]:
    if config.vision is None:
        yield f"a {config.model_type} model has no vision model; train it on text"
        return
    if image_reach(config):
        yield from _bidirectional_problems(config, megatron)
    yield from padding_problems(config)
    if config.mtp_num_layers:
        yield "MTP layers cannot be trained with images; set mtp_num_layers to 0"
    yield from position_problems(config, megatron)
    first = len(pipeline_plan(layout, config.num_layers, config.mtp_num_layers).first.layers)
    if first < config.vision.deepstack_layers:
        yield (
            f"the first pipeline stage has {counted(first, 'layer')}; image features are added after each of the first "
            f"{config.vision.deepstack_layers}: give it more, or use fewer stages"
        )


def _bidirectional_problems(config: McaModelConfig, megatron: MegatronConfig) -> Iterator[str]:
    local = megatron.attention_backend is not None and megatron.attention_backend.name == "local"
    if megatron.transformer_impl == "transformer_engine" and not local:
        yield (
            f"images of {config.model_type} attend in both directions, which Transformer Engine's attention does "
            "not support; set attention_backend to local"
        )
    if config.attention.attn_logit_softcapping is not None:
        yield "attn_logit_softcapping cannot be combined with images that attend in both directions; train on text"


def accept_images(model: GptModel, config: McaModelConfig) -> None:
    """Add hooks to a chunk for the arguments of images."""
    if config.vision is None:
        return
    inputs = _ImageInputs(model, config)
    model.register_forward_pre_hook(inputs.before_chunk, with_kwargs=True)
    if not model.pre_process:
        return
    model.embedding.register_forward_hook(inputs.after_embedding)
    for number, layer in enumerate(model.decoder.layers[: config.vision.deepstack_layers]):
        layer.register_forward_hook(_with_inner_features(number))
    for parameter in model.vision_model.parameters():
        mark_replicated_gradient(parameter, sequence_parallel=model.config.sequence_parallel)


def mark_replicated_gradient(parameter: Upstream, *, sequence_parallel: bool) -> None:
    """Mark how Megatron combines a replicated parameter's gradient over tensor ranks.

    With sequence parallelism each tensor rank has the gradient of its tokens: they are summed. Without it, each has the
    full gradient: they are averaged, so that rounding does not let the copies diverge.
    """
    if sequence_parallel:
        parameter.sequence_parallel = True
    else:
        parameter.average_gradients_across_tp_domain = True


class _ImageInputs:
    """Hooks of one chunk for the images of the running micro-batch."""

    def __init__(self, model: GptModel, config: McaModelConfig) -> None:
        self._config = config
        self._features: Tensor | None = None
        self._rows: Tensor | None = None
        self._sequence_parallel = model.config.sequence_parallel
        self._vision: HfModel | None = model.vision_model if model.pre_process else None

    def before_chunk(
        self, model: GptModel, args: Arguments, kwargs: JsonObject
    ) -> tuple[Arguments, JsonObject]:
        """Run the vision model and pass on arguments that Megatron understands."""
        kwargs = dict(kwargs)
        images, rows = kwargs.pop("images", None), kwargs.pop("feature_rows", None)
        ends = kwargs.pop("attention_ends", None)
        if image_reach(self._config):  # reaches the core attention, also with recomputation
            args, kwargs = args[:2], {**kwargs, "attention_mask": ends}
        positions = kwargs.get("position_ids")
        if (
            isinstance(getattr(model, "rotary_pos_emb", None), MRope)
            and positions is not None
            and positions.dim() == 3
        ):
            model.rotary_pos_emb.positions = positions
        if not model.pre_process:
            return args, kwargs
        trained = self._trained()
        if images is None:
            if trained and torch.is_grad_enabled():  # the same graph up to the embeddings, without features
                self._features = empty_features(model.vision_model, self._config, trained)
            return args, kwargs
        if problems := image_problems(self._config, self._config.layout, model.config):
            raise McaError("; ".join(problems))
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(trained)):
            features, inner = compute_image_features(model.vision_model, images, self._config, trained)
        self._rows = self._local(rows)
        self._features = features
        if inner:
            scattered = torch.stack([_scatter_features(each, self._rows) for each in inner])
            kwargs["extra_block_kwargs"] = {**(kwargs.get("extra_block_kwargs") or {}), "context": scattered}
        return args, kwargs

    def after_embedding(self, embedding: MegatronModule, args: Arguments, output: Tensor) -> Tensor:
        """Replace the embeddings of placeholders ``[s, b, hidden]``."""
        features, rows = self._features, self._rows
        self._features = self._rows = None
        if features is None:
            return output
        if rows is None:
            rows = torch.full(output.shape[:2], -1, device=output.device)
        scattered = _scatter_features(features[:, : output.shape[-1]].to(output.dtype), rows)
        return torch.where((rows >= 0).unsqueeze(-1), scattered, output)

    def _trained(self) -> list[torch.nn.Parameter]:
        parameters = () if self._vision is None else self._vision.parameters()
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _local(self, rows: Tensor) -> Tensor:
        """Return ``[s, b]``, with sequence parallelism this tensor rank's part."""
        local = rows.transpose(0, 1).contiguous()
        if not self._sequence_parallel:
            return local
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        group = get_tensor_model_parallel_group()
        part: Tensor = local.chunk(group.size())[group.rank()]
        return part


def _scatter_features(features: Tensor, rows: Tensor) -> Tensor:
    """Return ``[s, b, hidden]``: each token's feature, zeros without one."""
    none = features.new_zeros(1, features.shape[-1])
    return torch.cat([none, features])[rows + 1]


def _with_inner_features(number: int) -> Upstream:
    """Return a hook that adds the features of an inner layer to the output of a decoder layer.

    They are passed as the block's ``context``, which Megatron passes through its layers and through recomputation, so
    that each micro-batch in flight has its own.
    """

    def add(
        layer: MegatronModule, args: Arguments, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        hidden, context = output
        return (hidden, None) if context is None else (hidden + context[number].to(hidden.dtype), context)

    return add


def _bidirectional_attention(context: Context) -> SpecChanges:
    reach = image_reach(context.config)
    if not reach:
        return SpecChanges()
    vision = get_family(context.config.model_type).vision
    found = image_attention(reach, windowed=vision is not None and vision.windowed)
    return SpecChanges(classes={CoreAttention: lambda core: found if core is CoreAttention else core})


IMAGES = Feature(
    name="images",
    enabled=lambda config: config.vision is not None,
    spec=_bidirectional_attention,
    finish=accept_images,
)
