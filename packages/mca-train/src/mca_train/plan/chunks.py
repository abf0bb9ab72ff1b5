"""Activation memory of one micro-batch on a pipeline chunk, for each kind of recomputation."""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from mca_config.model_config import McaModelConfig
from mca_config.pipeline import PipelineChunk
from mca_models.templates.parts.layer_costs import SINGLE, SavedTensor
from mca_train.plan import local_layers, te_layers
from mca_train.plan.audio_memory import PlannedMedia
from mca_train.plan.sizes import Sizes

if TYPE_CHECKING:
    from mca_config.training import TrainingArguments

Implementation = Literal["local", "transformer_engine"]
_LAYERS: dict[Implementation, ModuleType] = {"local": local_layers, "transformer_engine": te_layers}
_SELECTED = ("core_attn",)
"""Megatron's default modules of selective recomputation."""


@dataclass(frozen=True)
class PassMemory:
    """Memory of one micro-batch on a layer or a chunk, in bytes.

    Args:
        kept: Saved from the forward pass for the backward pass.
        forward: Additional bytes at the peak of the forward pass, relative to its end.
        backward: Additional bytes at the peak of the backward pass, relative to its start.
    """

    kept: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class ChunkSpec:
    """Everything that the memory of a chunk depends on.

    Args:
        config: Model configuration with its layout.
        training: Training arguments.
        sizes: Sizes of a micro-batch.
        implementation: Implementation of the layers.
        on_gpu: Outputs are freed after they are sent, if Megatron waits for the send.
        media: Media of each sequence; None: there are none.
    """

    config: McaModelConfig
    training: "TrainingArguments"
    sizes: Sizes
    implementation: Implementation
    on_gpu: bool
    media: PlannedMedia | None = None

    def lines(self, number: int, *, worst: bool = False) -> list[SavedTensor]:
        """Return the tensors that decoder layer ``number`` saves without recomputation."""
        found: list[SavedTensor] = _LAYERS[self.implementation].layer(
            self.config, self.sizes, number, worst=worst
        )
        return found

    def norm(self, channels: float, *, output: bool = True) -> float:
        """Return the bytes that a norm of ``channels`` saves."""
        norm = _LAYERS[self.implementation].norm
        lines: list[SavedTensor] = norm(self.sizes.split, channels, self.sizes, output=output)
        return sum(line.bytes for line in lines)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states between layers."""
        return self.sizes.split * self.config.hidden_size * self.sizes.width

    @property
    def per_layer(self) -> float:
        """Bytes of the per-layer embeddings of all layers, or of their gradient."""
        return self.sizes.split * _per_layer_channels(self.config) * self.sizes.width

    def layer(self, number: int, *, worst: bool = False) -> PassMemory:
        """Return the memory of decoder layer ``number``, with selective recomputation if it is enabled."""
        again = recomputed_modules(self.training)
        lines = self.lines(number, worst=worst)
        kept = sum(line.bytes for line in lines if line.module not in again)
        dropped = sum(line.bytes for line in lines if line.module in again)
        if "core_attn" in again:
            kept += _LAYERS[self.implementation].recomputed_core(self.config, self.sizes, number)
        if "layernorm" in again and self.implementation == "local" and self.sizes.width < SINGLE:
            kept += 2 * self.hidden_bytes  # inputs of both norms, which otherwise are saved only in fp32
        forward, backward = _LAYERS[self.implementation].running(self.config, self.sizes, number)
        return PassMemory(kept, forward, backward + dropped + 2 * self.per_layer)


def recomputed_modules(training: "TrainingArguments") -> frozenset[str]:
    """Return the modules of selective recomputation."""
    if training.recompute_granularity != "selective":
        return frozenset()
    names = {*(training.recompute_modules or _SELECTED)}
    return frozenset(names | ({"moe_act", "shared_experts"} if "moe" in names else set()))


def chunk_memory(model: ChunkSpec, chunk: PipelineChunk, *, worst: bool = False) -> PassMemory:
    """Return the memory of everything on ``chunk``."""
    layers = [model.layer(number, worst=worst) for number in chunk.layers]
    parts = _recomputed_blocks(model, layers) if model.training.recompute_granularity == "full" else layers
    if chunk.has_embedding and model.media is not None:
        kept = sum(line.bytes for line in model.media.lines(model.sizes))
        parts = [PassMemory(kept, 0.0 if kept else model.media.running(model.sizes)), *parts]
    if chunk.has_embedding and model.per_layer:
        channels = _per_layer_channels(model.config)
        parts = [PassMemory(model.per_layer + model.norm(channels, output=False)), *parts]
    parts += [_mtp_memory(model)] * len(chunk.mtp_layers)
    # logits of all MTP layers, also of those on another chunk
    parts += [_output_memory(model, 1 + model.config.mtp_num_layers)] if chunk.has_loss else []
    kept = sum(part.kept for part in parts) + _boundary_tensors(model, chunk)
    if not parts:
        return PassMemory(kept)
    later = [sum(part.kept for part in parts[index + 1 :]) for index in range(len(parts))]
    forward = max(part.forward - saved for part, saved in zip(parts, later, strict=True))
    backward = max(part.backward - saved for part, saved in zip(parts, later, strict=True))
    if chunk.has_embedding and not model.sizes.frozen:
        widest = max(model.config.hidden_size, _per_layer_channels(model.config))
        backward = max(backward, _rows(model) * widest * model.sizes.width - kept)
    return PassMemory(kept, max(forward, 0.0), backward)


def forward_only_memory(model: ChunkSpec, chunk: PipelineChunk) -> float:
    """Return the bytes of a forward pass without a backward pass: the peak over the chunk's parts."""
    parts = [
        PassMemory(sum(line.bytes for line in model.lines(number)), model.layer(number).forward)
        for number in (*chunk.layers, *[model.config.num_layers - 1] * bool(chunk.mtp_layers))
    ]
    if chunk.has_loss:
        parts.append(_output_memory(model, 1))
    images = [PassMemory(model.media.running(model.sizes))] if chunk.has_embedding and model.media else []
    return model.hidden_bytes + max((part.kept + part.forward for part in (*images, *parts)), default=0.0)


def _per_layer_channels(config: McaModelConfig) -> int:
    return config.num_layers * config.per_layer_input_size


def _boundary_tensors(model: ChunkSpec, chunk: PipelineChunk) -> float:
    """Return the bytes of the chunk's inputs and outputs that only the schedule references."""
    outputs = not chunk.has_loss and not (model.on_gpu and model.sizes.waits_for_sends)
    copied = model.implementation == "local" and model.training.recompute_granularity != "full"
    inputs = not chunk.has_embedding and copied and model.sizes.width < SINGLE
    layers = model.config.mtp_num_layers
    # features for MTP layers, or their hidden states: sent after the hidden states, they keep the storage of both
    features = bool(model.media) and model.config.layout.pp > 1
    sent = layers * (features or bool(chunk.mtp_layers))
    received = layers * (not chunk.has_embedding and (features or (chunk.has_loss and not chunk.mtp_layers)))
    return model.hidden_bytes * (outputs * (1 + sent) + inputs + received)


def _recomputed_blocks(model: ChunkSpec, layers: list[PassMemory]) -> list[PassMemory]:
    """Group layers into blocks that save only their input; method block leaves later layers as they are."""
    training, count = model.training, model.training.recompute_num_layers or 1
    share = model.sizes.layout.tp if training.distribute_saved_activations else 1
    if training.recompute_method == "block":
        firsts, blocks, rest = range(count), [[layer] for layer in layers[:count]], layers[count:]
    else:
        firsts, rest = range(0, len(layers), count), []
        blocks = [layers[i : i + count] for i in firsts]
    # the experts' output of the first layer of a pair is an input of the second
    within_pairs = model.sizes.moe is not None and model.sizes.moe.shortcut
    inputs = [model.hidden_bytes / share + model.hidden_bytes * (within_pairs and i % 2) for i in firsts]
    return [_block(kept, block) for kept, block in zip(inputs, blocks, strict=False)] + rest


def _block(kept: float, block: list[PassMemory]) -> PassMemory:
    again = sum(layer.kept for layer in block)
    return PassMemory(kept, max(layer.forward for layer in block), again + block[-1].backward)


def _rows(model: ChunkSpec) -> float:
    """Rows of the output layer on this rank."""
    return model.config.head.num_labels or model.config.padded_vocab_size / model.sizes.layout.tp


def _output_memory(model: ChunkSpec, losses: int) -> PassMemory:
    """Return the memory of the final norm, and of the logits of ``losses``: the main loss and those of MTP layers."""
    loss = (_chunked if model.training.loss_chunk_size else _whole_logits)(model)
    norm = model.norm(model.config.hidden_size, output=not model.sizes.frozen)
    return PassMemory(norm + loss.kept * losses, loss.forward, loss.backward)


def _mtp_memory(model: ChunkSpec) -> PassMemory:
    """Return the memory of an MTP layer, which full recomputation repeats unless its method is block."""
    training, layer = model.training, model.layer(model.config.num_layers - 1)
    around = 3 * model.norm(model.config.hidden_size) + 4 * model.hidden_bytes
    whole = replace(layer, kept=layer.kept + around)
    if training.recompute_granularity != "full" or training.recompute_method == "block":
        return whole
    return _block(2 * model.hidden_bytes, [whole])  # saves the hidden states and the embeddings


def _whole_logits(model: ChunkSpec) -> PassMemory:
    """Return the memory of the logits in the model's precision and of their fp32 softmax, saved for backward."""
    sizes, training = model.sizes, model.training
    logits, matrix = sizes.tokens * _rows(model), _rows(model) * model.config.hidden_size * sizes.width
    matrix = 0.0 if sizes.frozen else matrix
    inputs = sizes.tokens * model.config.hidden_size * sizes.width
    capped = logits * sizes.width if model.config.head.final_logit_softcapping else 0.0
    if training.cross_entropy_loss_fusion and training.cross_entropy_fusion_impl == "te":
        return PassMemory(capped + logits * sizes.width, 0.0, matrix + inputs)
    if sizes.width == SINGLE:
        return PassMemory(capped + logits * SINGLE, 0.0, matrix + inputs)
    half = logits * sizes.width
    return PassMemory(capped + logits * SINGLE, half, max(half, half - logits * SINGLE + matrix + inputs))


def _chunked(model: ChunkSpec) -> PassMemory:
    """Return the memory of chunked logits, whose weight gradients are added chunk by chunk."""
    sizes = model.sizes
    tokens = min(model.training.loss_chunk_size or 0, sizes.tokens)
    matrix = 0.0 if sizes.frozen else _rows(model) * model.config.hidden_size * sizes.width
    capped = sizes.width if model.config.head.final_logit_softcapping else 0
    logits = tokens * _rows(model) * (sizes.width + capped + (SINGLE if sizes.width < SINGLE else 0))
    several = tokens < sizes.tokens
    return PassMemory(0.0, logits, max(matrix + logits, matrix * (3 if several else 1)))
