"""Multi-token prediction: loss, gradients and export equal a plain PyTorch model on transformers' layers."""

import copy
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from cases import needed
from checkpoint_files import read
from gradients import export_gradient, export_gradient_of, worst_errors
from harness import RanksFailed, run_in_turn, run_ranks
from layouts import arguments, world_size
from mca_models.megatron import platform
from parity import TOLERANCE
from prediction import MIMO, SCALE, WithPrediction, deepseek_with_prediction
from reference import Reference, hf_model, make_reference

pytestmark = pytest.mark.ranks

CASE, BATCH = "deepseek_v3", 4
LAYOUTS = ("tp1", "pp2", "ep2", "tp2sp", "pp2vpp2ep2", "tp2ep2etp1")


def total_loss(model: WithPrediction, input_ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss plus the scaled loss for the token after.

    megatron-core 0.16 divides both sums by the number of next-token targets, later versions each by its own.
    """
    main, predicted = model.logits(input_ids)
    entropy = cross_entropy(main[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    further = cross_entropy(predicted[:, :-2].flatten(0, 1), input_ids[:, 2:].flatten(), reduction="sum")
    lost = 1 if platform.megatron_version() < (0, 17) else 2
    return entropy + SCALE * further / input_ids[:, lost:].numel()


def computed(case: str, model: WithPrediction, folder: Path, layouts: Iterable[str]) -> Path:
    """The model, its gradients as transformers' autograd has them, and those of every layout."""
    plain = make_reference(case, folder, batch=BATCH)
    reference = Reference(case, model.save(folder / "with"), plain.input_ids, plain.logits)
    total_loss(model, reference.input_ids).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save(folder / "expected")
    layouts = list(layouts)
    for size in sorted({*map(world_size, layouts)}):
        some = [layout for layout in layouts if world_size(layout) == size]
        run_in_turn(size, *(partial(run, reference, layout, folder) for layout in some))
    return folder


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of DeepSeek V3."""
    layouts = dict.fromkeys(["tp1", *needed(request, "layout")])  # what tp1 saves is read again
    return computed(CASE, deepseek_with_prediction(), tmp_path_factory.mktemp("mtp"), layouts)


def run(reference: Reference, layout: str, folder: Path) -> None:
    """Exports the model unchanged, its gradients, and checks its logits. Runs on every rank."""
    from mca_models.megatron import AutoModel

    settings = {"mtp_loss_scaling_factor": SCALE, "calculate_per_token_loss": True, "moe_aux_loss_coeff": 0.0}
    model = AutoModel.from_pretrained(reference.path, arguments(layout, **settings))
    assert float((model.logits(reference.input_ids) - reference.logits).abs().max()) <= 1e-4
    model.save_pretrained_as_hf(folder / f"{layout}-hf")
    model.save_pretrained(folder / f"{layout}-mca")
    export_gradient_of(model, reference, folder / f"{layout}-gradients")


@pytest.mark.cases(0, always=["tp2sp", "pp2vpp2ep2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prediction_gradients_equal_autograd(layout: str, folder: Path) -> None:
    worst = worst_errors(folder / "expected", folder / f"{layout}-gradients")
    assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.cases(0, always=["tp2sp", "pp2vpp2ep2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prediction_layers_are_exported_bit_for_bit(layout: str, folder: Path) -> None:
    source, export = read(folder / "with"), read(folder / f"{layout}-hf")
    assert source.keys() == export.keys()
    assert all(torch.equal(source[name], export[name]) for name in source)


@pytest.mark.cases(0, always=["deepseek_v32"])
@pytest.mark.parametrize("case", ["deepseek_v32", "glm_moe_dsa"])
def test_mtp_layers_have_their_own_indexer(case: str, tmp_path: Path) -> None:
    found = computed(case, WithPrediction(copy.deepcopy(hf_model(case))), tmp_path, ["tp1"])
    worst = worst_errors(found / "expected", found / "tp1-gradients")
    assert worst[0][1] <= TOLERANCE, worst
    assert any("layers.4.self_attn.indexer." in name for name in read(found / "tp1-hf"))


@pytest.fixture(scope="module")
def before_norm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of MiMo, whose MTP layers take the hidden states before the final norm."""
    mimo = WithPrediction(copy.deepcopy(hf_model("mimo")), names=MIMO)
    return computed("mimo", mimo, tmp_path_factory.mktemp("mimo"), needed(request, "layout"))


@pytest.mark.cases(0, always=["tp2sp", "pp2vpp2"])
@pytest.mark.parametrize("layout", ["tp1", "tp2sp", "pp2", "pp2vpp2"])
def test_mtp_layers_take_the_input_of_the_final_norm(layout: str, before_norm: Path) -> None:
    worst = worst_errors(before_norm / "expected", before_norm / f"{layout}-gradients")
    assert worst[0][1] <= TOLERANCE, worst
    source, export = read(before_norm / "with"), read(before_norm / f"{layout}-hf")
    assert source.keys() == export.keys()
    assert all(torch.equal(source[name], export[name]) for name in source)


def test_megatrons_own_loss_over_context_ranks_is_refused(folder: Path) -> None:
    plain = make_reference(CASE, folder, batch=BATCH)
    reference = Reference(CASE, folder / "with", plain.input_ids, plain.logits)
    with pytest.raises(
        RanksFailed, match="McaError: Megatron's MTP loss is wrong with context_parallel_size above 1"
    ):
        # 0.16 has it right as a sum over tokens
        run_ranks(2, export_gradient, reference, "cp2", folder / "never", calculate_per_token_loss=False)


def without(path: Path, export: Path, count: int | None = 0) -> list[str]:
    from mca_models.megatron import AutoModel

    model = AutoModel.from_pretrained(path, arguments("tp1", mtp_num_layers=count))
    model.save_pretrained_as_hf(export, overwrite=True)
    return [name for name, _ in model.canonical_parameters() if name.startswith("mtp.")]


def counted(path: Path) -> int:
    count: int = json.loads((path / "config.json").read_text())["num_nextn_predict_layers"]
    return count


def test_prediction_layers_can_be_left_out(folder: Path) -> None:
    sources = ("tp1-mca", "with")
    calls = [partial(without, folder / source, folder / f"without-{source}") for source in sources]
    assert run_in_turn(1, *calls) == [[[]], [[]]]
    for source in sources:
        assert (counted(folder / "with"), counted(folder / f"without-{source}")) == (1, 0)


def test_prediction_layers_that_are_not_built_are_not_counted_in_an_export(tmp_path: Path) -> None:
    reference = make_reference("hy_v3", tmp_path / "plain")
    plain = read(reference.path)
    published = {**plain, "model.layers.4.eh_proj.weight": torch.ones(3, 2)}
    save_file(published, reference.path / "model.safetensors", {"format": "pt"})
    config = json.loads((reference.path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (reference.path / "config.json").write_text(json.dumps(config))
    assert run_ranks(1, without, reference.path, tmp_path / "export", None) == [[]]
    assert counted(tmp_path / "export") == 0
    assert read(tmp_path / "export").keys() == plain.keys()
