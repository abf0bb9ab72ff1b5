"""Checkpoints that Megatron's own dist_checkpointing saved are read back without torch, bit for bit."""

import itertools
import multiprocessing.dummy
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import tiny_hf
import tiny_vision
import torch
import transformers
from compare import assert_same
from safetensors.torch import load_file

from cases import Case, as_params, needed
from harness import run_ranks
from layouts import arguments
from mca_config.errors import McaError
from mca_models.checkpoint.mca_directory import McaSource
from mca_models.megatron.distributed.collectives import all_gather
from mca_models.storage.lazy_tensor import Block, StridedTensor
from mca_models.storage.source import read_shard
from mca_models.templates import config_from_hf
from mca_models.templates.classification_head import Head, with_head
from mca_models.torch_checkpoint.torch_dist import TensorEntry, _Reader, open_torch_dist

pytestmark = pytest.mark.ranks

METADATA: dict[str, dict[str, bool]] = {
    "homogeneous": {},
    "by_layer": {"non_homogeneous_layers": True},
    "singleton": {"singleton_local_shards": True},
}
CASES = (
    Case("llama", "tp2", ("homogeneous",)),
    Case("llama", "tp2", ("singleton",)),
    Case("llama", "tp4", ("homogeneous",)),  # 70 rows of vocabulary become 72
    Case("llama-tied", "pp2", ("homogeneous",)),
    Case("qwen2", "pp2vpp2", ("by_layer",)),
    Case("qwen3-tied", "tp2pp2vpp2", ("homogeneous",)),
    Case("mixtral", "ep2", ("homogeneous",)),
    Case("qwen2_moe", "tp2", ("by_layer",)),
    Case("qwen2_moe", "tp2ep2", ("singleton",)),
    Case("qwen3_moe", "tp2ep2", ("homogeneous",)),
    Case("qwen3_moe", "pp2ep2", ("singleton",)),
    Case("glm4_moe", "pp2", ("homogeneous",)),
    Case("deepseek_v3", "tp2sp", ("homogeneous",)),
    Case("deepseek_v3", "pp2ep2", ("singleton",)),
    Case("deepseek_v2-no-q-lora", "tp2sp", ("by_layer",)),
    Case("qwen3_next", "tp2", ("homogeneous",)),
    Case("qwen3_5_moe_text", "pp2", ("singleton",)),
    Case("gpt_oss", "ep2", ("singleton",)),
    Case("gpt_oss", "tp2ep2etp1", ("by_layer",)),
    Case("gemma3_text", "tp2", ("homogeneous",)),
    Case("olmo2", "pp2", ("homogeneous",)),
    Case("olmoe", "ep2", ("homogeneous",)),
    Case("phi3", "tp2", ("singleton",)),
    Case("granite", "pp2", ("by_layer",)),
    Case("smollm3", "tp2", ("homogeneous",)),
    Case("exaone4", "pp2", ("homogeneous",)),
)


def _optimizer_state(group: Any) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    replica = torch.distributed.get_rank()
    key = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
    return ShardedTensor.from_rank_offsets(key, torch.ones(3), replica_id=replica)


def _save(models: Any, folder: Path, metadata: dict[str, bool]) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = {
        f"model{number}": chunk.sharded_state_dict(metadata={**metadata, "dp_cp_group": group})
        for number, chunk in enumerate(models.chunks)
    }
    state |= {"optimizer": _optimizer_state(group), "iteration": 5, "args": {"note": "common"}}
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    threads = SimpleNamespace(get_context=lambda method: multiprocessing.dummy)  # megatron-core 0.16 forks
    with patch.object(filesystem_async, "mp", threads, create=True):
        dist_checkpointing.save(state, str(folder))


def save_cases(sources: dict[str, Path], folder: Path, cases: list[Case]) -> dict[Case, str]:
    """Loads and saves every case; the tracebacks of those that fail. Runs on every rank."""
    from mca_models.megatron import AutoModel

    failures = {}
    for case in cases:
        try:
            models = AutoModel.from_pretrained(sources[case.model], arguments(case.layout))
            _save(models, folder / case.id, METADATA[case.options[0]])
        except Exception:  # the other cases can go on: all ranks fail alike
            failures[case] = traceback.format_exc()
    return failures


def save_prediction(source: Path, folder: Path) -> None:
    """Saves a model with an MTP layer in both formats. Runs on every rank."""
    from mca_models.megatron import AutoModel

    config = config_from_hf(tiny_hf.read_config(source)).replace_fields(mtp_num_layers=1)
    models = AutoModel.from_config(config, arguments("pp2"))
    models.save_pretrained(folder / "mca")
    _save(models, folder / "prediction", {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch_dist")


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, folder: Path) -> Any:
    """Return the directory of a saved case; one fork saves all cases with the same number of ranks."""
    wanted = list(dict.fromkeys([CASES[0], *needed(request)]))
    models = {"deepseek_v3", *(case.model for case in wanted)}
    sources = {model: tiny_hf.save(model, folder / model, "bfloat16") for model in models}

    @cache
    def of_world(size: int) -> list[dict[Case, str]]:
        cases = [case for case in wanted if case.num_ranks == size]
        return run_ranks(size, save_cases, sources, folder, cases, timeout=200)

    def of(case: Case) -> Path:
        for failures in of_world(case.num_ranks):
            assert case not in failures, failures[case]
        return folder / case.id

    return of


@pytest.mark.cases(
    0,
    always=[
        # each form of metadata, each axis on two ranks, and projections that Megatron stores in parts
        *("llama-tp2-homogeneous", "qwen2-pp2vpp2-by_layer"),
        *("qwen3_moe-tp2ep2-homogeneous", "deepseek_v3-tp2sp-homogeneous"),
        *("qwen3_next-tp2-homogeneous", "gpt_oss-ep2-singleton", "phi3-tp2-singleton"),
    ],
)
@pytest.mark.parametrize("case", as_params(CASES))
def test_every_tensor_is_recovered(case: Case, saved: Any, folder: Path) -> None:
    directory: Path = saved(case)
    source = open_torch_dist(directory, config_from_hf(tiny_hf.read_config(folder / case.model)))
    source.check_duplicates()
    assert_same(source, load_file(folder / case.model / "model.safetensors"))


def test_the_configuration_is_found_next_to_the_iterations(saved: Any, folder: Path) -> None:
    directory: Path = saved(CASES[0])
    root = folder / "megatron"
    root.mkdir()
    directory.rename(root / "iter_0000005")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(McaError, match="does not say what model it holds"):
        open_torch_dist(root)
    (root / "config.json").write_text((folder / CASES[0].model / "config.json").read_text())
    assert_same(open_torch_dist(root), load_file(folder / CASES[0].model / "model.safetensors"))
    (root / "iter_0000005").rename(directory)


def test_prediction_layers_are_recovered(saved: Any, folder: Path) -> None:
    saved(CASES[0])
    run_ranks(2, save_prediction, folder / "deepseek_v3", folder / "mtp")
    expected = McaSource(folder / "mtp/mca")
    source = open_torch_dist(folder / "mtp/prediction", expected.config)
    names = [param.mca_name() for param in source.params]
    assert names == [param.mca_name() for param in expected.params]
    assert any(name.startswith("mtp.layers.0.transformer_layer.mlp.experts.") for name in names)
    for param in source.params:
        (piece,) = source.read(param, 1)
        assert piece.tobytes() == read_shard(expected, param).tobytes(), param.mca_name()


HEADS = {
    "llama-score": Head(kind="sequence_classification", labels=("no", "maybe", "yes")),
    "llama-value": Head(kind="token_classification", labels=("value",)),
}
PREDICTION = {f"{case}-prediction": case for case in ("deepseek_v3", "glm4_moe", "qwen3_next")}
EVERY_MODEL = (*tiny_hf.ALL, *tiny_vision.CASES, *HEADS, *PREDICTION)
SPECIAL_MODELS = (
    *("apertus", "bailing_hybrid", "deepseek_v32", "falcon_h1", "gemma4_text-e2b", "gpt_oss", "kimi_linear"),
    *("jamba", "longcat_flash", "mimo_v2_flash", "minimax_m3_vl_text", "nemotron_h", "olmo2", "qwen3_next"),
    *("qwen3_vl", "llama-score", "deepseek_v3-prediction"),
)


class Unwritten:
    """A directory that would hold the states of all ranks: of every tensor its name, shape and place, and no bytes."""

    def __init__(self, states: list[list[Any]]) -> None:
        self.path = Path("unwritten")
        self.tensors: dict[str, TensorEntry] = {}
        self._blocks: dict[str, list[Block]] = {}
        for key, whole, size, offset in itertools.chain(*states):
            strides = torch.empty(size, device="meta").stride()
            stored = StridedTensor(key, "F32", size, strides, 0, self.path)
            self.tensors[key] = TensorEntry(key, "F32", whole, {})
            self._blocks.setdefault(key, []).append(Block(offset, stored))

    def chunks(self, names: Iterable[str]) -> Iterator[tuple[str, list[Block]]]:
        return ((name, self._blocks[name]) for name in names)


def written(state: Any) -> Iterator[Any]:
    """Name, whole shape, size and offset of every tensor that this rank, not one with a copy of it, would write."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(state, ShardedTensorFactory):
        state = state.build()
    if isinstance(state, ShardedTensor) and not any(state.replica_id):
        size = (1,) * state.prepend_axis_num + tuple(state.local_shape)
        yield state.key, tuple(state.global_shape), size, tuple(state.global_offset)
    elif isinstance(state, (dict, list)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from written(value)


def config_of(case: str) -> Any:
    if case in tiny_vision.CASES:
        described = tiny_vision.described(case)
        return config_from_hf(transformers.AutoConfig.for_model(**described).to_dict())
    kind, different = tiny_hf.ALL[PREDICTION.get(case, "llama" if case in HEADS else case)]
    described = transformers.AutoConfig.for_model(kind, **{**tiny_hf.SIZE, **different}).to_dict()
    config = config_from_hf(described).replace_fields(mtp_num_layers=int(case in PREDICTION))
    return with_head(config, HEADS[case]) if case in HEADS else config


def unreadable(configs: dict[str, Any]) -> dict[str, str]:
    """Return the models whose ``torch_dist`` checkpoint cannot be read again, with the error; each rank reads some."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.state.torch_dist import model_state

    failures = {}
    for number, (case, config) in enumerate(configs.items()):
        models = AutoModel.unfilled(config, arguments("tp2ep2etp1" if config.num_experts else "tp2sp"))
        states = all_gather(list(written(model_state(models))))
        if number % 2 != torch.distributed.get_rank():
            continue
        directory: Any = Unwritten(states)
        try:
            _Reader(directory, models.config).source(directory.path)
        except McaError as error:
            failures[case] = str(error)
    return failures


OTHER_MODELS = [model for model in EVERY_MODEL if model not in SPECIAL_MODELS]


@pytest.mark.cases(0, always=["special"])
@pytest.mark.parametrize("models", [SPECIAL_MODELS, OTHER_MODELS], ids=["special", "others"])
def test_what_any_family_would_write_can_be_read(models: Sequence[str]) -> None:
    configs = {model: config_of(model) for model in models}  # once, with what transformers imports for it
    assert run_ranks(2, unreadable, configs) == [{}, {}]
