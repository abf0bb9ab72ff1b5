"""Sums of micro-batches that losses are made of, by hand, for padded rows and packs."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from mca_config.errors import McaError
from mca_models.megatron import platform
from mca_train import groups
from mca_train.batching.micro_batch import MicroBatch
from mca_train.engine.engine import Pipeline
from mca_train.losses import loss_inputs, moe_aux, mtp, token_loss
from mca_train.losses.moe_aux import AuxLossState
from mca_train.losses.mtp import MtpLoss
from mca_train.losses.preference import (
    PreferenceLoss,
    counted_sequences,
    model_problems,
    reference_problems,
    sequence_logps,
    split_pairs,
)
from mca_train.losses.token_loss import StepCounts, StepLoss, count_step, megatron_loss, num_targets
from mca_train.trainer import dpo
from mca_train.trainer.dpo import DpoTrainer


def pack(**changes: Any) -> MicroBatch:
    """A pack of three sequences of 4, 3 and 1 tokens; the second has no target, the last does not count."""
    values: Any = {
        "input_ids": torch.arange(8)[None],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]]),
        "labels": torch.arange(1, 9)[None],
        "loss_mask": torch.tensor([[0.0, 1, 1, 0, 0, 0, 0, 0]]),
        "segments": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2]]),
        "num_segments": 4,
        "tokens_remaining": torch.tensor([[3, 2, 1, 0, 2, 1, 0, -1]]),
    }
    return MicroBatch(**values | changes)


@pytest.fixture
def two_context_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another context rank that has the same tokens."""
    monkeypatch.setattr(groups, "sum_over_context", lambda own: 2 * own)


def test_a_sequence_has_the_log_probability_of_its_targets_alone(two_context_ranks: None) -> None:
    output = torch.tensor([[1.0, 2, 4, 8, 16, 32, 64, 128]], dtype=torch.bfloat16)
    sums, counts = sequence_logps(output, pack())
    assert sums.tolist() == [-12, 0, 0, 0] and counts.tolist() == [4, 0, 0, 0]
    assert sums.dtype == counts.dtype == torch.float32
    assert counted_sequences(pack()).tolist() == [True, True, False, False]
    single = pack(tokens_remaining=torch.tensor([[3, 2, 1, 0, 0, -1, -1, 0]]))
    assert counted_sequences(single).tolist() == [True, True, True, False], "one token is a sequence"


@pytest.mark.parametrize("length", [4, 5])
def test_pairs_alternate_and_a_last_sequence_without_partner_is_left_out(length: int) -> None:
    pairs = split_pairs(torch.arange(length))
    assert (pairs.chosen.tolist(), pairs.rejected.tolist()) == ([0, 2], [1, 3])
    assert split_pairs(torch.zeros(1)).chosen.tolist() == []


@pytest.mark.parametrize("depths", [0, 2])
def test_counts_of_a_step_are_those_of_all_micro_batches(
    depths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depth 1 needs one token before a target, and one after a token."""
    monkeypatch.setattr(groups, "sum_over_samples_on_host", lambda own: own * 10)
    other = pack(num_segments=6, loss_mask=torch.ones(1, 8))
    step: Any = SimpleNamespace(micro_batches=(pack(), other, pack(num_segments=2)))
    found = count_step(step, depths, lambda micro: micro.loss_mask.sum() / 2)
    assert found.targets == (60.0, 90.0, 50.0)[: 1 + depths]
    assert found.tokens == (210.0, 150.0, 90.0)[: 1 + depths]
    assert found.num_segments == 6


def test_a_default_loss_is_the_sum_over_targets() -> None:
    output = torch.tensor([[1.0, 2, 4, 8, 16, 32, 64, 128]], dtype=torch.float16, requires_grad=True)
    loss, count = token_loss.token_loss(output, pack())
    assert (float(loss.detach()), int(count), float(num_targets(pack()))) == (6, 2, 2)
    sums: list[torch.Tensor] = []
    micro = pack()
    total, targets, both = megatron_loss(lambda own, batch: (own.sum(), torch.tensor(2.5)), micro, sums)(
        output
    )
    assert total.requires_grad and (int(targets), targets.dtype) == (2, torch.int32)
    assert both.tolist() == [255, 2.5] and both.dtype == torch.float64 and not both.requires_grad
    assert len(sums) == 1 and sums[0] is both


def step_loss(rows: list[torch.Tensor], device: str = "cpu") -> StepLoss:
    made: Any = SimpleNamespace(_micro_batch_sums=rows, _device=torch.device(device))
    return Pipeline._step_loss(made)


def test_micro_batches_are_added_up_and_stages_without_loss_have_zeros() -> None:
    found = step_loss([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    assert (float(found.loss_sum), float(found.targets)) == (11, 22)
    none = step_loss([], "meta")
    assert none.targets.dtype == torch.float64 and none.loss_sum.device.type == "meta"
    assert none.loss_sum.shape == none.targets.shape == ()
    zeros = step_loss([])
    assert (float(zeros.loss_sum), float(zeros.targets)) == (0, 0)


@pytest.mark.parametrize("kind", ["sigmoid", "simpo"])
@pytest.mark.parametrize("precomputed", [False, True])
def test_the_loss_of_pairs_counts_those_with_both_answers(
    kind: Any, precomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pair has one answer; the last number of a sequence is its reference's log-probability."""
    sums = torch.tensor([-4.0, -6.0, -8.0, -1.0, 0.0])
    counts = torch.tensor([2.0, 3.0, 2.0, 0.0, 0.0])
    reference = torch.tensor([-5.0, -5.5, -1.0, -1.0, 0.0])
    monkeypatch.setattr(dpo, "sequence_logps", lambda output, batch: (sums, counts))
    monkeypatch.setattr(dpo, "sequence_loss", lambda losses, real, ranks: (losses, real))
    logged: list[Any] = []
    preference = PreferenceLoss(kind=kind, beta=0.5, simpo_gamma=0.25 if kind == "simpo" else None)
    made: Any = SimpleNamespace(
        preference=preference,
        ranks=None,
        _precomputes=precomputed,
        _reference_queue=deque([reference, torch.zeros(5)]),
        _add_metrics=lambda *values: logged.extend(values),
    )
    made._reference_logps = lambda batch: DpoTrainer._reference_logps(made, batch)
    values = torch.stack([torch.full((5,), 9.0), reference], 1).double()
    losses, real = DpoTrainer.compute_loss(made, torch.zeros(()), pack(values=values))
    assert real.tolist() == [1, 0]
    margin = 0.5 * ((-4 + 5) - (-6 + 5.5)) if kind == "sigmoid" else 0.5 * (-2 + 2) - 0.25
    assert float(losses[0]) == pytest.approx(float(torch.tensor(-margin).exp().log1p()), rel=1e-6)
    policy, rewards, counted = logged
    assert counted is real or counted.tolist() == [1, 0]
    if kind == "sigmoid":
        assert (policy.chosen.tolist(), policy.rejected.tolist()) == ([-4, -8], [-6, -1])
        assert (rewards.chosen.tolist(), rewards.rejected.tolist()) == ([0.5, -3.5], [-0.25, 0])
    else:
        assert (policy.chosen.tolist(), policy.rejected.tolist()) == ([-2, -4], [-2, -1])
        assert (rewards.chosen.tolist(), rewards.rejected.tolist()) == ([-1, -2], [-1, -0.5])
    assert len(made._reference_queue) == (2 if precomputed or kind == "simpo" else 1)


@pytest.mark.parametrize(
    ("labels", "reference_vision", "model_vision", "words"),
    [
        (None, None, None, []),
        (2, None, None, ["the reference has a score head"]),
        (None, None, "tower", ["the reference takes no images"]),
        (None, "tower", None, []),
        (None, "tower", "tower", []),
    ],
)
def test_a_reference_has_a_vocabulary_and_the_media_of_the_model(
    labels: Any, reference_vision: Any, model_vision: Any, words: list[str]
) -> None:
    head = SimpleNamespace(num_labels=labels, head_kind="score")
    reference: Any = SimpleNamespace(head=head, vision=reference_vision)
    found = list(reference_problems(reference, SimpleNamespace(vision=model_vision)))  # type: ignore[arg-type]
    assert [each.startswith(word) for each, word in zip(found, words, strict=True)] == [True] * len(words)


@pytest.mark.parametrize(
    ("layers", "coefficient", "count"), [(None, 0.0, 0), (1, 0.0, 1), (0, 0.1, 1), (2, 0.1, 2)]
)
def test_pairs_have_no_losses_of_tokens(layers: Any, coefficient: float, count: int) -> None:
    config: Any = SimpleNamespace(
        mtp_num_layers=layers,
        num_moe_experts=4,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=coefficient,
        moe_z_loss_coeff=None,
    )
    assert len(list(model_problems(config))) == count


@pytest.mark.parametrize(
    ("experts", "kinds", "coefficients", "z", "has", "is_global"),
    [
        (4, "aux_loss", 0.1, None, True, False),
        (4, "aux_loss", 0.0, None, False, False),
        (4, "none", 0.1, None, False, False),
        (4, "sinkhorn", 0.0, 0.1, True, False),
        (4, ["aux_loss", "global_aux_loss"], [0.1, 0.0], None, True, False),
        (4, ["seq_aux_loss", "global_aux_loss"], [0.0, 0.1], None, True, True),
        (None, "global_aux_loss", 0.1, 0.1, False, False),
    ],
)
def test_routers_have_losses_with_a_coefficient(
    experts: Any, kinds: Any, coefficients: Any, z: Any, has: bool, is_global: bool
) -> None:
    config = SimpleNamespace(
        num_moe_experts=experts,
        moe_router_load_balancing_type=kinds,
        moe_aux_loss_coeff=coefficients,
        moe_z_loss_coeff=z,
    )
    assert (moe_aux.has_losses(config), moe_aux.needs_global_load(config)) == (has, is_global)


def test_a_step_begins_with_its_counts_and_without_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [AuxLossState(depth, capacity=None) for depth in (0, 1)]
    for state in states:
        state.load, state.losses["old"] = torch.ones(1), torch.ones(1)
    monkeypatch.setattr(
        moe_aux, "routers", lambda chunks: [SimpleNamespace(mca_aux_loss=state) for state in states]
    )
    moe_aux.begin_step([], StepCounts((12.0, 6.0), (24.0, 0.0), 7))
    assert [(each.tokens, each.items_per_token, each.num_segments) for each in states] == [
        (24.0, 0.5, 7),
        (1.0, 12.0, 7),
    ]
    assert all(each.load is None and not each.losses for each in states)
    state = MtpLoss((1.0, 1.0), torch.ones(1))
    mtp.begin_step(
        [SimpleNamespace(), SimpleNamespace(mca_mtp_loss=state)], StepCounts((3.0, 2.0), (5.0,), 1)
    )
    assert state.targets == (3.0, 2.0) and state.losses.tolist() == [0]


class Last(torch.nn.Module):
    """A chunk with the output layer."""

    def __init__(self, layers: int | None, *, post_process: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(mtp_num_layers=layers)
        self.post_process = post_process
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.given: dict[str, Any] = {}

    def _postprocess(self, **given: Any) -> str:
        self.given = given | {"layers": self.config.mtp_num_layers}
        return "output"


def test_the_loss_of_mtp_layers_is_installed_once_where_the_output_is() -> None:
    first, last, plain = Last(2, post_process=False), Last(2), Last(None)
    mtp.install_mtp_loss([first, last, plain])
    assert "_postprocess" not in vars(first) and "_postprocess" not in vars(plain)
    state = last.mca_mtp_loss
    assert state.targets == (1.0, 1.0, 1.0) and state.losses.tolist() == [0, 0]  # type: ignore[union-attr]
    assert state.losses.dtype == torch.float64  # type: ignore[union-attr]
    installed = last._postprocess
    mtp.install_mtp_loss([last])
    assert last._postprocess is installed and last.mca_mtp_loss is state


@pytest.mark.parametrize(
    ("is_here", "gradients", "training", "runs", "loses"),
    [
        (True, True, True, True, True),
        (True, False, True, True, False),
        (True, False, False, False, False),
        (False, False, False, False, False),
        (False, True, True, False, True),
    ],
)
def test_mtp_layers_run_in_training_and_have_a_loss_with_gradients(
    is_here: bool, gradients: bool, training: bool, runs: bool, loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule's last stage splits what an earlier one has computed, in evaluation too."""
    calls: list[str] = []
    states = torch.arange(12.0).view(12, 1)

    def run(model: Any, given: Any, rest: Any) -> Any:
        assert model is chunk and given is own and rest["other"] == 1
        calls.append("run")
        return states

    monkeypatch.setattr(mtp, "_run_layers", run)

    def add(model: Any, first: Any, further: Any, labels: Any, rest: Any) -> Any:
        calls.append("loss")
        assert model is chunk and labels == "labels" and rest["other"] == 1
        assert [each.flatten().tolist() for each in (first, *further)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9, 10, 11],
        ]
        return first

    monkeypatch.setattr(mtp, "_add_losses", add)
    chunk = Last(2).train(training)
    own = states[:4] if is_here else states
    with torch.set_grad_enabled(gradients):
        found = mtp._postprocess(
            chunk, chunk._postprocess, hidden_states=own, labels="labels", mtp_in_postprocess=is_here, other=1
        )
    assert found == "output" and calls == ["run"] * runs + ["loss"] * loses  # type: ignore[comparison-overlap]
    given = chunk.given
    assert given["hidden_states"].flatten().tolist() == [0, 1, 2, 3] and given["labels"] == "labels"
    assert (given["mtp_in_postprocess"], given["other"], given["layers"]) == (False, 1, None)
    assert chunk.config.mtp_num_layers == 2
    calls.clear()
    mtp._postprocess(
        chunk, chunk._postprocess, hidden_states=own, labels=None, mtp_in_postprocess=is_here, other=1
    )
    assert "loss" not in calls


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("detached", [False, True])
def test_mtp_layers_take_the_output_weight_detached_on_request(tied: bool, detached: bool) -> None:
    own, shared = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    model: Any = SimpleNamespace(
        share_embeddings_and_output_weights=tied,
        shared_embedding_or_output_weight=lambda: shared,
        output_layer=SimpleNamespace(weight=own),
        config=SimpleNamespace(**({"mtp_detach_heads": True} if detached else {})),
    )
    found = mtp._output_weight(model)
    if not detached:
        assert found is (shared if tied else None)
        return
    assert found is not None and not found.requires_grad
    assert found.data_ptr() == (shared if tied else own).data_ptr()


class Output:
    """A chunk whose loss is the cross entropy of full logits; its configuration is Megatron's."""

    def __init__(self, *, fused: bool = False, kind: str = "te", post_process: bool = True) -> None:
        self.config = SimpleNamespace(cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl=kind)
        self.post_process = post_process

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits[..., :7].permute(1, 2, 0), labels, reduction="none")


@pytest.mark.parametrize("ranks", [1, 2])
def test_smoothed_labels_are_torchs_without_the_padding_of_the_vocabulary(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven words and three rows of padding on each of two tensor ranks, of which the second has two words."""
    platform.prepare()
    import megatron.core.tensor_parallel as upstream
    from megatron.core import parallel_state

    torch.manual_seed(0)
    logits, labels = torch.randn(3, 2, 10), torch.randint(7, (2, 3))
    shares = torch.zeros(3, 2)
    monkeypatch.setattr(upstream, "reduce_from_tensor_model_parallel_region", lambda own: own)
    for rank, own in enumerate(logits.chunk(ranks, -1)):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        shares += loss_inputs.target_over_mean(own, labels.T, 7)

    def whole(given: torch.Tensor, targets: torch.Tensor, words: int) -> torch.Tensor:
        assert given is logits and torch.equal(targets, labels.T) and words == 7
        return shares

    monkeypatch.setattr(loss_inputs, "target_over_mean", whole)
    chunk: Any = Output()
    loss_inputs.smooth_labels([chunk], 0.25, 7)
    found = chunk.compute_language_model_loss(labels, logits)
    right = cross_entropy(logits[..., :7].permute(1, 2, 0), labels, reduction="none", label_smoothing=0.25)
    torch.testing.assert_close(found, right)
    loss_inputs.smooth_labels([chunk], 0.0, 7)
    assert "compute_language_model_loss" not in vars(chunk)


def test_a_fused_loss_that_overwrites_logits_is_not_smoothed() -> None:
    earlier: Any = Output(post_process=False)
    loss_inputs.smooth_labels([earlier, Output(fused=True, kind="native")], 0.1, 7)  # type: ignore[list-item]
    assert "compute_language_model_loss" not in vars(earlier)
    loss_inputs.smooth_labels([Output(fused=True)], 0.0, 7)  # type: ignore[list-item]
    with pytest.raises(
        McaError, match="label_smoothing_factor is not supported with cross_entropy_fusion_impl te"
    ):
        loss_inputs.smooth_labels([Output(fused=True)], 0.1, 7)  # type: ignore[list-item]
