"""Adapters on live models beyond one training run: layouts, trainer, merging, dropout, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import train_cases
from harness import run_in_turn, run_ranks
from layouts import arguments, world_size
from lora_training import gradients_of, tokens, train_megatron
from mca_config.errors import McaError
from mca_convert import convert
from reference import make_reference

pytestmark = pytest.mark.ranks

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


SHORT = {"num_hidden_layers": 2}


def lora(**settings: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ATTENTION, **settings}


def new_adapter(base: Path, layout: str, settings: dict[str, Any], saved: Path, train: bool) -> torch.Tensor:
    """Makes, perhaps trains, and saves an adapter. Runs on every rank."""
    import peft

    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    models = get_peft_model(AutoModel.from_pretrained(base, arguments(layout)), peft.LoraConfig(**settings))
    if train:
        train_megatron(models)
    models.save_pretrained(saved / "mca")
    models.save_pretrained_as_hf(saved / "peft")
    return models.logits(tokens())


def load(base: Path, layout: str, adapter: Path) -> torch.Tensor:
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    return load_adapter(AutoModel.from_pretrained(base, arguments(layout)), adapter).logits(tokens())


@pytest.mark.cases(0, always=["False"])
@pytest.mark.parametrize("start", [True, False, "gaussian"])
def test_a_new_adapter_is_the_same_on_every_layout(start: bool | str, tmp_path: Path) -> None:
    base = make_reference("llama-one-group", tmp_path, **SHORT).path
    settings = lora(target_modules=ATTENTION + MLP, init_lora_weights=start)
    files = []
    for layout in ("tp1", "tp2pp2sp"):
        folder = tmp_path / layout
        logits = run_ranks(world_size(layout), new_adapter, base, layout, settings, folder, False)[0]
        files.append(load_file(folder / "peft" / "adapter_model.safetensors"))
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    (zeros,) = {bool((x == 0).all()) for name, x in files[0].items() if ".lora_B." in name}
    assert zeros == (start is not False)
    if zeros:  # nothing has changed yet
        expected = run_ranks(1, plain, base)[0]
        assert float((logits - expected).abs().max()) < 1e-4


def plain(base: Path) -> torch.Tensor:
    from mca_models.megatron import AutoModel

    return AutoModel.from_pretrained(base).logits(tokens())


@pytest.mark.cases(0, always=["tp2ep2etp2sp"])
@pytest.mark.parametrize("one", ["tp2ep2etp2sp", "pp2ep2"])
def test_adapters_of_single_experts_train_alike_and_load_on_other_layouts(one: str, tmp_path: Path) -> None:
    """The projections of every expert are separate modules, which transformers 5 no longer has."""
    base = make_reference("qwen3_moe", tmp_path, **SHORT).path
    settings = lora(target_modules=["q_proj", *MLP])
    alone = run_ranks(1, new_adapter, base, "tp1", settings, tmp_path / "tp1", True)[0]
    ours = run_ranks(world_size(one), new_adapter, base, one, settings, tmp_path / one, True)
    assert max(float((logits - alone).abs().max()) for logits in ours) < 5e-4
    on_two = run_in_turn(
        2, *(partial(load, base, layout, tmp_path / one / "mca") for layout in ("ep2", "pp2"))
    )
    on_one = run_ranks(1, load, base, "tp1", tmp_path / one / "peft")
    for logits in (*on_two[0], *on_two[1], *on_one):
        assert float((logits - ours[0]).abs().max()) < 1e-4


def merged_files(base: Path, layout: str, adapter: Path, target: Path) -> None:
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter

    models = load_adapter(AutoModel.from_pretrained(base, arguments(layout)), adapter)
    models.save_merged_as_hf(target / "hf")
    models.save_merged(target / "mca")
    assert not models.merged


@pytest.mark.cases(0, always=["qwen3_moe-tp2ep2etp1sp"])
@pytest.mark.parametrize(("case", "layout"), [("qwen2", "tp2pp2"), ("qwen3_moe", "tp2ep2etp1sp")])
def test_live_merging_equals_the_converters(case: str, layout: str, tmp_path: Path) -> None:
    from mca_models.checkpoint_kinds import open_checkpoint

    base = make_reference(case, tmp_path, "bfloat16", **SHORT).path
    run_ranks(1, new_adapter, base, "tp1", lora(target_modules=ATTENTION + MLP), tmp_path, False)
    run_ranks(world_size(layout), merged_files, base, layout, tmp_path / "mca", tmp_path / "live")
    convert(base, tmp_path / "files", adapter_path=tmp_path / "mca", merge=True)
    live, files = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "live" / "hf", tmp_path / "files")
    )
    assert live.keys() == files.keys()
    for name, tensor in files.items():
        torch.testing.assert_close(live[name], tensor, atol=0, rtol=2**-7)  # one place of bfloat16
    differing = sum(int((live[name] != tensor).sum()) for name, tensor in files.items())
    assert differing <= sum(tensor.numel() for tensor in files.values()) // 1000
    assert open_checkpoint(tmp_path / "live" / "mca").config.dtype == "bfloat16"


def merged_on_one_stage(base: Path, target: Path) -> list[Any]:
    """Merge an adapter of the first layer, save the merged model and undo it. Runs on both stages."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    settings = {"peft_type": "LORA", **lora(layers_to_transform=[0])}
    models = get_peft_model(AutoModel.from_pretrained(base, arguments("pp2")), settings)
    models.save_merged(target)
    merged = AutoModel.from_pretrained(target, arguments("pp2")).logits(tokens())
    models.merge_adapter()
    facts = [models.merged, len(models._attached), torch.equal(models.logits(tokens()), merged)]
    with pytest.raises(McaError, match="call unmerge_adapter first"), models.disable_adapter():
        pass
    models.unmerge_adapter()
    return [*facts, models.merged]


def test_stages_without_an_adapter_merge_and_save_too(tmp_path: Path) -> None:
    base = make_reference("llama", tmp_path, **SHORT).path
    first, last = run_ranks(2, merged_on_one_stage, base, tmp_path / "merged", timeout=60)
    assert first == [True, 2, True, False]
    assert last == [True, 0, True, False]


def trained_by_trainer(checkpoint: Path, out: Path, changes: dict[str, Any]) -> dict[str, list[float]]:
    import peft

    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model
    from mca_train import McaTrainer

    args = train_cases.arguments(out, max_steps=3, **({"gradient_accumulation_steps": 4} | changes))
    settings = lora(target_modules=ATTENTION + MLP, rank_pattern={"v_proj": 2}, modules_to_save=["lm_head"])
    models = get_peft_model(AutoModel.from_pretrained(checkpoint, args), peft.LoraConfig(**settings))
    data = train_cases.samples(10)  # 4 a step, and a short step in the epoch
    trainer = train_cases.quietly(lambda: McaTrainer(model=models, args=args, train_dataset=data))
    train_cases.quietly(trainer.train)
    return {key: train_cases.history(trainer, key) for key in ("loss", "grad_norm")}


TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP = TP | {"sequence_parallel": True}
ZERO = {"use_distributed_optimizer": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sp-dp2": (4, {**SP, **ZERO, "gradient_accumulation_steps": 2}),
    "pp2-recompute": (2, PP | RECOMPUTE),
    "pp2-dp2-overlap": (4, {**PP, **ZERO, **OVERLAP, "gradient_accumulation_steps": 2}),
    "tp2-sp-cp2": (4, SP | {"context_parallel_size": 2}),
    "tp2-pp2": (4, TP | PP),
    "pp2-vpp2": (2, PP | {"virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, every_case: bool) -> tuple[Path, dict[str, list[float]]]:
    """A checkpoint, and what one rank logs."""
    folder = tmp_path_factory.mktemp("single")
    checkpoint = train_cases.tiny_checkpoint(folder / "base", num_hidden_layers=4 if every_case else 2)
    return checkpoint, run_ranks(1, trained_by_trainer, checkpoint, folder / "run", {})[0]


@pytest.mark.cases(0, always=["tp2-sp-dp2", "pp2-recompute"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_trainer_trains_adapters_alike_on_every_layout(
    name: str, single: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    (checkpoint, right), (num_ranks, changes) = single, LAYOUTS[name]
    found = run_ranks(num_ranks, trained_by_trainer, checkpoint, tmp_path, changes, timeout=200)[0]
    for key, values in right.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key


def optimizer_round_trip(base: Path, layout: str, folder: Path) -> list[str]:
    """Saves and loads the chunks' tensors by Megatron's distributed checkpoint; the factors' names in it."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import FileSystemReader

    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    models = get_peft_model(
        AutoModel.from_pretrained(base, arguments(layout)),
        {
            **lora(),
            "target_modules": ["v_proj", *MLP],
            "layers_to_transform": [1, 2],
            "rank_pattern": {"up_proj": 2},
        },
    )
    before = {name: tensor.detach().clone() for name, tensor in models.adapter_parameters()}
    if models.rank_context.rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(_sharded(models), str(folder))
    with torch.no_grad():
        for _, tensor in models.adapter_parameters():
            tensor.zero_()
    loaded = dist_checkpointing.load(_sharded(models), str(folder))
    for number, chunk in enumerate(models.chunks):
        state = {name: x for name, x in loaded[f"model{number}"].items() if isinstance(x, torch.Tensor)}
        chunk.load_state_dict(state, strict=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in models.adapter_parameters())
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    return sorted(name for name in names if ".lora_" in name)


def _sharded(models: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(models.chunks)}


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
@pytest.mark.cases(0, always=["tp2ep2etp1sp"])
@pytest.mark.parametrize("layout", ["tp1", "tp2ep2etp1sp", "pp2ep2"])
def test_distributed_checkpoints_hold_factors_under_canonical_names(layout: str, tmp_path: Path) -> None:
    base = make_reference("qwen3_moe", tmp_path).path
    names = run_ranks(world_size(layout), optimizer_round_trip, base, layout, tmp_path / "dist")[0]
    assert len(names) == 2 * (2 + 2 * 4 * 3)
    assert "decoder.layers.1.self_attention.linear_qkv.lora_B.v_proj.weight" in names
    assert "decoder.layers.2.mlp.experts.linear_fc1.lora_A.up_proj.weight3" in names


def with_dropout(base: Path, layout: str) -> Any:
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    settings = lora(target_modules=ATTENTION + MLP, lora_dropout=0.3)
    return get_peft_model(AutoModel.from_pretrained(base, arguments(layout)), settings)


def evaluated_with_dropout(base: Path, layout: str) -> torch.Tensor:
    logits: torch.Tensor = with_dropout(base, layout).logits(tokens())
    return logits


def trained_with_dropout(base: Path, layout: str) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """The logits before training, and after it the factors that are replicas on every rank."""
    models = with_dropout(base, layout)
    logits = models.logits(tokens())
    train_megatron(models)
    mine = {
        name: tensor.detach().clone()
        for (param, tensor), (name, _) in zip(models._live(), models.adapter_parameters(), strict=True)
        if param.shard.axis is None
    }
    everyone: list[Any] = [None] * models.rank_context.world_size
    torch.distributed.all_gather_object(everyone, mine)
    return logits, everyone


@pytest.mark.cases(0, always=["tp2sp"])
@pytest.mark.parametrize("layout", ["tp2", "tp2sp"])
def test_dropout_keeps_replicas_equal_and_is_off_in_evaluation(layout: str, tmp_path: Path) -> None:
    base = make_reference("qwen2", tmp_path, **SHORT).path
    (alone,) = run_ranks(1, evaluated_with_dropout, base, "tp1")
    logits, replicas = run_ranks(2, trained_with_dropout, base, layout)[0]
    assert float((logits - alone).abs().max()) < 1e-4
    assert replicas[0]
    assert all(torch.equal(tensor, replicas[1][name]) for name, tensor in replicas[0].items())


def of_dropped(base: Path, layout: str) -> dict[str, list[torch.Tensor]]:
    """The factors' gradients from the same random states: of whole passes, and of what is computed again."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.log_probs.chunks import ChunkedOutput
    from mca_models.megatron.peft import get_peft_model
    from mca_train.engine.rng import preserved_rng

    args = arguments(layout, attention_dropout=0.3, hidden_dropout=0.3)
    settings = lora(target_modules=[*ATTENTION, *MLP, "lm_head"], lora_dropout=0.3)
    models = get_peft_model(AutoModel.from_pretrained(base, args), settings)
    (chunk,) = models.chunks

    def gradients() -> list[torch.Tensor]:
        for _, factor in models.adapter_parameters():
            del factor.main_grad
        with preserved_rng():
            gradients_of(models)
        return [factor.main_grad.clone() for _, factor in models.adapter_parameters()]

    models.train()
    gradients_of(models)
    found = {"whole": gradients()}
    models.megatron.recompute_granularity = "full"
    models.megatron.recompute_method, models.megatron.recompute_num_layers = "uniform", 1
    found["recomputed"] = gradients()
    models.megatron.recompute_granularity = None
    chunk._postprocess = ChunkedOutput(chunk, 1000, chunk.compute_language_model_loss)
    return found | {"in one chunk": gradients()}


@pytest.mark.qualify
@pytest.mark.parametrize("layout", ["tp1", "tp2sp"])
def test_what_is_computed_again_drops_the_same(layout: str, tmp_path: Path) -> None:
    base = make_reference("qwen2", tmp_path).path
    for found in run_ranks(world_size(layout), of_dropped, base, layout):
        for way in ("recomputed", "in one chunk"):
            for again, whole in zip(found[way], found["whole"], strict=True):
                torch.testing.assert_close(again, whole, msg=way)  # fp32 sums in another order


def refused(base: Path, layout: str, changes: list[dict[str, Any]]) -> list[str]:
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import attach, get_peft_model

    models = AutoModel.from_pretrained(base, arguments(layout))
    plain, messages, hang, good = models.logits(tokens()), [], attach._attach_linear, iter([True])

    def hang_one(owner: Any, placed: Any) -> Any:
        return hang(owner, placed) if next(good, False) else 1 / 0

    with patch.object(attach, "_attach_linear", hang_one), pytest.raises(ZeroDivisionError):
        get_peft_model(models, lora())
    assert torch.equal(models.logits(tokens()), plain)  # nothing is left of it
    for settings in changes:
        try:
            get_peft_model(models, {**lora(), **settings})
        except McaError as error:
            messages.append(str(error))
    peft = get_peft_model(models, lora())
    for call in (
        lambda: get_peft_model(peft, lora()),
        lambda: get_peft_model(models, lora()),
        lambda: models.logits(tokens()),
        lambda: models.log_probs(tokens()),
        lambda: models.train_parts(["language"]),
        lambda: models.save_pretrained(base.with_name("refused"), ckpt_format="torch_dist"),
        lambda: peft.train_parts(["language"]),
    ):
        with pytest.raises(McaError) as reported:
            call()
        messages.append(str(reported.value))
    assert not base.with_name("refused").exists()
    with peft.disable_adapter():
        assert torch.equal(peft.logits(tokens()), plain)
    peft.merge_and_unload()
    assert not torch.equal(models.logits(tokens()), plain)  # usable again, the adapter in its weights
    saving = get_peft_model(models, lora(modules_to_save=["model.norm"]))
    with pytest.raises(McaError) as reported, saving.disable_adapter():
        pass
    return [*messages, str(reported.value)]


def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path) -> None:
    base = make_reference("qwen3-tied", tmp_path).path
    changes: list[dict[str, Any]] = [
        {"use_dora": True},
        {"init_lora_weights": "eva"},
        {"target_modules": ["c_attn"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ]
    messages = run_ranks(1, refused, base, "tp1", changes)[0]
    for message, expected in zip(
        messages,
        ("use_dora", "init_lora_weights 'eva'", "matches no linear", "is tied to the output layer", "lm_head cannot",
         "has an adapter already", "has an adapter already", *(["this model has an adapter;"] * 4),
         "which alone is trained", "disable_adapter is not supported with modules_to_save"),
        strict=True,
    ):  # fmt: skip
        assert expected in message


def targets_none(base: Path) -> tuple[list[str], list[bool]]:
    import peft

    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model
    from mca_models.megatron.peft.attach import Attached

    models = get_peft_model(AutoModel.from_pretrained(base, arguments("tp1")), peft.LoraConfig(r=2))
    trained = {id(p) for p in models.parameters() if p.requires_grad}
    live = {id(tensor) for _, tensor in models.adapter_parameters()}
    before, doubled = [item.base.clone() for item in models._attached], iter([lambda item: 2 * item.base])
    with patch.object(Attached, "folded", lambda item: next(doubled)(item)), pytest.raises(StopIteration):
        models.merge_adapter()
    kept = not models.merged and all(map(torch.equal, before, (item.base for item in models._attached)))
    plain = models.merge_and_unload()
    names = [name for name, _ in plain.named_parameters() if "lora" in name]
    return names, [
        trained == live,
        kept,
        all(p.requires_grad for p in plain.parameters()),
        type(plain) is not type(models),
    ]


def test_only_the_adapter_is_trained_and_unloading_leaves_nothing(tmp_path: Path) -> None:
    names, facts = run_ranks(1, targets_none, make_reference("llama", tmp_path).path)[0]
    assert names == []
    assert all(facts)


def with_prediction_layers(hf: dict[str, Any], layout: str) -> dict[str, Any]:
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model
    from mca_models.templates import config_from_hf

    config = config_from_hf(hf)
    settings = lora(target_modules=["q_a_proj", "o_proj", "up_proj", "gate_proj", "down_proj"])
    models = get_peft_model(AutoModel.from_config(config, arguments(layout)), settings)
    names = [name for name, _ in models.adapter_parameters()]
    train_megatron(models)
    after = models.logits(tokens())
    with models.disable_adapter():
        disabled = models.logits(tokens())
    plain = AutoModel.from_config(config, arguments(layout)).logits(tokens())
    return {
        "layers": config.mtp_num_layers,
        "names": names,
        "after": after,
        "off": torch.equal(disabled, plain),
    }


@pytest.mark.qualify
def test_models_with_prediction_layers_train_adapters_on_the_decoder(tmp_path: Path) -> None:
    path = make_reference("deepseek_v3", tmp_path).path
    hf = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    alone = run_ranks(1, with_prediction_layers, hf, "tp1")[0]
    assert alone["layers"] == 1
    assert not [name for name in alone["names"] if name.startswith("mtp.")]
    assert alone["off"]
    for found in run_ranks(4, with_prediction_layers, hf, "tp2ep2etp1sp"):
        assert found["off"]
        assert float((found["after"] - alone["after"]).abs().max()) < 1e-3
