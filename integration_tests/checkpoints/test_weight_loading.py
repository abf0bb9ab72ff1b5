"""A live model takes Hugging Face tensors in any order and in pieces: all of them, or one error on every rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_hf import save

from case_tables import WEIGHT_LOADING
from cases import Case, as_params, group_by_ranks, needed, skip_unsupported
from harness import run_ranks
from layouts import arguments
from mca_config.errors import McaError
from reference import make_reference
from weight_streams import checkpoint_of, in_disorder

pytestmark = pytest.mark.ranks

ROWS = "model.layers.0.mlp.up_proj.weight"
FLOATS = "expected float32, bfloat16, float16, float64"


def load_all(paths: dict[Case, Path]) -> dict[Case, str | None]:
    """Load each checkpoint's tensors over other weights, and compare the shards. Runs on every rank.

    Returns:
        The error that mca raises where a model does not support a layout.
    """
    from mca_models.megatron import AutoModel

    found: dict[Case, str | None] = {}
    for case, path in paths.items():
        try:
            models = AutoModel.from_pretrained(path, arguments(case.layout))
        except McaError as error:
            found[case] = str(error)
            continue
        before = [tensor.clone() for _, tensor in models.local_params()]
        with torch.no_grad():
            for _, tensor in models.local_params():
                tensor.fill_(7.0)
        models.load_weights(in_disorder(load_file(path / "model.safetensors")))
        for (item, tensor), wanted in zip(models.local_params(), before, strict=True):
            assert torch.equal(tensor, wanted), (case.id, item.live)
        found[case] = None
    return found


@pytest.fixture(scope="module")
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, str | None]:
    folder, found = tmp_path_factory.mktemp("loaded"), {}
    paths = {model: checkpoint_of(model, folder) for model in {case.model for case in needed(request)}}
    for num_ranks, cases in group_by_ranks(needed(request)).items():
        found |= run_ranks(
            num_ranks, load_all, {case: paths[case.model] for case in cases}, timeout=300 + 5 * len(cases)
        )[0]
    return found


DEFAULT = (
    *("qwen3-tied-tp2pp2vpp2sp", "qwen3_moe-tp2ep2etp1dp2sp", "gpt_oss-ep2pp2"),
    *("deepseek_v3-tp2pp2sp", "qwen3_next-tp2pp2sp", "qwen3_vl-tp2pp2vpp2sp"),
)


@pytest.mark.cases(0, always=DEFAULT)
@pytest.mark.parametrize("case", as_params(WEIGHT_LOADING))
def test_any_order_and_split_of_tensors_gives_the_same_weights(
    case: Case, loaded: dict[Case, str | None], request: pytest.FixtureRequest
) -> None:
    if (error := loaded[case]) is not None:
        skip_unsupported(request, error)


def load_fp8(pairs: list[tuple[Path, str]]) -> None:
    """Loads what was exported as fp8, compared with the same numbers in bf16. Runs on every rank."""
    from mca_models.megatron import AutoModel

    for path, layout in pairs:
        models = AutoModel.from_pretrained(path, arguments(layout))
        stream = dict(models.export_weights(fp8=True))
        scaled = {name.removesuffix("_scale_inv") for name in stream if name.endswith("_scale_inv")}
        assert any(stream[f"{name}_scale_inv"].numel() > 4 for name in scaled)
        plain = {name: tensor for name, tensor in stream.items() if not name.endswith("_scale_inv")}
        for name in scaled:
            scales = stream[f"{name}_scale_inv"].repeat_interleave(128, -1).repeat_interleave(128, -2)
            rows, columns = plain[name].shape[-2:]
            plain[name] = (plain[name].float() * scales[..., :rows, :columns]).bfloat16()
        found = []
        for weights in (plain, stream):
            with torch.no_grad():
                for _, tensor in models.local_params():
                    tensor.fill_(7.0)
            models.load_weights(in_disorder(weights))
            found.append([tensor.clone() for _, tensor in models.local_params()])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_fp8_is_taken_with_its_scales(tmp_path: Path) -> None:
    pairs = [("deepseek_v3", "tp2pp2sp"), ("granitemoe", "ep2pp2dp2")]
    sizes = {"hidden_size": 320, "intermediate_size": 272, "num_hidden_layers": 2}
    made = [(save(case, tmp_path / case, "bfloat16", **sizes), layout) for case, layout in pairs]
    run_ranks(4, load_fp8, made)


def spoil(path: Path) -> dict[str, str]:
    """Return the error of each kind of wrong weights. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments("tp2"))
    tensors = load_file(path / "model.safetensors")
    embedding, norm, rank = (
        tensors["model.embed_tokens.weight"],
        "model.norm.weight",
        torch.distributed.get_rank(),
    )

    eighths, scales = tensors[ROWS].to(torch.float8_e4m3fn), torch.ones(1, 1)

    def failing() -> Iterator[Any]:
        yield from list(tensors.items())[: 3 if rank else None]
        if rank:
            raise ConnectionError("the sender is gone")

    said = {}
    for key, weights in {
        "missing": {name: t for name, t in tensors.items() if name != norm}.items(),
        "unexpected": [*tensors.items(), ("model.layers.9.mlp.up_proj.weight", embedding)],
        "shape": {**tensors, norm: embedding}.items(),
        "twice": [*tensors.items(), (norm, tensors[norm])],
        "rows missing": [*((n, t) for n, t in tensors.items() if n != ROWS), (ROWS, tensors[ROWS][:4], 0)],
        "rows that overlap": [
            *((n, t) for n, t in tensors.items() if n != ROWS),
            *((ROWS, tensors[ROWS][start : start + 24], start) for start in (0, 12)),
        ],
        "rows beyond": [*((n, t) for n, t in tensors.items() if n != ROWS), (ROWS, tensors[ROWS], 1)],
        "fp8 alone": {**tensors, ROWS: eighths}.items(),
        "scales alone": [*tensors.items(), (f"{ROWS}_scale_inv", scales)],
        "scales of another": {**tensors, ROWS: eighths, f"{ROWS}_scale_inv": embedding}.items(),
        "scales of a norm": [*tensors.items(), (f"{norm}_scale_inv", scales)],
        "integers": {**tensors, ROWS: tensors[ROWS].int(), norm: tensors[norm].bool()}.items(),
        "integer scales": {**tensors, ROWS: eighths, f"{ROWS}_scale_inv": scales.to(torch.uint8)}.items(),
        "tied": [*tensors.items(), ("lm_head.weight", embedding)],
        "tied otherwise": [("lm_head.weight", embedding + 1), *tensors.items()],
        "a rank": failing(),
    }.items():
        try:
            models.load_weights(weights)
        except McaError as error:
            said[key] = str(error)
    return said


def test_wrong_weights_are_all_reported_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, spoil, make_reference("qwen3-tied", tmp_path).path)
    rank, weights, norm = "rank {} could not load the weights: ", "the weights: ", "model.norm.weight"
    assert first == second
    assert {key: text.removeprefix(rank.format(0)).removeprefix(weights) for key, text in first.items()} == {
        "missing": "1 missing tensor (model.norm.weight)",
        "unexpected": "1 unexpected tensor (model.layers.9.mlp.up_proj.weight)",
        "shape": "model.norm.weight has shape [70, 32], expected [32]",
        "twice": "model.norm.weight came twice",
        "rows missing": f"1 missing tensor ({ROWS})",
        "rows that overlap": f"2 problems\n  {ROWS} came twice\n  1 missing tensor ({ROWS})",
        "rows beyond": f"{ROWS} has shape [48, 32] from row 1 on, expected [48, 32]",
        "fp8 alone": f"{ROWS} is fp8, and {ROWS}_scale_inv is missing or incomplete",
        "scales alone": f"{ROWS}_scale_inv came, but no {ROWS} in fp8",
        "scales of another": f"2 problems\n  {ROWS}_scale_inv has shape [70, 32], expected [1, 1]"
        f"\n  {ROWS} is fp8, and {ROWS}_scale_inv is missing or incomplete",
        "scales of a norm": "model.norm.weight_scale_inv has shape [1, 1]; expected a plain [32]",
        "integers": f"2 problems\n  {ROWS} has dtype int32, {FLOATS}\n  {norm} has dtype bool, {FLOATS}",
        "integer scales": f"2 problems\n  {ROWS}_scale_inv has dtype uint8, {FLOATS}"
        f"\n  {ROWS} is fp8, and {ROWS}_scale_inv is missing or incomplete",
        "tied otherwise": "model.embed_tokens.weight differs from the tensor that it is tied to",
        "a rank": rank.format(1) + "ConnectionError: the sender is gone",
    }


def overflowing(path: Path) -> list[str]:
    """Return the error about 70000 that is cast to fp16. Runs on one rank."""
    import peft

    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    said: list[str] = []

    def refused(act: Callable[[], object]) -> None:
        with pytest.raises(McaError) as error:
            act()
        said.append(str(error.value))

    wide = AutoModel.from_pretrained(path, arguments("tp1"))
    tensors = dict(wide.export_weights())
    tensors[ROWS][3, 5] = 70000.0
    wide.load_weights(tensors.items())
    assert len(list(wide.export_weights(dtype="bfloat16"))) == len(tensors)
    refused(lambda: list(wide.export_weights(dtype="float16")))
    wide.save_pretrained_as_hf(path / "large")
    for rows in (None, 80):
        refused(lambda rows=rows: AutoModel.from_pretrained(path / "large", dtype="float16", vocab_size=rows))
    narrow = AutoModel.from_pretrained(path, dtype="float16")
    refused(lambda: narrow.load_weights(tensors.items()))
    narrow.load_weights({**tensors, ROWS: torch.full_like(tensors[ROWS], torch.inf)}.items())
    narrow.load_weights(dict(AutoModel.from_pretrained(path).export_weights()).items())
    models = get_peft_model(narrow, peft.LoraConfig(r=2, lora_alpha=2, target_modules=["o_proj"]))
    for _, factor in models.adapter_parameters():
        factor.data.fill_(200.0)
    refused(models.merge_adapter)
    assert not models.merged
    models.load_weights([(name, x.float() * 0) for name, x in models.export_weights()])
    refused(lambda: models.load_weights([(name, x.float() + 70000) for name, x in models.export_weights()]))
    return said


def test_weights_that_overflow_fp16_are_named(tmp_path: Path) -> None:
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    reported = [
        text.partition("tensor ")[2]
        for text in run_ranks(1, overflowing, make_reference("qwen3-tied", tmp_path).path)[0]
    ]
    names, reasons = zip(*(text.split(": ", 1) for text in reported), strict=True)
    assert names[:4] == (fc1, fc1, fc1, ROWS)
    assert names[4] == "decoder.layers.0.self_attention.linear_proj.weight"
    assert ".lora_" in names[5]
    assert all(
        "overflows fp16, whose largest value is 65504; use bf16 or fp32" in reason for reason in reasons
    )
