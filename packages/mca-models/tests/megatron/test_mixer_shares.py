"""Share of a mixer's heads or channels that one of two tensor ranks has, and its gates, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mca_models.megatron.features import kimi_delta_attention
from mca_models.megatron.features.kimi_delta_attention import KimiDeltaAttention
from mca_models.megatron.features.lightning_attention import LightningAttention, decay_rates
from mca_models.megatron.features.mamba import GatedNorm, HeadGroups, Mamba
from mca_models.megatron.features.selective_scan import SelectiveScan
from mca_models.megatron.features.short_convolution import ShortConvolution

HIDDEN = 8


class Group:
    """A group of ranks, as seen by its last."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        """Return how many there are."""
        return self._size

    def rank(self) -> int:
        """Return the number of the last."""
        return self._size - 1


class Base(torch.nn.Module):
    """A base class that keeps a configuration, as Megatron's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


class Linear(torch.nn.Module):
    """A linear that keeps its sizes."""

    def __init__(self, columns: int, rows: int, **options: Any) -> None:
        super().__init__()
        self.sizes, self.group = (columns, rows), options["tp_group"]


GROUPS = SimpleNamespace(tp=Group(2), cp=Group(3))
MEGATRON = SimpleNamespace(
    **{
        "hidden_size": HIDDEN,
        "params_dtype": torch.float32,
        "layernorm_epsilon": 0.5,
        "num_attention_heads": 4,
    },
    **{"init_method": None, "output_layer_init_method": None, "tensor_model_parallel_size": 2},
    **{"deterministic_mode": False, "sequence_parallel": False, "normalization": "RMSNorm"},
    layernorm_zero_centered_gamma=False,
)


def made(mixer: type, **sections: Any) -> Any:
    model = SimpleNamespace(hidden_size=HIDDEN, num_layers=4, norm=SimpleNamespace(layernorm_epsilon=0.5))
    for name, fields in sections.items():
        setattr(model, name, SimpleNamespace(**fields))
    own = type(mixer.__name__, (mixer, Base), {})
    found = own(MEGATRON, model, Linear, Linear, pg_collection=GROUPS, layer_number=3)
    assert found.in_proj.group is found.out_proj.group is GROUPS.tp
    return found


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in module.named_parameters()}


def test_lightning_attention() -> None:
    sizes = {"lightning_num_heads": 4, "lightning_head_dim": 3}
    mixer = made(LightningAttention, lightning_attention=sizes)
    assert (mixer.heads, mixer.in_proj.sizes, mixer.out_proj.sizes) == (2, (HIDDEN, 48), (12, HIDDEN))
    assert shapes(mixer) == {"gate_norm.weight": (6,)} and mixer.gate_norm.weight.tolist() == [1] * 6
    assert mixer.fused == {"in_proj.weight": ([18, 6], ("qkv", "gate"))}
    assert torch.equal(mixer._rates(torch.device("cpu")), decay_rates(4, 2, 4)[2:])


def test_a_short_convolution() -> None:
    mixer = made(ShortConvolution, short_convolution={"short_conv_kernel_dim": 3})
    assert (mixer.in_proj.sizes, mixer.out_proj.sizes) == ((HIDDEN, 24), (HIDDEN, HIDDEN))
    assert shapes(mixer) == {"conv1d.weight": (4, 1, 3)}
    assert mixer.fused == {"in_proj.weight": ([4, 4, 4], ("gate_in", "gate_out", "inputs"))}
    weight = torch.arange(12.0).view(4, 1, 3)
    mixer.conv1d.weight = torch.nn.Parameter(weight)
    mixed = torch.randn(5, 1, 12, generator=torch.Generator().manual_seed(0))
    before, after, x = mixed.split(4, -1)
    inputs = torch.cat([torch.zeros(2, 1, 4), before * x])
    expected = torch.stack(
        [after[t] * sum(weight[:, 0, k] * inputs[t + k] for k in range(3)) for t in range(5)]
    )
    torch.testing.assert_close(mixer._sequence(mixed), expected)


@pytest.mark.parametrize("norm", ["none", "plain"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_selective_scan(norm: str, bias: bool) -> None:
    sizes = {"scan_channels": 6, "scan_step_rank": 2, "scan_state_dim": 5, "scan_conv_kernel_dim": 4}
    sizes |= {"scan_conv_bias": bias, "scan_norm": norm, "scan_norm_epsilon": 1e-6}  # type: ignore[dict-item]
    mixer = made(SelectiveScan, selective_scan=sizes)
    assert (mixer.in_proj.sizes, mixer.out_proj.sizes) == ((HIDDEN, 12), (6, HIDDEN))
    expected = {
        "conv1d.weight": (3, 1, 4),
        "x_proj.weight": (12, 3),
        "dt_proj.weight": (3, 2),
        "dt_proj.bias": (3,),
    }
    expected |= {"A_log": (3, 5), "D": (3,)} | ({"conv1d.bias": (3,)} if bias else {})
    found = shapes(mixer)
    assert {name: found[name] for name in expected} == expected
    assert len(mixer.norms) == (0 if norm == "none" else 3) and mixer.widths == [2, 5, 5]
    assert mixer.fused == {"in_proj.weight": ([3, 3], ("scanned", "gate"))}


@pytest.mark.parametrize("norm", ["none", "gated", "plain"])
def test_mamba(norm: str) -> None:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 3, "mamba_num_groups": 2, "mamba_state_dim": 5}
    sizes |= {"mamba_conv_kernel_dim": 4, "mamba_conv_bias": True, "mamba_norm": norm}  # type: ignore[dict-item]
    mixer = made(Mamba, mamba={**sizes, "mamba_least_step": 0.25, "mamba_multipliers": None})
    assert (mixer.in_proj.sizes, mixer.out_proj.sizes) == ((HIDDEN, 12 + 12 + 10 + 10 + 4), (12, HIDDEN))
    expected = {"dt_bias": (2,), "A_log": (2,), "D": (2,), "conv1d.weight": (16, 1, 4), "conv1d.bias": (16,)}
    assert shapes(mixer) == expected | ({} if norm == "none" else {"norm.weight": (6,)})
    assert mixer.fused == {
        "in_proj.weight": ([6, 6, 5, 5, 2], ("z", "x", "B", "C", "dt")),
        "conv1d.weight": ([6, 5, 5], ("x", "B", "C")),
        "conv1d.bias": ([6, 5, 5], ("x", "B", "C")),
    }
    assert norm == "none" or mixer.norm.gate_first == (norm == "gated")
    assert mixer.head_groups.every_rank is GROUPS.tp


@pytest.mark.parametrize("low_rank", [False, True])
def test_kimi_delta_attention(low_rank: bool) -> None:
    sizes = {"linear_low_rank_gates": low_rank, "linear_decay_bound": None, "linear_key_head_dim": 3}
    sizes |= {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 5}
    mixer = made(KimiDeltaAttention, linear_attention=sizes)
    assert (mixer.in_proj.sizes, mixer.out_proj.sizes) == ((HIDDEN, 40 if low_rank else 64), (12, HIDDEN))
    expected = {"dt_bias": (6,), "A_log": (2,), "conv1d.weight": (18, 1, 5), "out_norm.weight": (3,)}
    assert shapes(mixer) == expected | ({"gates_down.weight": (6, HIDDEN)} if low_rank else {})
    gates, parts = [] if low_rank else [6, 6], ["query", "key", "value"]
    own = ["beta"] if low_rank else ["write", "decay", "gate"]
    assert mixer.fused == {
        "in_proj.weight": ([6, 6, 6, 2, *gates], [*parts, *own]),
        "conv1d.weight": ([6, 6, 6], parts),
    }
    assert not low_rank or (mixer.fade_up.sizes, mixer.gate_up.sizes) == ((3, 12), (3, 12))


@pytest.mark.parametrize(
    ("count", "ranks", "here", "sharing"),
    [(4, 1, 4, 1), (4, 2, 2, 1), (2, 2, 1, 1), (2, 4, 1, 2), (1, 4, 1, 4)],
)
def test_ranks_have_groups_of_heads_or_share_one(count: int, ranks: int, here: int, sharing: int) -> None:
    groups = HeadGroups(count, Group(ranks))  # type: ignore[arg-type]
    assert (groups.here, groups.sharing) == (here, sharing)
    x = torch.ones(2, 3)
    assert sharing > 1 or groups.gathered(x).shape == (2, 1, 3)


@pytest.mark.parametrize("gate_first", [False, True])
def test_a_gated_norm_is_of_each_group(gate_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 6), (5, 6), (6,)))
    norm = GatedNorm(MEGATRON, 6, HeadGroups(2, Group(1)), gate_first=gate_first)  # type: ignore[arg-type]
    norm.weight = torch.nn.Parameter(weight)
    factor = torch.nn.functional.silu(gate)

    def normal(each: Tensor) -> Tensor:
        halves = [half / (half.square().mean(-1, keepdim=True) + 0.5).sqrt() for half in each.split(3, -1)]
        return weight * torch.cat(halves, -1)

    torch.testing.assert_close(norm(x, gate), normal(x * factor) if gate_first else normal(x) * factor)


def test_kimi_decay_is_bounded_by_a_sigmoid_of_each_channels_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logarithm of a channel's decay is ``bound * sigmoid(exp(A_log) * (fade + dt_bias))``."""
    sizes = {"linear_low_rank_gates": False, "linear_decay_bound": -5.0, "linear_key_head_dim": 3}
    sizes |= {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 5}
    mixer, found = made(KimiDeltaAttention, linear_attention=sizes), []
    rates, bias = torch.tensor([0.5, 2.0]), torch.arange(6.0) / 7
    mixer.A_log.data, mixer.dt_bias.data = rates.log(), bias

    def keep(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, *rest: object) -> Tensor:
        found.append(decay)
        return value

    monkeypatch.setattr(kimi_delta_attention, "delta_rule", keep)
    mixed = torch.linspace(-2, 2, 2 * 32).view(2, 1, 32)
    mixer._sequence(mixed)
    steps = mixed[:, :, 20:26] + bias
    expected = -5 / (1 + torch.exp(-steps.unflatten(-1, (2, 3)) * rates[:, None]))
    torch.testing.assert_close(found[0], expected.transpose(0, 1))
