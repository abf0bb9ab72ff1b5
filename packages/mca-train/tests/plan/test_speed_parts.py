"""Each part of a predicted step by hand, on hardware of one operation and one byte a second."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from mca_train.plan import speed
from mca_train.plan.schedule import Order
from mca_train.plan.speed import StepTimeModel, _Layer

EFFICIENCY = {
    "products": 0.5,
    "fp8_products": 0.25,
    "memory": 0.25,
    "experts": 0.125,
    "attention": 0.5,
    "overlapped": 0.75,
    "network": 0.5,
    "link": 0.25,
    "launch_us": 1e6,
}
DEVICE = {
    "tflops": 2e-12,
    "fp8_tflops": 8e-12,
    "memory_gb_s": 4e-9,
    "network_gb_s": 2e-9,
    "link_gb_s": 4e-9,
    "network_us": 7e6,
    "link_us": 3e6,
    "node": 8,
}
"""Half of the rates are used: one operation, two fp8 operations, and one byte a second on every way."""


def made(**more: Any) -> Any:
    """Return a model of all sizes that differ; ``more`` are its configuration, layout and arguments."""
    config = {
        "hidden_size": 5,
        "per_layer_input_size": 0,
        "num_experts": 16,
        "mlp": SimpleNamespace(gated_linear_unit=True),
        "head": SimpleNamespace(num_labels=None),
        "padded_vocab_size": 34,
        "mtp_num_layers": 0,
    }
    layout = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1}
    training = {"fp8": None, "fp8_recipe": None, "overlap_moe_expert_parallel_comm": False}
    training |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    training |= {"use_distributed_optimizer": True}
    training |= {"accumulate_allreduce_grads_in_fp32": None, "recompute_granularity": None}
    training |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    training |= {"gradient_accumulation_steps": 1, "microbatch_group_size_per_vp_stage": None}
    config |= {name: more.pop(name) for name in [*more] if name in config}
    layout |= {name: more.pop(name) for name in [*more] if name in layout}
    training |= {name: more.pop(name) for name in [*more] if name in training}
    sizes = {"tokens": 11, "split": 13, "width": 2, "length": 11, "experts_per_token": 3, "capacity": None}
    sizes |= {"frozen": False, "sequences": 3} | more
    each = SimpleNamespace(**layout)
    inner = SimpleNamespace(
        config=SimpleNamespace(**config),
        sizes=SimpleNamespace(layout=each, dispatched=lambda: 17, **sizes),
        training=SimpleNamespace(**training),
        media=None,
        lines=lambda number: [
            SimpleNamespace(bytes=4.0, module="mlp"),
            SimpleNamespace(bytes=6.0, module="moe_act"),
        ],
    )
    grid = SimpleNamespace(layout=each, data_parallel_size=4, expert_data_parallel_size=2, world_size=64)
    hardware = SimpleNamespace(device=SimpleNamespace(**DEVICE), efficiency=SimpleNamespace(**EFFICIENCY))
    return StepTimeModel(inner, grid, hardware)  # type: ignore[arg-type]


def test_products_are_twice_as_fast_in_fp8_except_those_that_stay_in_half_precision() -> None:
    assert made()._gemm_time(9) == pytest.approx(9)
    assert made(fp8="hybrid")._gemm_time(9) == pytest.approx(4.5)
    assert made(fp8="hybrid")._gemm_time(9, half=True) == pytest.approx(9)
    assert made()._memory_time(9) == pytest.approx(9)


@pytest.mark.parametrize(("ranks", "hops"), [(1, 1), (2, 1), (8, 3), (32, 5)])
@pytest.mark.parametrize(("far", "latency"), [(False, 3), (True, 7)])
def test_a_message_takes_a_latency_for_each_doubling_of_ranks(
    ranks: int, hops: int, far: bool, latency: int
) -> None:
    assert made()._message_time(9, far, ranks) == pytest.approx(latency * hops + 9)
    assert made()._message_time(9, far) == pytest.approx(latency + 9)
    assert [made()._crosses_nodes(distance) for distance in (7, 8, 9)] == [False, True, True]


@pytest.mark.parametrize(("labels", "rows"), [(None, 17), (2, 2)])
def test_the_head_multiplies_and_moves_twelve_bytes_of_each_logit(labels: int | None, rows: int) -> None:
    each = made(head=SimpleNamespace(num_labels=labels), tp=2, fp8="hybrid")
    assert each._head() == pytest.approx(2 * 11 * rows * 5 + 11 * rows * 12)


@pytest.mark.parametrize(("frozen", "ratio"), [(False, 2), (True, 1)])
def test_media_are_shared_by_tensor_ranks_and_trained_ones_computed_three_times(
    frozen: bool, ratio: int
) -> None:
    each = made(tp=2, frozen=frozen)
    assert each._images() == (0, 0) and each._backward_ratio == ratio
    each.model.media = SimpleNamespace(flops=lambda sequences: (10 * sequences, 4 * sequences))
    assert each._images() == pytest.approx((15, 12))


@pytest.mark.parametrize(("gated", "products"), [(True, 3), (False, 2)])
def test_an_mlp_has_a_product_for_each_matrix(gated: bool, products: int) -> None:
    assert made(mlp=SimpleNamespace(gated_linear_unit=gated))._mlp(7) == products * 7 * 5


@pytest.mark.parametrize(
    ("fp8", "recipe", "casts"),
    [(None, "blockwise", 0), ("hybrid", "tensorwise", 4), ("hybrid", "mxfp8", 1), ("hybrid", "delayed", 0)],
)
def test_each_expert_is_launched_alone(fp8: str | None, recipe: str, casts: int) -> None:
    """Sixteen experts on four ranks: two products each forward, and twice as many backward."""
    each = made(ep=4, fp8=fp8, fp8_recipe=recipe)
    assert each._launches() == pytest.approx((8 * (1 + casts), 8 * (2 + casts)))


@pytest.mark.parametrize(
    ("ep", "etp", "seconds"),
    [
        (1, 1, 0),
        (2, 1, 2 * (3 + 13 * 3 * 7 * 2 / 2)),
        (4, 2, 2 * (3 * 3 + 13 * 3 * 7 * 2 * 3 / 4) + 2 * (3 + 13 * 3 * 7 * 2)),
        (1, 4, 2 * (3 * 2 + 13 * 3 * 7 * 2 * 3)),
        (1, 16, 2 * (7 * 4 + 13 * 3 * 7 * 2 * 15)),
        (16, 1, 2 * (7 * 4 + 13 * 3 * 7 * 2 / 2)),
    ],
)
def test_tokens_go_to_their_experts_and_back(ep: int, etp: int, seconds: float) -> None:
    """Two bytes of 7 channels of 13 tokens for 3 experts; of 16 ranks, half are on another machine.

    Ranks that share an expert gather the tokens of one another.
    """
    each = made(ep=ep, etp=etp)
    assert each._expert_messages(SimpleNamespace(hidden=7)) == pytest.approx(seconds)


@pytest.mark.parametrize("fp8", [None, "hybrid"])
@pytest.mark.parametrize("capacity", [None, 9])
@pytest.mark.parametrize("overlaps", [False, True])
def test_experts_by_hand(fp8: str | None, capacity: int | None, overlaps: bool, monkeypatch: Any) -> None:
    """17 tokens arrive at experts of 6 channels, a half of 12, and hidden states of 7; shared experts have 8."""
    each = made(etp=2, tp=2, fp8=fp8, capacity=capacity, overlap_moe_expert_parallel_comm=overlaps)
    monkeypatch.setattr(StepTimeModel, "_launches", lambda self: (1.0, 2.0))
    monkeypatch.setattr(StepTimeModel, "_expert_messages", lambda self, moe: 20.0)
    spent = each._experts(SimpleNamespace(inner=12, hidden=7, shared=8))
    rate = 2 if fp8 else 1
    products = 2 * 17 * 3 * 6 * 7 / rate * 4  # experts have a quarter of the efficiency
    copied = 16 * 2 + (4 * 2 if fp8 and capacity is None else 0)
    moved = 17 * (copied * 7 + (6 * (7 + 6) if fp8 else 0))
    shared = 2 * 11 * 3 * 8 * 5 / 2 / rate
    assert spent.forward == pytest.approx(products + moved + shared)
    assert spent.backward == pytest.approx(2 * products + moved + 2 * shared)
    assert spent.messages == pytest.approx(5 if overlaps else 20)
    monkeypatch.setattr(StepTimeModel, "_launches", lambda self: (1e6, 2e6))
    spent = each._experts(SimpleNamespace(inner=12, hidden=7, shared=8))
    assert spent.forward == pytest.approx(1e6 + moved + shared)
    assert spent.backward == pytest.approx(2e6 + moved + 2 * shared)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("has_mlp", [False, True])
@pytest.mark.parametrize("per_layer", [0, 19])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shared", [0, 8])
def test_a_layer_by_hand(
    moe: bool, has_mlp: bool, per_layer: int, frozen: bool, shared: int, monkeypatch: Any
) -> None:
    """23 weights of attention, 29 of scores, an MLP of 30 by two ranks; experts are computed apart."""
    each = made(tp=2, per_layer_input_size=per_layer, frozen=frozen, moe=SimpleNamespace(shared=shared))
    config = each.model.config
    config.is_moe_layer, config.has_mlp, config.has_attention = (
        lambda n: moe,
        lambda n: has_mlp,
        lambda n: True,
    )
    config.layer_config = lambda n: SimpleNamespace(mlp=SimpleNamespace(ffn_hidden_size=30))
    recomputed: dict[str, float] = {}
    for name, value in {
        "_mixer_time": (23.0, 29.0),
        "_tensor_messages": 40.0,
        "_context_messages": 31.0,
        "_experts": _Layer(100.0, 200.0, 50.0),
    }.items():
        monkeypatch.setattr(StepTimeModel, name, lambda self, *_, value=value: value)
    monkeypatch.setattr(
        StepTimeModel, "_recompute_time", lambda self, number, seconds: recomputed.update(seconds) or 37.0
    )
    monkeypatch.setattr(speed, "_KERNELS", 1)
    spent = each._layer_time(3)
    mlp = 0 if moe or not has_mlp else 2 * 11 * (3 * 30 * 5) / 2
    products = 2 * (11 * 23 + 13 * 3 * per_layer * 5) + mlp
    experts = (100, 200, 50) if moe else (0, 0, 0)
    dense = has_mlp and (not moe or shared > 0)  # tokens that go to experts are not gathered before
    sent = 40 * (1 + dense) / 2 + experts[2]
    backward = (1 if frozen else 2) * products + 2.5 * 29 + 25
    assert recomputed == pytest.approx({"core_attn": 29, "mlp": mlp, "moe": experts[0] + experts[2]})
    assert spent.forward == pytest.approx(products + 29 + 25 + experts[0] + sent + 31)
    assert spent.backward == pytest.approx(backward + 37 + experts[1] + sent + 2 * 31)
    assert spent.messages == pytest.approx(2 * sent + 3 * 31)
    monkeypatch.setattr(speed, "_KERNELS", 10**6)
    launched = each._layer_time(3)
    assert launched.forward == pytest.approx(10**6 * (1 + moe) + experts[0] + sent + 31)
    assert launched.backward == pytest.approx(2 * 10**6 * (1 + moe) + 37 + experts[1] + sent + 2 * 31)
    config.has_attention = lambda n: False
    assert each._layer_time(3).messages == pytest.approx(2 * (40 * dense / 2 + experts[2]))


@pytest.mark.parametrize(
    ("modules", "extra"),
    [
        (set(), 0),
        ({"core_attn"}, 29),
        ({"mlp", "core_attn"}, 29 + 31),
        ({"moe_act"}, 2.5 * 6),
        ({"moe", "moe_act"}, 37),
        ({"layernorm"}, 0),
    ],
)
def test_what_is_computed_again_is_added(modules: set[str], extra: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(speed, "recomputed_modules", lambda training: modules)
    seconds = {"core_attn": 29.0, "mlp": 31.0, "moe": 37.0}
    assert made()._recompute_time(0, seconds) == pytest.approx(extra)


@pytest.mark.parametrize(
    ("recomputation", "again"),
    [
        ({"recompute_granularity": "selective"}, 0),
        ({"recompute_granularity": "full", "recompute_num_layers": 2}, None),
        ({"recompute_granularity": "full", "recompute_method": "block"}, 1),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}, 2),
    ],
)
@pytest.mark.parametrize(
    ("has_embedding", "has_loss", "mtp"),
    [(True, False, 0), (False, True, 0), (False, True, 2), (False, False, 2)],
)
def test_a_chunk_is_its_layers_head_and_media(
    recomputation: Any, again: int | None, has_embedding: bool, has_loss: bool, mtp: int, monkeypatch: Any
) -> None:
    """Method uniform repeats all layers, method block the first ones without those of MTP."""
    each = made(mtp_num_layers=mtp, **recomputation)
    each.model.config.num_layers = 9
    monkeypatch.setattr(
        StepTimeModel, "_layer", lambda self, number: _Layer(10.0 + number, 100.0, number / 2)
    )
    monkeypatch.setattr(StepTimeModel, "_head", lambda self: 1000.0)
    monkeypatch.setattr(StepTimeModel, "_images", lambda self: (5.0, 7.0))
    chunk: Any = SimpleNamespace(
        layers=(2, 3), mtp_layers=(0,) * mtp, has_loss=has_loss, has_embedding=has_embedding
    )
    spent = each._chunk(chunk)
    numbers = [2, 3, *[8] * mtp]
    forward, head = sum(10 + n for n in numbers), 1000 * (1 + mtp) * has_loss
    repeated = sum(10 + n for n in numbers[:again])
    assert spent.forward == forward + head + 5 * has_embedding
    assert spent.backward == 100 * len(numbers) + repeated + 2 * head + 7 * has_embedding
    assert spent.messages == sum(numbers) / 2


def test_the_loss_takes_the_logits_of_mtp_layers_on_another_chunk(monkeypatch: Any) -> None:
    monkeypatch.setattr(StepTimeModel, "_head", lambda self: 1000.0)
    chunk: Any = SimpleNamespace(layers=(), mtp_layers=(), has_loss=True, has_embedding=False)
    spent = made(mtp_num_layers=2)._chunk(chunk)
    assert (spent.forward, spent.backward) == (3000, 2 * 3000)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("in_fp32", "summed"), [(None, 4), (True, 4), (False, 2)])
def test_gradients_go_over_data_parallel_ranks(
    reduces: bool, gathers: bool, in_fp32: bool | None, summed: int
) -> None:
    """Eight ranks share dense weights, on two machines with two tensor ranks; two share experts, on one."""
    each = made(
        tp=2,
        cp=2,
        ep=2,
        overlap_grad_reduce=reduces,
        overlap_param_gather=gathers,
        accumulate_allreduce_grads_in_fp32=in_fp32,
    )
    shown = [0.25 if overlapped else 1 for overlapped in (reduces, gathers)]
    dense = [7 * 3 + 80 * width * 7 / 8 for width in (summed, 2)]
    experts = [3 + 40 * width / 2 for width in (summed, 2)]

    def seconds(parameters: list[float]) -> float:
        return sum(time * part for time, part in zip(parameters, shown, strict=True))

    assert each._gradients(SimpleNamespace(dense=80, experts=0)) == pytest.approx(seconds(dense))
    both = each._gradients(SimpleNamespace(dense=80, experts=40))
    assert both == pytest.approx(seconds(dense) + seconds(experts))
    each.model.training.use_distributed_optimizer = False  # an all-reduce, and nothing is gathered
    plain = each._gradients(SimpleNamespace(dense=80, experts=40))
    assert plain == pytest.approx(2 * shown[0] * (dense[0] + experts[0]))
    each.grid.data_parallel_size, each.grid.layout.cp = 1, 1
    assert each._gradients(SimpleNamespace(dense=80, experts=0)) == 0


def test_tensor_ranks_send_hidden_states_four_times() -> None:
    assert made()._tensor_messages() == 0
    assert made(tp=4)._tensor_messages() == pytest.approx(4 * (3 * 2 + 11 * 5 * 2 * 3 / 4))
    assert made(tp=16)._tensor_messages() == pytest.approx(4 * (7 * 4 + 11 * 5 * 2 * 15 / 16))


@pytest.mark.parametrize(("vpp", "filled"), [(1, 1 + 1 / 4), (2, 1 + 1 / 2 / 4)])
def test_a_step_waits_for_the_slowest_stage(vpp: int, filled: float, monkeypatch: Any) -> None:
    """Two stages of two chunks each, 4 micro-batches: the second stage takes 3 + 8 seconds for each."""
    chunks = {"a": _Layer(1, 2, 0.5), "b": _Layer(2, 4, 0.25), "c": _Layer(1, 1, 2), "d": _Layer(2, 7, 0)}
    monkeypatch.setattr(StepTimeModel, "_chunk", lambda self, name: chunks[name])
    monkeypatch.setattr(StepTimeModel, "_gradients", lambda self, count: count.dense / 10)
    each = made(pp=2, vpp=vpp, gradient_accumulation_steps=4)
    each.model.config.pipeline_plan = lambda: SimpleNamespace(chunks=[["a", "b"], ["c", "d"]])
    trained: Any = [SimpleNamespace(dense=60, experts=4), SimpleNamespace(dense=20, experts=80)]
    share: Any = SimpleNamespace(dense=2, experts=4)
    found = each.step(trained, share, forwards=3, roughly=True)
    assert found.passes == 4 * (3 + 8)
    assert found.waiting == pytest.approx(4 * 11 * (filled - 1))
    assert found.gradients == 6
    assert found.optimizer == pytest.approx((60 / 2 + 4 / 4) * speed._STEPPED)  # one byte a second
    assert found.of_messages == 4 * 2
    assert found.extra_forward == pytest.approx(3 * 4 * 3 * filled)
    assert found.total == pytest.approx(
        4 * 11 * filled + found.gradients + found.optimizer + found.extra_forward
    )


@pytest.mark.parametrize(
    ("tp", "cp", "latency", "groups"),
    [(1, 2, 3, 4), (2, 3, 3, 2), (2, 4, 3, 2), (3, 3, 7, 4 / 3), (1, 9, 7, 4), (8, 2, 7, 1)],
)
def test_scores_hide_three_quarters_of_their_time_of_the_key_value_ring(
    tp: int, cp: int, latency: int, groups: float
) -> None:
    """Keys of 6 and values of 3 channels of four groups go to each of the other ranks, beyond 8 ranks over nodes."""
    attention = SimpleNamespace(num_query_groups=4, kv_channels=6, value_width=3)
    each = made(tp=tp, cp=cp)
    each.model.config.layer_config = lambda number: SimpleNamespace(attention=attention, mla=None)
    ring = (cp - 1) * (latency + 11 * 2 * groups * (6 + 3))
    assert each._context_messages(0, 0) == pytest.approx(ring)
    assert each._context_messages(0, 20) == pytest.approx(ring - 15)
    assert each._context_messages(0, 2 * ring) == 0
    each.grid.layout.cp = 1
    assert each._context_messages(0, 0) == 0


def test_a_ring_of_mla_has_values_of_their_own_width() -> None:
    mla = {"qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "q_lora_rank": 5, "kv_lora_rank": 7, "v_head_dim": 8}
    latent = SimpleNamespace(**mla, latent_head_gate=False)
    attention = SimpleNamespace(num_query_groups=4, kv_channels=6, value_width=3)
    each = made(cp=2)
    each.model.config.layer_config = lambda number: SimpleNamespace(
        attention=attention, mla=latent, hidden_size=5
    )
    assert each._context_messages(0, 0) == pytest.approx(3 + 11 * 2 * 4 * (6 + 8))


def test_a_mixers_operations_have_the_efficiency_of_attention() -> None:
    costs: Any = SimpleNamespace(weights=lambda config, sizes: 31.0, flops=lambda config, sizes: 37.0)
    each = made()
    assert each._mixer(costs) == pytest.approx((31, 37))
    each.hardware.device.tflops *= 2
    assert each._mixer(costs) == pytest.approx((31, 37 / 2))


@pytest.mark.parametrize(
    ("has_attention", "mixer", "parallel", "expected"),
    [
        (False, True, True, (0, 0)),
        (True, True, True, (3, 5)),
        (True, False, False, (7, 11)),
        (True, False, True, (7 + 13, 11 + 17)),
    ],
)
def test_a_layer_has_attention_or_a_mixer_or_both_in_parallel(
    has_attention: bool, mixer: bool, parallel: bool, expected: Any, monkeypatch: Any
) -> None:
    each = made()
    each.model.config.has_attention, each.model.config.has_parallel_mamba = lambda n: has_attention, parallel
    seconds = {"a mixer": (3.0, 5.0), speed.MAMBA_COSTS: (13.0, 17.0)}
    monkeypatch.setattr(speed, "mixer_costs", lambda config, number: "a mixer" if mixer else None)
    monkeypatch.setattr(StepTimeModel, "_mixer", lambda self, costs: seconds[costs])
    monkeypatch.setattr(StepTimeModel, "_attention", lambda self, number: (7.0, 11.0))
    assert each._mixer_time(2) == expected


@pytest.mark.parametrize(("window", "keys"), [(None, 11.0), (22, 11.0), (4, 4 - 16 / 44)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("values_are_keys", "accepts_keys"), [(False, False), (True, False), (False, True)])
def test_attention_by_hand(
    window: int | None, keys: float, gated: bool, values_are_keys: bool, accepts_keys: bool
) -> None:
    """Four heads of two groups on two tensor ranks, sequences of 22 tokens on two context ranks."""
    attention = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=6, value_width=3)
    attention.attention_output_gate, attention.values_are_keys, attention.window_size = (
        gated,
        values_are_keys,
        window,
    )
    each = made(tp=2, cp=2)
    each.model.config.layer_config = lambda number: SimpleNamespace(
        attention=attention, mla=None, hidden_size=5, accepts_keys=accepts_keys, layer_types=None
    )
    projected = 4 * ((2 if gated else 1) * 6 + 3) / 2 + (0 if accepts_keys else 6 + 3 * (not values_are_keys))
    assert each._attention(0) == pytest.approx((5 * projected, 2 * 11 * keys * 2 * (6 + 3)))


@pytest.mark.parametrize(("vpp", "group", "computed"), [(1, None, 16), (2, 6, 12), (2, 4, 16), (2, 30, 30)])
def test_whole_groups_of_micro_batches_are_computed_and_the_others_extrapolated(
    vpp: int, group: int | None, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def shortened(order: Order, micro_batches: int) -> Order:
        counts.append(micro_batches)
        return dataclasses.replace(order, micro_batches=micro_batches)

    monkeypatch.setattr(speed, "replace", shortened)
    model: Any = SimpleNamespace(
        model=SimpleNamespace(hidden_bytes=0),
        grid=SimpleNamespace(world_size=4),
        _crosses_nodes=lambda ranks: False,
        _message_time=lambda count, crosses: 0.0,
    )
    order = Order(pp=4, vpp=vpp, micro_batches=30, group=group)
    StepTimeModel._pipeline(model, order, [[_Layer(1.0, 2.0, 0.0)] * vpp] * 4)
    assert counts == [computed]
