"""Step time: GEMMs by a roofline, messages by latency and bandwidth, and the bubble by the schedule.

The prediction is meant for comparing layouts. Efficiencies and rates come from the table of hardware.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

from mca_config.layout import RankGrid
from mca_config.pipeline import PipelineChunk
from mca_models.templates.parts.layer_costs import SINGLE, ExpertSizes, MixerCosts
from mca_models.templates.parts.mamba import MAMBA_COSTS
from mca_models.templates.parts.mla import latent_sizes
from mca_train.plan.chunks import ChunkSpec, recomputed_modules
from mca_train.plan.counts import Count
from mca_train.plan.hardware import Hardware
from mca_train.plan.local_layers import mixer_costs, sliding_window
from mca_train.plan.schedule import Order, Pass, timeline

_KERNELS = 45
"""Kernels of a layer's forward pass, except those per expert; the backward pass has twice as many."""
_QUANTISING = {"tensorwise": 4, "blockwise": 1, "mxfp8": 1}
"""Kernels that quantize an expert's input to fp8 (amax, scale, cast); with delayed scaling one serves all experts.

Transformer Engine, pytorch/csrc/extensions/cast.cpp: multi_tensor_quantize_impl.
"""
_CAST = 6
"""Bytes read and written per element that is quantized to fp8: amax, cast and transpose."""
_PADDED = 4
"""Number of copies of experts' tokens for padding to the alignment of fp8 GEMMs."""
_REARRANGED = 16
"""Number of reads and writes of the hidden states of dispatched tokens: sort, all-to-all, and back."""
_MOVED_AGAIN = frozenset({"moe_act", "layernorm"})
_STEPPED = 30
"""Bytes that the optimizer reads and writes per parameter: weight, gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, in total and per cause."""

    total: float
    passes: float
    """Passes of the slowest pipeline rank, without the bubble."""
    waiting: float
    gradients: float
    """Gradient reduction and weight all-gather over data-parallel ranks that nothing overlaps."""
    optimizer: float
    of_messages: float
    """Part of `passes` spent in messages of tensor, expert and context parallelism."""
    extra_forward: float = 0.0
    """Forward passes without training: of a reference model, and of KTO's KL pairs."""


@dataclass(frozen=True)
class _Layer:
    """Seconds of one micro-batch in one layer."""

    forward: float
    backward: float
    messages: float


@dataclass(frozen=True)
class StepTimeModel:
    """Predictor of the step time of a model on a layout and hardware."""

    model: ChunkSpec
    grid: RankGrid
    hardware: Hardware

    def step(
        self, trained: list[Count], share: Count, *, forwards: int = 0, roughly: bool = False
    ) -> StepTime:
        """Predict the time of a step.

        Args:
            trained: Parameters with a gradient on each pipeline rank.
            share: Number of ranks that share the optimizer state.
            forwards: Additional forward passes per sample.
            roughly: Use the closed formula of the bubble in place of the simulated schedule.
        """
        layout, training = self.grid.layout, self.model.training
        plan = self.model.config.pipeline_plan()
        times = [[self._chunk(chunk) for chunk in of_rank] for of_rank in plan.chunks]
        order = Order(
            layout.pp,
            layout.vpp,
            training.gradient_accumulation_steps,
            training.microbatch_group_size_per_vp_stage,
        )
        passes = max(sum(t.forward + t.backward for t in of_rank) for of_rank in times) * order.micro_batches
        filled = 1 + (order.pp - 1) / order.vpp / order.micro_batches
        end = passes * filled
        if not roughly:
            end = self._pipeline(order, times)
        gradients = max(self._gradients(count) for count in trained)
        optimizer = max(
            (count.dense / share.dense + count.experts / share.experts) * _STEPPED for count in trained
        ) / (self.hardware.device.memory_gb_s * 1e9 * self.hardware.efficiency.memory)
        messages = max(sum(t.messages for t in of_rank) for of_rank in times) * order.micro_batches
        forward = max(sum(t.forward for t in of_rank) for of_rank in times) * order.micro_batches
        extra_forward = forwards * forward * filled
        return StepTime(
            total=end + gradients + optimizer + extra_forward,
            passes=passes,
            waiting=end - passes,
            gradients=gradients,
            optimizer=optimizer,
            of_messages=messages,
            extra_forward=extra_forward,
        )

    def _pipeline(self, order: Order, times: list[list[_Layer]]) -> float:
        """Return the seconds until the last pass of any rank ends; the middle of many micro-batches is extrapolated."""
        shown = min(order.micro_batches, order.period)
        shown -= shown % (order.group or order.pp) if order.vpp > 1 else 0
        shown = shown or order.micro_batches
        few = replace(order, micro_batches=shown)
        orders = [list(few.passes(rank)) for rank in range(order.pp)]

        def duration(rank: int, step: Pass) -> float:
            time = times[rank][step.chunk]
            return time.forward if step.forward else time.backward

        overlaps = order.vpp > 1
        message = self._message_time(
            self.model.hidden_bytes, self._crosses_nodes(self.grid.world_size // order.pp)
        )
        ran = timeline(orders, order.vpp, duration, message * (0.3 if overlaps else 1.0))
        slowest = max(sum(t.forward + t.backward for t in of_rank) for of_rank in times)
        return max(run.end for run in ran) + slowest * (order.micro_batches - shown)

    def _chunk(self, chunk: PipelineChunk) -> _Layer:
        layers = [self._layer(number) for number in chunk.layers]
        if chunk.mtp_layers:
            layers += [self._layer(self.model.config.num_layers - 1)] * len(chunk.mtp_layers)
        # logits of all MTP layers, also of those on another chunk
        head = self._head() * (1 + self.model.config.mtp_num_layers) if chunk.has_loss else 0.0
        forward = sum(layer.forward for layer in layers)
        again = sum(layer.forward for layer in layers[: self._recomputed(chunk)])
        backward = sum(layer.backward for layer in layers) + again
        images, of_images = self._images() if chunk.has_embedding else (0.0, 0.0)
        return _Layer(
            forward + head + images,
            backward + self._backward_ratio * head + of_images,
            sum(layer.messages for layer in layers),
        )

    def _recomputed(self, chunk: PipelineChunk) -> int:
        """Return how many of the layers of ``chunk``, then of its MTP layers, full recomputation repeats."""
        training = self.model.training
        if training.recompute_granularity != "full":
            return 0
        if training.recompute_method == "block":
            return min(training.recompute_num_layers or 1, len(chunk.layers))
        return len(chunk.layers) + len(chunk.mtp_layers)

    @property
    def _backward_ratio(self) -> float:
        """Ratio of GEMM time in backward to forward: a frozen weight needs only the gradient of its input."""
        return 1.0 if self.model.sizes.frozen else 2.0

    def _images(self) -> tuple[float, float]:
        """Return the forward and backward seconds of the towers; tensor-parallel ranks share their media."""
        media, sizes = self.model.media, self.model.sizes
        if media is None:
            return 0.0, 0.0
        forward, trained = (
            self._gemm_time(flops / sizes.layout.tp, half=True) for flops in media.flops(sizes.sequences)
        )
        return forward, 2 * trained

    def _head(self) -> float:
        """Return the forward seconds of the output layer and the loss."""
        config, sizes = self.model.config, self.model.sizes
        rows = config.head.num_labels or config.padded_vocab_size / sizes.layout.tp
        return self._gemm_time(2 * sizes.tokens * rows * config.hidden_size, half=True) + self._memory_time(
            sizes.tokens * rows * 12
        )

    def _layer(self, number: int) -> _Layer:
        config = self.model.config
        known = self._known
        named = config.layer_types[number] if config.layer_types else None
        kind = (named, config.is_moe_layer(number), config.kv_source_layer(number) is not None)
        if kind not in known:
            known[kind] = self._layer_time(number)
        return known[kind]

    @cached_property
    def _known(self) -> dict[tuple[str | None, bool, bool], _Layer]:
        return {}

    def _layer_time(self, number: int) -> _Layer:
        config, sizes = self.model.config, self.model.sizes
        moe = config.is_moe_layer(number)
        attention, scores = self._mixer_time(number)
        inner = self._mlp(config.layer_config(number).mlp.ffn_hidden_size) / sizes.layout.tp
        mlp = 0.0 if moe or not config.has_mlp(number) else self._gemm_time(2 * sizes.tokens * inner)
        # a gate, a projection, and a share of the projection to the embeddings of all layers
        per_layer = 3 * config.per_layer_input_size * config.hidden_size
        products = self._gemm_time(2 * (sizes.tokens * attention + sizes.split * per_layer)) + mlp
        moved = self._memory_time(2.5 * sum(line.bytes for line in self.model.lines(number)))
        launch = _KERNELS * (2 if moe else 1) * self.hardware.efficiency.launch_us * 1e-6
        experts = self._experts(sizes.moe) if moe and sizes.moe is not None else _Layer(0.0, 0.0, 0.0)
        # tokens that are sent to experts are not gathered before: `_expert_messages`
        dense = config.has_mlp(number) and (not moe or sizes.moe is None or sizes.moe.shared > 0)
        messages = self._tensor_messages() * (config.has_attention(number) + dense) / 2
        rest = self._context_messages(number, scores) if config.has_attention(number) else 0.0
        again = self._recompute_time(
            number, {"core_attn": scores, "mlp": mlp, "moe": experts.forward + experts.messages}
        )
        forward = max(products + scores + moved, launch) + experts.forward
        gradients = self._backward_ratio * products
        backward = max(gradients + 2.5 * scores + moved, 2 * launch) + again + experts.backward
        spent = messages + experts.messages
        return _Layer(forward + spent + rest, backward + spent + 2 * rest, 2 * spent + 3 * rest)

    def _recompute_time(self, number: int, seconds: dict[str, float]) -> float:
        """Return the seconds that selective recomputation adds to a backward pass."""
        modules = recomputed_modules(self.model.training)
        made = set() if "moe" in modules else modules & _MOVED_AGAIN
        moved = sum(line.bytes for line in self.model.lines(number) if line.module in made) if made else 0.0
        return self._memory_time(2.5 * moved) + sum(time for name, time in seconds.items() if name in modules)

    def _mlp(self, inner: float) -> float:
        return (3 if self.model.config.mlp.gated_linear_unit else 2) * inner * self.model.config.hidden_size

    def _mixer_time(self, number: int) -> tuple[float, float]:
        """Return the weights of GEMMs and the seconds of scores or scans of everything before the MLP."""
        config = self.model.config
        if not config.has_attention(number):
            return 0.0, 0.0
        if (mixer := mixer_costs(config, number)) is not None:
            return self._mixer(mixer)
        weights, seconds = self._attention(number)
        if not config.has_parallel_mamba:
            return weights, seconds
        of_mamba = self._mixer(MAMBA_COSTS)
        return weights + of_mamba[0], seconds + of_mamba[1]

    def _mixer(self, mixer: MixerCosts) -> tuple[float, float]:
        """Return the weights of a mixer's GEMMs on this rank, and the seconds of its scan or recurrence."""
        config, sizes = self.model.config, self.model.sizes
        rate = self.hardware.device.tflops * 1e12 * self.hardware.efficiency.attention
        return mixer.weights(config, sizes), mixer.flops(config, sizes) / rate

    def _attention(self, number: int) -> tuple[float, float]:
        """Return the weights of attention GEMMs on this rank, and the seconds of its causal scores."""
        config, sizes = self.model.config.layer_config(number), self.model.sizes
        heads, hidden, tp = config.attention.num_attention_heads, config.hidden_size, sizes.layout.tp
        if (latent := latent_sizes(config)) is not None:
            query, value = latent.query, latent.value
            weights = latent.down + heads * latent.per_head / tp
        else:
            query, value = config.attention.kv_channels, config.attention.value_width
            made = query + (0 if config.attention.values_are_keys else value)
            keys = 0 if config.accepts_keys else max(config.attention.num_query_groups / tp, 1) * made
            gated = 1 + config.attention.attention_output_gate
            weights = hidden * (heads * (gated * query + value) / tp + keys)
        length = sizes.length * sizes.layout.cp
        window = sliding_window(config, number, length) or length
        keys = window - window**2 / (2 * length)  # causal: on average half of the sequence without a window
        flops = 2 * sizes.tokens * keys * heads / tp * (query + value)
        rate = self.hardware.device.tflops * 1e12 * self.hardware.efficiency.attention
        return weights, flops / rate

    def _experts(self, moe: ExpertSizes) -> _Layer:
        """Return the seconds of a layer's experts: dispatch, sorting, GEMMs, and shared experts.

        The host waits for the number of tokens per expert, so it is not ahead of the device when it launches the GEMMs.
        Their time is at least that of launching them one by one.
        """
        config, sizes = self.model.config, self.model.sizes
        inner = moe.inner / sizes.layout.etp
        sent, share = sizes.dispatched(), self.hardware.efficiency.experts / self.hardware.efficiency.products
        products = self._gemm_time(2 * sent * self._mlp(inner) * moe.hidden / config.hidden_size) / share
        copied, cast = _REARRANGED * sizes.width, 0.0
        if self.model.training.fp8:
            copied += _PADDED * sizes.width if sizes.capacity is None else 0
            cast = _CAST * (moe.hidden + inner)
        moved = self._memory_time(sent * (copied * moe.hidden + cast))
        once, twice = self._launches()
        shared_experts = self._gemm_time(2 * sizes.tokens * self._mlp(moe.shared) / sizes.layout.tp)
        messages = self._expert_messages(moe)
        if self.model.training.overlap_moe_expert_parallel_comm:
            messages *= 1 - self.hardware.efficiency.overlapped
        return _Layer(
            max(products, once) + moved + shared_experts,
            max(self._backward_ratio * products, twice) + moved + self._backward_ratio * shared_experts,
            messages,
        )

    def _launches(self) -> tuple[float, float]:
        """Return the host seconds for launching the experts' GEMMs on this rank, forward and backward."""
        experts = (self.model.config.num_experts) / self.grid.layout.ep
        casts = _QUANTISING.get(self.model.training.fp8_recipe or "", 0) if self.model.training.fp8 else 0
        each = 2 * experts * self.hardware.efficiency.launch_us * 1e-6
        return each * (1 + casts), each * (2 + casts)

    def _gemm_time(self, flops: float, *, half: bool = False) -> float:
        device, efficiency = self.hardware.device, self.hardware.efficiency
        if self.model.training.fp8 and not half:
            return flops / (device.fp8_tflops * 1e12 * efficiency.fp8_products)
        return flops / (device.tflops * 1e12 * efficiency.products)

    def _memory_time(self, size: float) -> float:
        return size / (self.hardware.device.memory_gb_s * 1e9 * self.hardware.efficiency.memory)

    def _crosses_nodes(self, distance: int) -> bool:
        """Return True if ranks ``distance`` apart are on different nodes."""
        return distance >= self.hardware.device.node

    def _message_time(self, size: float, far: bool, ranks: int = 2) -> float:
        device, efficiency = self.hardware.device, self.hardware.efficiency
        rate = (device.network_gb_s * efficiency.network if far else device.link_gb_s * efficiency.link) * 1e9
        latency = (device.network_us if far else device.link_us) * 1e-6
        return latency * max(log2(max(ranks, 2)), 1.0) + size / rate

    def _tensor_messages(self) -> float:
        """Return the seconds of two all-gathers and two reduce-scatters, or two all-reduces, of the hidden states."""
        sizes, tp = self.model.sizes, self.grid.layout.tp
        if tp == 1:
            return 0.0
        whole = sizes.tokens * self.model.config.hidden_size * sizes.width * (tp - 1) / tp
        return 4 * self._message_time(whole, self._crosses_nodes(tp - 1), tp)

    def _expert_messages(self, moe: ExpertSizes) -> float:
        """Return the seconds of one forward pass's messages with tokens to experts, and back.

        They are an all-to-all of expert-parallel ranks and an all-gather of the ranks that share an expert.
        """
        layout, sizes = self.grid.layout, self.model.sizes
        group, node = layout.ep * layout.etp, self.hardware.device.node
        sent = sizes.split * sizes.experts_per_token * moe.hidden * sizes.width
        seconds = 0.0
        if layout.ep > 1:
            # of a group on several nodes, the tokens that stay within one are faster and not counted
            moved = (layout.ep - 1) / layout.ep if group <= node else 1 - node / group
            seconds += 2 * self._message_time(sent * moved, group > node, group)
        if layout.etp > 1:
            far = self._crosses_nodes(layout.etp - 1)
            seconds += 2 * self._message_time(sent * (layout.etp - 1), far, layout.etp)
        return seconds

    def _context_messages(self, number: int, scores: float) -> float:
        """Return the seconds of the key-value ring that attention scores do not hide."""
        layout, config, sizes = self.grid.layout, self.model.config.layer_config(number), self.model.sizes
        if layout.cp == 1:
            return 0.0
        latent = latent_sizes(config)
        value = config.attention.value_width if latent is None else latent.value
        keys = max(config.attention.num_query_groups / layout.tp, 1) * (config.attention.kv_channels + value)
        once = self._message_time(
            sizes.tokens * keys * sizes.width, self._crosses_nodes(layout.tp * layout.cp - 1)
        )
        return max((layout.cp - 1) * once - scores * self.hardware.efficiency.overlapped, 0.0)

    def _gradients(self, count: Count) -> float:
        """Return the seconds of gradient reduction and weight all-gather that passes do not hide."""
        training, layout = self.model.training, self.grid.layout
        seconds = 0.0
        groups = (
            (count.dense, self.grid.data_parallel_size * layout.cp, layout.tp),
            (count.experts, self.grid.expert_data_parallel_size, layout.ep * layout.etp),
        )
        overlapped, width = self.hardware.efficiency.overlapped, self.model.sizes.width
        for parameters, ranks, stride in groups:
            if ranks > 1 and parameters:
                far = ranks * stride > self.hardware.device.node
                summed = SINGLE if training.accumulate_allreduce_grads_in_fp32 is not False else width
                reduced = self._message_time(parameters * summed * (ranks - 1) / ranks, far, ranks)
                if not training.use_distributed_optimizer:  # an all-reduce, and nothing to gather
                    seconds += 2 * reduced * (1 - overlapped if training.overlap_grad_reduce else 1)
                    continue
                gathered = self._message_time(parameters * width * (ranks - 1) / ranks, far, ranks)
                seconds += reduced * (1 - overlapped if training.overlap_grad_reduce else 1)
                seconds += gathered * (1 - overlapped if training.overlap_param_gather else 1)
        return seconds
