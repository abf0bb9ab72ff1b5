"""ms-swift's backend ``mca``: its bridge on real ranks, and ms-swift itself with the patch of the documents.

    uv venv -p 3.11 .venv-swift
    uv pip install -p .venv-swift ms-swift==4.6.0 mcore-bridge==1.6.5 megatron-core==0.16.1 pytest hypothesis \
        -e packages/mca-config -e packages/mca-models -e packages/mca-train
    PYTHONPATH=$(uv run tools/build_transformer_engine.py) \
        uv run pytest -n 0 -m qualify --cases all integration_tests/cli/test_ms_swift.py

ms-swift imports Transformer Engine, whose kernels `emulated_te` replaces. Without the environment only the bridge is
tested, with stand-ins of ms-swift's arguments.
"""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_hf
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from emulated_te import needs_te
from harness import free_port, run_ranks
from mca_config.errors import McaError

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "decoder_first_pipeline_num_layers": None},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
}
MODELS = {"tp2": "qwen2", "pp2_vpp2": "llama", "ep2": "qwen3_moe"}


def swift_args(folder: Path, **options: Any) -> SimpleNamespace:
    """Return arguments with what ms-swift 4.6.0 sets by default for ``megatron sft`` of a text model."""
    defaults = {
        "model_dir": str(folder),
        "torch_dtype": torch.float32,
        "seed": 42,
        "tuner_type": "full",
        "task_type": "causal_lm",
        "rlhf_type": None,
        "is_multimodal": False,
        "mtp_num_layers": None,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "calculate_per_token_loss": True,
        "attention_backend": SimpleNamespace(name="local"),
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "overlap_p2p_comm": True,
        "megatron_extra_kwargs": None,
    }
    return SimpleNamespace(**defaults | options)


def built(folder: Path, options: dict[str, Any]) -> list[Any]:
    """Return the chunks that ms-swift gets for the checkpoint in ``folder``."""
    from mca_train.clients.ms_swift import get_mcore_model

    config = transformers.AutoConfig.from_pretrained(folder)
    return get_mcore_model(swift_args(folder, **options), config)


def load_export_save(policy: Path, reference: Path, out: Path, options: dict[str, Any]) -> list[str]:
    """Fill two models through one bridge; return the names that the policy exports differently from its files."""
    chunks, others = built(policy, options), built(reference, options)
    bridge = chunks[0].config.bridge
    wrapped = [SimpleNamespace(config=chunk.config, module=chunk) for chunk in chunks]
    bridge.load_weights(wrapped, str(policy))
    bridge.load_weights(others, str(reference))
    faults = []
    for which, folder in ((chunks, policy), (others, reference)):
        stored = load_file(folder / "model.safetensors")
        sent = dict(bridge.export_weights(which, target_device="cpu"))
        faults += sorted(stored.keys() ^ sent.keys())
        faults += [name for name in stored if not torch.equal(stored[name], sent[name])]
    halved = dict(bridge.export_weights(chunks, only_master_rank=True, converter=only_norms))
    first = torch.distributed.get_rank() == 0
    faults += [] if bool(halved) == first and all("norm" in name for name in halved) else ["converter"]
    if first:
        out.mkdir()
        (out / "args.json").write_text("{}")
    torch.distributed.barrier()
    bridge.save_weights(chunks, str(out), args=swift_args(policy), processor=None)
    return faults


def only_norms(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    return (name, tensor) if "norm" in name else None


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_pass_through_the_bridge_bit_exact(layout, tmp_path):
    size = {"num_hidden_layers": 4} if layout == "pp2_vpp2" else {}
    policy = tiny_hf.save(MODELS[layout], tmp_path / "policy", **size)
    reference = tiny_hf.save(MODELS[layout], tmp_path / "reference", seed=1, **size)
    (policy / "tokenizer.json").write_text("{}")
    out = tmp_path / "checkpoint-1"
    faults = run_ranks(2, load_export_save, policy, reference, out, LAYOUTS[layout])
    assert faults == [[], []]
    assert {path.name for path in out.iterdir()} >= {"args.json", "config.json", "tokenizer.json"}
    again = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    first = transformers.AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert all(torch.equal(again[name], first[name]) for name in first)


def rejected(work: Callable[[], object]) -> str:
    try:
        work()
    except McaError as error:
        return str(error)
    return "accepted"


def refuse(folder: Path, other: Path) -> list[str]:
    """Return the error of each call that the bridge cannot serve."""
    chunks = built(folder, {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    bridge = chunks[0].config.bridge
    return [
        rejected(lambda: bridge.load_weights(chunks, str(folder), peft_format=True)),
        rejected(lambda: bridge.load_weights(chunks[:1], str(folder))),
        rejected(lambda: list(bridge.export_weights([SimpleNamespace(config=None)]))),
        rejected(lambda: bridge.load_weights(chunks, str(other))),
        rejected(lambda: bridge.save_weights(chunks, str(folder), save_missing_weights=True)),
    ]


@pytest.mark.ranks
def test_calls_that_cannot_be_served_are_errors(tmp_path):
    folder = tiny_hf.save("llama", tmp_path / "model", num_hidden_layers=4)
    other = tiny_hf.save("llama", tmp_path / "other", num_hidden_layers=8)
    for messages in run_ranks(2, refuse, folder, other):
        for message, expected in zip(
            messages,
            ("tuner_type", "1 of 2 chunks", "get_mcore_model", "another model", "save_missing"),
            strict=True,
        ):
            assert expected in message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tuner_type", "lora"),
        ("rlhf_type", "dpo"),
        ("task_type", "seq_cls"),
        ("is_multimodal", True),
        ("calculate_per_token_loss", False),
        ("mtp_num_layers", 1),
    ],
)
def test_an_unsupported_option_of_ms_swift_is_an_error(option, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(McaError, match=f"{option} {value} is not supported; set "):
        built(tmp_path, {option: value})


ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-swift/bin/python"
SWIFT = ROOT / ".venv-swift/lib/python3.11/site-packages/swift"

RANKS = """
import json, os, sys, traceback
os.environ["NVTE_TORCH_COMPILE"] = "0"
import emulated_te
from mca_models.megatron import platform
platform.prepare()
import torch
torch.set_num_threads(1)
from swift.megatron.pipelines.train.sft import MegatronSft
emulated_te.install()
ranks, port, arguments = json.loads(sys.argv[1])
children = []
for rank in range(ranks):
    if child := os.fork():
        children.append(child)
        continue
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        MegatronSft(arguments).main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
sys.exit(any(status for _, status in [os.waitpid(child, 0) for child in children]))
"""
"""Program that imports ms-swift once and forks the ranks of a run."""

OPTIONS = """--model_type qwen2 --template qwen2_5 --use_hf true --split_dataset_ratio 0 --tuner_type full
--torch_dtype float32 --fp16 false --bf16 false --masked_softmax_fusion false --ddp_backend gloo --micro_batch_size 2
--global_batch_size 4 --train_iters 20 --lr 1e-3 --lr_warmup_fraction 0.1 --max_length 128 --logging_steps 1
--save_steps 20 --dataloader_num_workers 0 --dataset_num_proc 1 --train_dataloader_shuffle false --check_model false"""

RUNS = {
    "mca": (1, "--bridge_backend mca --attention_backend local"),
    "mca_tp2_pp2": (
        4,
        "--bridge_backend mca --attention_backend local "
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2",
    ),
    "mcore-bridge": (1, "--bridge_backend mcore-bridge --attention_backend fused"),
}


def make_inputs(folder: Path) -> None:
    """Write a tiny model with a tokenizer, and conversations."""
    drawn = random.Random(0)
    words = (
        "the quick brown fox jumps over a lazy dog red blue river mountain sun moon star what where".split()
    )

    def text(low: int, high: int) -> str:
        return " ".join(drawn.choices(words, k=drawn.randint(low, high)))

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special, letters = ["<|pad|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=letters)
    tokens.train_from_iterator([text(30, 30) for _ in range(50)], trainer)
    tiny_hf.save("qwen2", folder / "model", vocab_size=416, num_hidden_layers=4, tie_word_embeddings=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=special[2], pad_token=special[0])
    tokenizer.save_pretrained(folder / "model")
    turns = [(text(3, 12), text(3, 20)) for _ in range(96)]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in turns
    ]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_ms_swift(folder: Path, name: str) -> list[float]:
    """Return the losses of one of ms-swift's runs with the patch."""
    ranks, options = RUNS[name]
    paths = f"--model {folder / 'model'} --dataset {folder / 'sft.jsonl'} --output_dir {folder / name}"
    words = json.dumps([ranks, free_port(), f"{OPTIONS} {options} {paths}".split()])
    path = os.pathsep.join([str(folder), str(ROOT / "integration_tests/support"), os.environ["PYTHONPATH"]])
    offline = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": path,
    }
    done = subprocess.run(
        [PYTHON, "-c", RANKS, words], env=os.environ | offline, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (log,) = (folder / name).glob("*/logging.jsonl")
    return [row["loss"] for row in map(json.loads, log.read_text().splitlines()) if "loss" in row]


@needs_te
@pytest.mark.qualify
@pytest.mark.ranks
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-swift with ms-swift==4.6.0")
def test_patched_ms_swift_trains_as_with_its_own_bridge(tmp_path):
    make_inputs(tmp_path)
    shutil.copytree(SWIFT, tmp_path / "swift")
    patch = (ROOT / "docs/assets/ms_swift.patch").read_text()
    subprocess.run(["patch", "-p1", "-d", tmp_path], input=patch, text=True, check=True)
    found = {name: run_ms_swift(tmp_path, name) for name in RUNS}
    assert len(found["mca"]) == 20
    assert found["mca"] == pytest.approx(found["mcore-bridge"], rel=1e-6)
    assert found["mca_tp2_pp2"] == pytest.approx(found["mca"], rel=1e-6)
    (saved,) = (tmp_path / "mca_tp2_pp2").glob("*/checkpoint-20")
    assert {"args.json", "tokenizer.json", "iter_0000020"} <= {path.name for path in saved.iterdir()}
    transformers.AutoModelForCausalLM.from_pretrained(saved)
