"""Images and audio of a micro-batch: from pixels and spectrograms to the embeddings of their placeholders.

A chunk of a multimodal model takes arguments in addition to Megatron's: ``images`` (arguments of the towers by name),
``feature_rows`` (``[b, s]``: the feature row of each placeholder, or -1), as ``position_ids`` the three positions of
each token, and ``attention_ends`` with bidirectional images (``[b, s]``: how many tokens of its sequence are up to
the last that a token attends to). Only the first stage needs the first, and with MTP layers all stages take the second.
Rows say which feature goes where, and are sharded as the tokens are. A video is given as its frames, each a grid of one
frame, between which no tower attends. ``sends_features`` says that all chunks send features for MTP layers
(`mtp`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
from mca_models.megatron.features.mtp import SentFeatures, mtp_media_problems, shifted_rows
from mca_models.megatron.features.per_layer_embedding import padding_problems
from mca_models.megatron.layers.attention import CoreAttention, image_attention
from mca_models.megatron.types import (
    GptModel,
    HfModel,
    MegatronConfig,
    MegatronModule,
    PackedSeqParams,
    Upstream,
)
from mca_models.templates import get_family

Arguments = tuple[object, ...]


def image_reach(config: McaModelConfig) -> int:
    """Return how many later tokens an image token attends to at most; 0 with causal attention."""
    vision = get_family(config.model_type).vision
    return 0 if vision is None or config.vision is None else vision.reach(config)


def image_problems(
    config: McaModelConfig, layout: ParallelLayout, megatron: MegatronConfig, *, trains: bool = True
) -> list[str]:
    """Return every reason why ``config`` on ``layout`` cannot take images; empty if it can.

    Args:
        config: The model.
        layout: Its layout.
        megatron: Its settings.
        trains: The MTP layers run too.
    """
    found = list(_image_problems(config, layout, megatron))
    if trains and config.vision is not None:
        found += mtp_media_problems(config, layout, bidirectional=image_reach(config) > 0)
    return found


def _image_problems(
    config: McaModelConfig, layout: ParallelLayout, megatron: MegatronConfig
) -> Iterator[str]:
    if config.vision is None:
        yield f"a {config.model_type} model has no vision model; train it on text"
        return
    if image_reach(config):
        yield from _bidirectional_problems(config, megatron)
    yield from padding_problems(config)
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
    model.register_forward_hook(inputs.after_chunk)
    if model.pre_process or model.mtp_process:
        model.embedding.register_forward_hook(inputs.after_embedding)
    if not model.pre_process:
        return
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


@dataclass(frozen=True)
class _Embedded:
    """Features for one call of the embedding.

    Args:
        features: ``[rows, hidden]``, or ``[s, b, hidden]`` by token.
        rows: Row of each token ``[s, b]``, or -1; None: no token has one.
    """

    features: Tensor
    rows: Tensor | None

    def write(self, output: Tensor) -> Tensor:
        """Return ``output`` ``[s, b, hidden]`` with the embeddings of placeholders replaced."""
        rows = self.rows
        if rows is None:
            rows = torch.full(output.shape[:2], -1, device=output.device)
        features = self.features[..., : output.shape[-1]].to(output.dtype)
        by_token = features if features.dim() > 2 else _scatter_features(features, rows)
        return torch.where((rows >= 0).unsqueeze(-1), by_token, output)


class _ImageInputs:
    """Hooks of one chunk for the images of the running micro-batch."""

    def __init__(self, model: GptModel, config: McaModelConfig) -> None:
        self._config = config
        self._embedded: list[_Embedded] = []
        """For the decoder's embedding, and then for that of each MTP layer."""
        self._sent = SentFeatures()
        self._sequence_parallel = model.config.sequence_parallel
        self._vision: HfModel | None = model.vision_model if model.pre_process else None

    def before_chunk(
        self, model: GptModel, args: Arguments, kwargs: JsonObject
    ) -> tuple[Arguments, JsonObject]:
        """Run the vision model and pass on arguments that Megatron understands."""
        kwargs = dict(kwargs)
        images, rows = kwargs.pop("images", None), kwargs.pop("feature_rows", None)
        sends, ends = kwargs.pop("sends_features", False), kwargs.pop("attention_ends", None)
        self._clear()
        if image_reach(self._config):  # reaches the core attention, also with recomputation
            args, kwargs = args[:2], {**kwargs, "attention_mask": ends}
        _set_positions(model, kwargs.get("position_ids"))
        packed = kwargs.get("packed_seq_params")
        if not model.pre_process:
            if sends:
                self._receive(model, rows, packed)
            elif rows is not None:
                self._require_support(model, sends=False)
        elif images is None:
            self._use_no_features(model, kwargs["input_ids"] if sends else None)
        else:
            self._require_support(model, sends=sends)
            if inner := self._use_features(model, images, rows, packed, sends=sends):
                scattered = torch.stack(inner)
                extra = {**(kwargs.get("extra_block_kwargs") or {}), "context": scattered}
                kwargs["extra_block_kwargs"] = extra
        return args, kwargs

    def _use_features(
        self,
        model: GptModel,
        images: JsonObject,
        rows: Tensor,
        packed: PackedSeqParams | None,
        *,
        sends: bool,
    ) -> list[Tensor]:
        """Compute the features of ``images`` for the embeddings; return those of inner layers by token."""
        trained = self._trained()
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(trained)):
            features, inner = compute_image_features(model.vision_model, images, self._config, trained)
        shifted = shifted_rows(rows, model.config.mtp_num_layers or 0, packed)
        local, *further = (self._local(each) for each in (rows, *shifted))
        self._embedded = [_Embedded(features, local)]
        if sends:
            self._sent.add(tuple(_scatter_features(features, each) for each in further))
        elif model.mtp_process:
            self._embedded += [_Embedded(features, each) for each in further]
        return [_scatter_features(each, local) for each in inner]

    def _use_no_features(self, model: GptModel, input_ids: Tensor | None) -> None:
        """Connect the trained tower to the embeddings of a micro-batch without media; of ``input_ids`` send zeros."""
        trained, layers = self._trained(), model.config.mtp_num_layers or 0
        if trained and torch.is_grad_enabled():  # the same graph up to the embeddings, without features
            self._embedded = [_Embedded(empty_features(model.vision_model, self._config, trained), None)]
        if input_ids is not None:
            length, parameter = self._local(input_ids).shape[0], next(model.embedding.parameters())
            none = parameter.new_zeros(length, len(input_ids), self._config.hidden_size)
            self._sent.add((none,) * layers)

    def _receive(self, model: GptModel, rows: Tensor | None, packed: PackedSeqParams | None) -> None:
        """Take the features of the first stage, and use them in the embeddings for MTP layers of this one."""
        self._sent.receive(model, model.config.mtp_num_layers)
        if not model.mtp_process or rows is None:
            return
        features = self._sent.features
        further = shifted_rows(rows, len(features), packed)
        self._embedded = [
            _Embedded(each, self._local(own)) for each, own in zip(features, further, strict=True)
        ]

    def after_embedding(self, embedding: MegatronModule, args: Arguments, output: Tensor) -> Tensor:
        """Replace the embeddings of placeholders ``[s, b, hidden]``."""
        return self._embedded.pop(0).write(output) if self._embedded else output

    def after_chunk(self, model: GptModel, args: Arguments, output: Tensor) -> Tensor:
        """Add the features for MTP layers to the hidden states that a chunk sends."""
        sent = output if model.post_process else self._sent.send(output)
        self._clear()
        return sent

    def _clear(self) -> None:
        self._embedded = []
        self._sent.clear()

    def _require_support(self, model: GptModel, *, sends: bool) -> None:
        layers, layout = model.config.mtp_num_layers, self._config.layout
        if problems := image_problems(self._config, layout, model.config, trains=bool(layers)):
            raise McaError("; ".join(problems))
        if layers and layout.pp > 1 and model.training and not sends:
            raise McaError(
                "media with MTP layers and pipeline stages: this training loop does not send features to the last "
                "stage; train with McaTrainer, or set mtp_num_layers to 0"
            )

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


def _set_positions(model: GptModel, positions: Tensor | None) -> None:
    """Give the chunk's rotary embedding the three positions of each token, if there are."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if isinstance(rotary, MRope) and positions is not None and positions.dim() == 3:
        rotary.positions = positions


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
