"""Log-probabilities and entropies of tokens are those of transformers' logits, for every layout of rows and ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from case_tables import LOG_PROBS
from cases import Case, as_params, group_by_ranks, needed, skip_unsupported
from harness import run_ranks
from layouts import arguments
from mca_config.errors import McaError
from mca_models.megatron.log_probs.vocabulary import TokenValues
from memory import MIB, peak
from reference import Reference, make_reference

pytestmark = pytest.mark.ranks

TEMPERATURE = 0.7
ALLOWED = {"minimax_m3_vl_text": 2e-5, "qwen3_next": 3e-5, "qwen3_5_moe_text": 6e-5}
"""Models whose logits themselves differ by 1e-5 and more from transformers' (docs/validation/parity.md), in one process
too. Of layers with a state by 2e-5: the state is summed in another order, and transformers' own logits in fp32 and fp64
differ as much. Of these logits log-probabilities are within 1e-5, as is tested."""


def expected(reference: Reference, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the reference's rows, from transformers' logits."""
    log_p = (reference.logits.double() / temperature).log_softmax(-1)
    zeros = torch.zeros(len(log_p), 1)
    chosen = log_p[:, :-1].gather(-1, reference.input_ids[:, 1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[:, :-1]
    return torch.cat([zeros, chosen], 1).float(), torch.cat([zeros, entropy], 1).float()


def compute(references: dict[Case, Reference]) -> dict[Case, str | dict[str, float]]:
    """The largest difference of each form, or the error that mca raises. Runs on every rank."""
    from mca_models.megatron import AutoModel

    found: dict[Case, str | dict[str, float]] = {}
    for case, reference in references.items():
        try:
            models = AutoModel.from_pretrained(reference.path, arguments(case.layout))
            found[case] = differences(models, reference)
        except McaError as error:
            found[case] = str(error)
    return found


def differences(models: Any, reference: Reference) -> dict[str, float]:
    ids, (plain, _) = reference.input_ids, expected(reference)
    chosen, entropy = expected(reference, TEMPERATURE)
    width = ids.shape[1]
    lengths = (width, 9, 17)  # of the three rows' first tokens
    mask = torch.zeros(3, 40, dtype=torch.bool)
    padded = torch.full((3, 40), 3)
    wanted = torch.zeros(2, 3, 40)
    for row, (length, start) in enumerate(
        zip(lengths, (16, 0, 5), strict=True)
    ):  # padded left, right, on both sides
        mask[row, start : start + length] = True
        padded[row, start : start + length] = ids[row, :length]
        wanted[0, row, start : start + length] = chosen[row, :length]
        wanted[1, row, start : start + length] = entropy[row, :length]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    in_row = torch.cat([ids[row, :length] for row, length in enumerate(lengths)])[None]
    of_row = torch.cat([plain[row, :length] for row, length in enumerate(lengths)])[None]
    both = {"temperature": TEMPERATURE, "entropy": True}
    dense = models.log_probs(padded, mask=mask, chunk_size=5, micro_batch_size=2, **both)
    packed = models.log_probs(padded, mask=mask, chunk_size=7, micro_batch_size=2, packed=True, **both)
    found = {
        "whole": (models.log_probs(ids).log_probs - plain).abs().max(),
        "dense": (torch.stack(dense) - wanted).abs().max(),
        "packed": (torch.stack(packed) - wanted).abs().max(),
        "row": (models.log_probs(in_row, cu_seqlens=ends, micro_batch_size=3).log_probs - of_row).abs().max(),
    }
    if models.rank_context.layout.vpp > 1:
        models.megatron.microbatch_group_size_per_vp_stage = 3  # more than pipeline ranks
        logits = Reference(reference.model, reference.path, ids, models.logits(ids).cpu(), reference.experts)
        of_logits, of_tokens = expected(logits)[0], models.log_probs(ids, micro_batch_size=1).log_probs
        found["groups"] = (torch.stack([of_logits, of_tokens]) - plain).abs().max()
    if reference.model in ALLOWED:
        own = Reference(reference.model, reference.path, ids, models.logits(ids).cpu(), reference.experts)
        assert (models.log_probs(ids).log_probs - expected(own)[0]).abs().max() < 1e-5
    at = models.rank_context.coordinates
    first = models.log_probs(ids[: 1 + at.dp], to="replicas")  # replicas may have other batches
    assert (first is not None) == (at.tp == at.cp == at.pp == 0)
    if first is not None:
        found["replicas"] = (first.log_probs - plain[: 1 + at.dp]).abs().max()
    assert models.training and not any("_postprocess" in vars(chunk) for chunk in models.chunks)
    return {key: float(value) for key, value in found.items()}


Computed = dict[Case, list[str | dict[str, float]]]
"""Differences that each rank found, or the error."""


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    folder, found = tmp_path_factory.mktemp("log_probs"), {}
    for num_ranks, cases in group_by_ranks(needed(request)).items():
        references = {case: make_reference(case.model, folder) for case in cases}
        ranks = run_ranks(num_ranks, compute, references, timeout=300)
        found |= {case: [rank[case] for rank in ranks] for case in cases}
    return found


DEFAULT = (
    *("qwen3-tied-cp2tp2sp", "llama-pp2vpp2", "gemma2-tp2pp2"),
    "qwen3_moe-tp2ep2etp1dp2sp",
)


@pytest.mark.cases(0, always=DEFAULT)
@pytest.mark.parametrize("case", as_params(LOG_PROBS))
def test_log_probs_and_entropies_equal_those_of_transformers(
    case: Case, computed: Computed, request: pytest.FixtureRequest
) -> None:
    for found in computed[case]:
        if isinstance(found, str):
            skip_unsupported(request, found)
        assert max(found.values()) < ALLOWED.get(case.model, 1e-5), found


def gradients(width: int, vocab: int) -> list[float]:
    """Gradients of cut logits against autograd's of whole ones. Runs on every rank."""
    from mca_config.layout import ParallelLayout
    from mca_models.megatron.distributed import parallel

    place = parallel.start(ParallelLayout(tensor_model_parallel_size=2))
    rank = place.coordinates.tp
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(4, 3, 2 * width, generator=generator) * 3
    tokens = torch.randint(0, vocab, (4, 3), generator=generator)
    weights = torch.randn(2, 4, 3, generator=generator)
    found = []
    for temperature in (1.0, 1.7):
        reference = whole[..., :vocab].clone().requires_grad_()
        log_p = (reference / temperature).log_softmax(-1)
        chosen = log_p.gather(-1, tokens[..., None]).squeeze(-1)
        values = torch.stack([chosen, -(log_p.exp() * log_p).sum(-1)])
        (values * weights).sum().backward()
        mine = whole[..., rank * width : (rank + 1) * width].clone().requires_grad_()
        both = TokenValues(temperature=temperature, entropy=True)(mine, tokens, vocab)
        (both * weights).sum().backward()
        assert mine.grad is not None and reference.grad is not None
        own = torch.nn.functional.pad(reference.grad, (0, 2 * width - vocab))[
            ..., rank * width : (rank + 1) * width
        ]
        found += [float((both - values).detach().abs().max()), float((mine.grad - own).abs().max())]
        alone = whole[..., rank * width : (rank + 1) * width].clone().requires_grad_()
        TokenValues(temperature=temperature)(alone, tokens, vocab).sum().backward()
        reference.grad = None
        (reference / temperature).log_softmax(-1).gather(-1, tokens[..., None]).sum().backward()
        assert alone.grad is not None and reference.grad is not None
        own = torch.nn.functional.pad(reference.grad, (0, 2 * width - vocab))[
            ..., rank * width : (rank + 1) * width
        ]
        found.append(float((alone.grad - own).abs().max()))
    return found


@pytest.mark.parametrize("width,vocab", [(11, 21), (16, 16)])  # a padded row; a rank with padding alone
def test_gradients_are_those_of_whole_logits(width: int, vocab: int) -> None:
    for found in run_ranks(2, gradients, width, vocab):
        assert max(found) < 2e-6


def measured(entropy: bool) -> tuple[int, int]:
    """Return the memory of a call, and the prediction for its chunk. Runs on one rank.

    Of three calls the middle one: where others compute, a look at the memory may come between its two numbers.
    """
    from mca_config.model_config import McaModelConfig
    from mca_models.megatron import AutoModel
    from mca_models.templates import config_from_hf

    document = {**_WIDE, "vocab_size": 32_000}
    config: McaModelConfig = config_from_hf(document)
    models = AutoModel.from_config(config, arguments("tp1"), dtype="bfloat16")
    ids = torch.randint(0, 32_000, (1, 512))
    models.log_probs(ids[:, :64], entropy=entropy, chunk_size=8)
    found = []
    for _ in range(3):
        with peak() as most:
            models.log_probs(ids, entropy=entropy, chunk_size=256)
        found.append(most[0])
    return sorted(found)[1], TokenValues(entropy=entropy).peak_bytes(256, 32_000, 2)


_WIDE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("entropy", [False, True])
def test_memory_is_what_the_chunk_predicts(entropy: bool) -> None:
    ((most, predicted),) = run_ranks(1, measured, entropy)
    assert most == pytest.approx(predicted, rel=0.1), (most / MIB, predicted / MIB)


def refused(path: Path) -> list[str]:
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path)
    ids, said = torch.zeros(2, 4, dtype=torch.int64), []
    for options in (
        {"mask": torch.ones(2, 4 - torch.distributed.get_rank())},  # wrong on the second replica alone
        {"cu_seqlens": torch.tensor([0, 4])},
        {"temperature": 0.0},
        {"chunk_size": 0},
        {"to": "first"},
        {"packed": torch.distributed.get_rank() == 1},
    ):
        with pytest.raises(McaError) as error:
            models.log_probs(ids, **options)
        said.append(str(error.value))
    wrong = ids - torch.distributed.get_rank()
    for compute, tokens in (
        (models.log_probs, wrong),
        (models.logits, ids + 70),
        (models.logits, ids.float()),
        (models.logits, ids[:0]),
    ):
        with pytest.raises(McaError) as error:
            compute(tokens)
        said.append(str(error.value))
    left_out = models.log_probs(wrong, mask=(wrong >= 0).int()).log_probs
    assert bool(left_out.any()) == (torch.distributed.get_rank() == 0)
    return said


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    said, other = run_ranks(2, refused, make_reference("llama", tmp_path).path)
    assert other == said
    vocabulary = (
        "expected 0 to 69, the model's vocabulary: use its tokenizer, or from_pretrained(..., vocab_size=...)"
    )
    assert said == [
        "mask has shape [2, 3]; expected [2, 4], as input_ids",
        "cu_seqlens must increase from 0 to the length of the only row of input_ids, without a mask",
        "temperature is 0.0; expected a positive number",
        "micro_batch_size and chunk_size must be at least 1",
        "to='first' is none of all, replicas",
        "log_probs: packed differs between ranks: False on rank 0, True on rank 1; give all ranks the same value",
        f"input_ids has token -1; {vocabulary}",
        f"input_ids has token 70; {vocabulary}",
        "input_ids has dtype torch.float32; expected integers, the ids of tokens",
        "input_ids has shape [0, 4]; expected [batch, seq] with tokens",
    ]
