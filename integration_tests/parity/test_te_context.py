"""Context parallelism over Transformer Engine's attention computes what transformers does, with every cp_comm_type.

What it cannot compute, or would compute wrongly, raises an error that names the option.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from case_tables import TE_CONTEXT_PARALLEL
from cases import Case, as_params, group_by_layout, needed
from checkpoint_files import read
from emulated_te import needs_te, run_emulated
from gradients import NO_DROPOUT, compute, expected_gradients, worst_errors
from layouts import arguments
from packed_rows import compare as compare_packed
from parity import TOLERANCE
from reference import FAMILY_CASES, Reference, make_reference

pytestmark = [pytest.mark.ranks, needs_te]

WAYS = ("p2p", "all_gather", "a2a")
SINKS = "counts their whole gradient"


def in_some_way(
    references: list[Reference], layout: str, folder: Path, first: list[str]
) -> list[tuple[str, Any]]:
    """Each model in the way that comes first and is not refused for it, and what `compute` found."""
    found = []
    for reference, preferred in zip(references, first, strict=True):
        for way in (preferred, *(way for way in WAYS if way != preferred)):
            (result,) = compute([reference], layout, folder, cp_comm_type=way)
            if not isinstance(result, str) or (
                "set it to p2p" not in result and "cp_comm_type" not in result
            ):
                break
        found.append((way, result))
    return found


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Any]:
    folder = tmp_path_factory.mktemp("context")
    cases = needed(request)
    references = {model: make_reference(model, folder, batch=4) for model in {case.model for case in cases}}
    for reference in references.values():
        expected_gradients(reference, folder)
    found: dict[Case, Any] = {}
    for layout, group in group_by_layout(cases).items():
        first = [WAYS[list(FAMILY_CASES).index(case.model) % len(WAYS)] for case in group]
        models = [references[case.model] for case in group]
        ranks = run_emulated(group[0].num_ranks, in_some_way, models, layout, folder, first, timeout=500)
        for number, case in enumerate(group):
            found[case] = folder, [rank[number] for rank in ranks]
    return found


@pytest.mark.cases(
    4,
    always=[
        *("qwen3-tp2cp2sp", "deepseek_v3-tp2cp2sp", "qwen2-cp4", "mixtral-cp2ep2pp2", "qwen3_moe-cp2ep2"),
        *("llama-cp2", "qwen2-cp2", "qwen3-cp2", "deepseek_v3-cp2", "gemma3_text-cp2", "gpt_oss-cp2"),
        *("qwen3_5_text-cp2", "nemotron_h-cp2"),
    ],
)
@pytest.mark.parametrize("case", as_params(TE_CONTEXT_PARALLEL))
def test_logits_and_gradients_equal_transformers(case: Case, computed: dict[Case, Any]) -> None:
    folder, found = computed[case]
    if SINKS in str(found[0][1]):
        assert all(SINKS in str(result) for _, result in found)
        return
    assert all(isinstance(result, float) and result <= TOLERANCE for _, result in found), found
    worst = worst_errors(folder / f"{case.model}-expected", folder / case.id)
    assert worst[0][1] <= TOLERANCE, (found[0][0], worst)


PACKED = {
    "qwen3": "p2p",
    "mistral": "all_gather",
    "qwen2": "a2a",
    "deepseek_v3": "p2p",
    "gemma3_text": "all_gather",
}


def packed(references: list[Reference]) -> dict[str, Any]:
    """Differences of packed rows to separate ones and to transformers. Runs on every rank."""
    return {each.model: compare_packed(each, "cp2", cp_comm_type=PACKED[each.model]) for each in references}


def test_packed_equals_separate_and_transformers(tmp_path: Path) -> None:
    references = [make_reference(case, tmp_path) for case in PACKED]
    for of_rank in run_emulated(2, packed, references):
        for case, found in of_rank.items():
            assert max(found) <= TOLERANCE, (case, found)


UNREFUSED = (
    ("mistral", "p2p", "sliding window"),
    ("gpt_oss", "p2p", "a2a"),
    ("llama-one-group", "a2a", "num_heads"),
)
"""Layouts that mca rejects: type, communication, and a word of Transformer Engine's error or for its missing kernel."""


def unrefused(references: list[Reference], folder: Path) -> dict[str, tuple[Any, Any]]:
    """Return the errors of each case, by mca and, without it, by Transformer Engine; and those of supported sinks."""
    from mca_models.megatron.factory import transformer_config

    def others(config: Any) -> list[Any]:
        return [feature for feature in active_features(config) if feature.name != "attention"]

    active_features, found = transformer_config.active_features, {}
    for each, (case, way, _) in zip(references, UNREFUSED, strict=True):
        (ours,) = compute([each], "cp2", folder, cp_comm_type=way)
        with patch.object(transformer_config, "active_features", others):
            (theirs,) = compute([each], "cp2", folder, cp_comm_type=way)
        found[case] = ours, theirs
    with patch.object(transformer_config, "active_features", others):
        compute([references[1]], "cp2", folder, cp_comm_type="a2a")
    return found


def test_what_is_refused_transformer_engine_refuses_or_computes_wrongly(tmp_path: Path) -> None:
    references = [make_reference(case, tmp_path, batch=4) for case, _, _ in UNREFUSED]
    expected = read(expected_gradients(references[1], tmp_path))
    for found in run_emulated(2, unrefused, references, tmp_path):
        for case, _, word in UNREFUSED:
            ours, theirs = found[case]
            assert (
                "set attention_backend to local" in ours
                or "set cp_comm_type to" in ours
                or "a2a cuts" in ours
            )
            assert word in theirs or "No dot product attention backend is available" in theirs, (case, theirs)
    twice = read(tmp_path / "gpt_oss-cp2")
    for name, gradient in expected.items():
        times = 2 if name.endswith("sinks") else 1
        assert (twice[name] - times * gradient).abs().max() <= TOLERANCE * max(
            float(gradient.abs().max()), 1e-3
        ), name


def log_probabilities(reference: Reference) -> list[Any]:
    """Return log-probabilities of packed rows, by local and Transformer Engine layers. Runs on every rank."""
    import torch

    from mca_models.megatron import AutoModel

    choices: list[dict[str, Any]] = [{"transformer_impl": "local"}, *({"cp_comm_type": way} for way in WAYS)]
    lengths = torch.tensor([[7], [16], [13]])
    mask = torch.arange(reference.input_ids.shape[1]) < lengths
    models = (
        AutoModel.from_pretrained(reference.path, arguments("cp2", **NO_DROPOUT, **each)) for each in choices
    )
    return [
        model.log_probs(reference.input_ids, mask=mask, packed=True, micro_batch_size=2).log_probs
        for model in models
    ]


def test_log_probabilities_equal_those_of_local_layers(tmp_path: Path) -> None:
    for local, *others in run_emulated(2, log_probabilities, make_reference("qwen3", tmp_path)):
        assert local.abs().max() > 1
        for other in others:
            assert (local - other).abs().max() <= 1e-5
