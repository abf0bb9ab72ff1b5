"""A run stopped on one layout goes on upon another, or with another split of its optimizer, as if it had not."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from loss_curves import worst
from mca_config.errors import McaError
from reshard_runs import ALL, EXPERTS_ALONE, FIRST, WITH_EXPERTS, adapter_of, run
from train_cases import make_trainer, quietly, sparse_checkpoint, stop_and_resume, tiny_checkpoint, tokens
from train_settings import ASYNC, CP, DP, EP, ETP1, ETP2, OVERLAP, PP, SP, TORCH_DIST, TP, VPP, ZERO

pytestmark = pytest.mark.ranks


DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, TP),
    "tp2-sp": (2, SP),
    "pp2": (2, PP),
    "pp2-vpp2": (2, VPP | TORCH_DIST),
    "cp2": (2, CP),
    "dp2": (2, DP),
    "dp2-split": (2, OVERLAP | DP | ASYNC),
    "tp2-dp2": (4, TP | DP | TORCH_DIST),
    "tp2-sp-dp2-split": (4, SP | OVERLAP | DP),
    "dp2-pp2-vpp2-split": (4, OVERLAP | VPP | DP),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-split": (2, ZERO | DP),
    "ep2": (2, EP | DP),
    "ep2-split": (2, EP | ZERO | DP | ASYNC),
    "tp2-sp-ep2-etp1": (2, SP | EP | ETP1),
    "dp2-etp2-split": (2, ETP2 | ZERO | DP),
    "dp2-etp2-split-torch-dist": (2, ETP2 | ZERO | DP | TORCH_DIST),
    "tp2-sp-etp1": (2, SP | ETP1),
    "pp2-ep2-split": (4, PP | EP | ZERO | DP | TORCH_DIST),
}


def pairs(layouts: dict[str, Any]) -> list[Any]:
    return [pytest.param(before, after, id=f"{before}-to-{after}") for after in layouts for before in layouts]


@dataclass
class Runs:
    """Runs of one model that were stopped, and that were not, each made once."""

    model: Path
    folder: Path
    layouts: dict[str, tuple[int, dict[str, Any]]]
    first: int
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    curves: dict[tuple[str, int], Any] = field(default_factory=dict)

    def straight(self, name: str) -> Any:
        """The whole curve on a layout."""
        return self._run(name, self.steps)

    def resumed(self, before: str, after: str, output: Path) -> Any:
        """The whole curve of which the beginning was made on another layout."""
        steps = self.steps if self._goes_on(before) else self.first
        self._run(before, steps)
        size, changes = self.layouts[after]
        checkpoint = self.folder / f"{before}-{steps}" / f"checkpoint-{self.first}"
        found = run_ranks(size, run, self.model, output, self.steps, checkpoint, **self.settings | changes)
        return found[0]

    def _goes_on(self, name: str) -> bool:
        """Return True if a run trains on while it writes its checkpoint."""
        return "async_save" in self.layouts[name][1]

    def _run(self, name: str, steps: int) -> Any:
        """The curve of a run, which leaves a checkpoint if it stops after the first steps or writes in background."""
        if (name, steps) not in self.curves:
            size, changes = self.layouts[name]
            saves = steps == self.first or self._goes_on(name)
            settings = self.settings | changes | {"first": self.first if saves else 0}
            found = run_ranks(size, run, self.model, self.folder / f"{name}-{steps}", steps, **settings)
            self.curves[name, steps] = found[0]
        return self.curves[name, steps]

    def difference(self, before: str, after: str, output: Path) -> float:
        """The largest relative one to the loss curve of one process; on its own layout there must be none."""
        resumed = self.resumed(before, after, output)
        if before == after:
            assert resumed == self.straight(before)
        assert len(resumed["loss"]) == self.steps
        return worst(self.straight("one")["loss"], resumed["loss"])


@pytest.fixture(scope="module")
def lengths(every_case):
    """The step of the checkpoint, and all steps."""
    return (4, 24) if every_case else (FIRST, ALL)


@pytest.fixture(scope="module")
def dense(tmp_path_factory, lengths, every_case):
    layers = 4 if every_case else 2
    model = tiny_checkpoint(
        tmp_path_factory.mktemp("model"), vocab_size=131, num_hidden_layers=layers
    )  # padded at tensor size 2
    return Runs(model, tmp_path_factory.mktemp("dense"), DENSE, *lengths)


@pytest.fixture(scope="module")
def experts(tmp_path_factory, lengths):
    model = sparse_checkpoint(tmp_path_factory.mktemp("experts"), num_hidden_layers=2)
    return Runs(model, tmp_path_factory.mktemp("runs"), EXPERTS, *lengths, {"data": lambda: tokens(96)})


@pytest.mark.qualify  # the default cases of the tests below shard and gather the same weights
@pytest.mark.parametrize(("before", "after"), pairs(DENSE))
def test_the_loss_curve_goes_on(before, after, dense, tmp_path, record_property):
    difference = dense.difference(before, after, tmp_path)
    record_property("difference", difference)
    assert difference < 1e-4


@pytest.fixture(scope="module")
def rates(dense, tmp_path_factory, lengths):
    own = {"decoupled_lr": 5e-4}
    return Runs(dense.model, tmp_path_factory.mktemp("rates"), DENSE, *lengths, own)


@pytest.mark.cases(0, always=["pp2-to-dp2-split"])
@pytest.mark.parametrize(("before", "after"), pairs(DENSE))
def test_runs_with_a_decoupled_learning_rate_go_on(before, after, rates, tmp_path, record_property):
    difference = rates.difference(before, after, tmp_path)
    record_property("difference", difference)
    assert difference < 1e-4


@pytest.mark.cases(0, always=["dp2-etp2-split-to-tp2-sp-etp1"])
@pytest.mark.parametrize(("before", "after"), pairs(EXPERTS))
def test_experts_go_on(before, after, experts, tmp_path, record_property):
    difference = experts.difference(before, after, tmp_path)
    record_property("difference", difference)
    assert difference < 1e-4


@pytest.mark.cases(0, always=["split"])
@pytest.mark.parametrize(
    "case,changes",
    [("qwen3_next", {}), ("qwen3_next", ZERO), ("nemotron_h", ZERO)],
    ids=["whole", "split", "state-space"],
)
def test_layers_with_fused_projections_go_on(case, changes, tmp_path):
    """The optimizer's state of their projections is stored in parts."""
    from reference import make_reference

    model = make_reference(case, tmp_path / "model").path
    changes = changes | {"data": lambda: tokens(96), "gradient_accumulation_steps": 2}
    (straight,) = run_ranks(1, run, model, tmp_path / "straight", FIRST + 2, **changes)
    before = tmp_path / "straight" / f"checkpoint-{FIRST}"
    assert run_ranks(1, run, model, tmp_path / "resumed", FIRST + 2, before, **changes) == [straight]


@pytest.mark.qualify
@pytest.mark.parametrize(("before", "after"), [("tp2", "dp2-split"), ("dp2-split", "tp2")])
def test_mamba_next_to_attention_goes_on(before, after, tmp_path):
    """Falcon H1: both take parts of one layer, and each is cut over tensor ranks in its own way."""
    from reference import make_reference

    model = make_reference("falcon_h1", tmp_path / "model").path
    runs = Runs(model, tmp_path / "runs", DENSE, FIRST, ALL, {"data": lambda: tokens(96)})
    assert runs.difference(before, after, tmp_path / "resumed") < 1e-4


GATE_AND_UP = {"target_modules": ["gate_up_proj"], "modules_to_save": ["layers.1.self_attn"]}


@pytest.mark.cases(0, always=["experts-alone"])
@pytest.mark.parametrize(
    "case,before,after,adapted",
    [
        pytest.param("qwen3_moe", EP | ZERO | DP, ETP2 | ZERO | DP, EXPERTS_ALONE, id="experts-alone"),
        pytest.param(
            "qwen3_moe",
            EP | DP,
            ETP2 | DP,
            WITH_EXPERTS,
            id="with-experts",
        ),
        pytest.param("phi3", SP, ZERO | DP, GATE_AND_UP, id="gate-and-up"),
    ],
)
def test_adapters_go_on(case, before, after, adapted, tmp_path):
    """A rank's rows of lora_B of fused projections are some of each one's; a saved module may be of one layer."""
    model, adapter = adapter_of(case, tmp_path, **adapted)
    changes = {"data": lambda: tokens(96), "adapter": adapter, "learning_rate": 2e-2}
    straight = run_ranks(2, run, model, tmp_path / "straight", FIRST + 2, **changes | before)[0]
    checkpoint = tmp_path / "straight" / f"checkpoint-{FIRST}"
    found = run_ranks(2, run, model, tmp_path / "on", FIRST + 2, checkpoint, **changes | after)[0]
    assert worst(straight["loss"], found["loss"]) < 1e-4
    assert worst(straight["grad_norm"], found["grad_norm"]) < 1e-4


def test_a_stage_that_trains_nothing_has_the_step_of_the_others(tmp_path):
    """Rank 0 writes the step, and its optimizer counts none."""
    model, adapter = adapter_of("phi3", tmp_path, target_modules=["qkv_proj"], layers_to_transform=[3])
    changes = {"max_steps": 2, "at": 1, "gradient_accumulation_steps": 2, "learning_rate": 2e-2}
    changes |= {"train_dataset": tokens(8), "adapter": adapter} | PP
    for found in run_ranks(2, stop_and_resume, model, tmp_path / "run", **changes):
        assert found["resumed"] == found["straight"]
        assert found["state"] == {"steps": 2, "equal_weights": True}


def thawed(model: Path, output_dir: Path) -> str:
    """Return the messages of a run whose embedding was frozen until its checkpoint."""

    def trainer() -> Any:
        return make_trainer(model, output_dir, save_strategy="steps", save_steps=1, max_steps=1, **PP)

    first = trainer()
    for name, parameter in first.model.chunks[0].named_parameters():
        parameter.requires_grad_("word_embeddings" not in name)
    quietly(first.train)
    try:
        trainer().train(resume_from_checkpoint=True)
    except McaError as error:
        return str(error)
    return "no error"


def test_a_state_that_one_stage_lacks_is_missed_by_all(dense, tmp_path):
    reported = run_ranks(2, thawed, dense.model, tmp_path, timeout=60)
    assert all("holds no 'exp_avg.embedding.word_embeddings.weight'" in each for each in reported), reported


def run_with_names_of_megatron(*args: Any, **changes: Any) -> Any:
    """`run` that writes norms under the names that Megatron's local layers give them."""
    from unittest import mock

    with mock.patch("mca_models.megatron.features.features._checkpoint_names", return_value={}):
        return run(*args, **changes)


@pytest.mark.cases(0, always=["phi3"])
@pytest.mark.parametrize("case", ["deepseek_v3", "phi3"])
def test_states_are_found_under_other_names(case, tmp_path):
    from reference import make_reference

    model = make_reference(case, tmp_path / "model").path
    changes = {"data": lambda: tokens(96), "gradient_accumulation_steps": 2}
    straight = run_ranks(1, run_with_names_of_megatron, model, tmp_path / "old", FIRST + 2, **changes)
    before = tmp_path / "old" / f"checkpoint-{FIRST}"
    assert run_ranks(1, run, model, tmp_path / "new", FIRST + 2, before, **changes) == straight
