"""Proves what `pip install mca-convert` promises; run by .ci/run inside an environment that holds nothing else.

No torch, NVIDIA, triton, Megatron or Transformer Engine distribution came along; a checkpoint written here by hand
converts both ways and comes back bit for bit; errors exit as documented; `--help` is quick. Needs only what
mca-convert itself needs.
"""

import importlib.metadata
import json
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HEAVY = re.compile(
    r"(torch|nvidia|triton|megatron|transformer.?engine|transformers|cuda|apex|flash)", re.IGNORECASE
)
HELP_SECONDS = 0.5
HIDDEN, FFN, HEADS, GROUPS, LAYERS, VOCAB = 64, 96, 4, 2, 8, 131
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": HIDDEN // HEADS,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
LAYOUTS = [
    [],
    ["--tensor_model_parallel_size", "2", "--pipeline-model-parallel-size", "2"],
    [
        "--tensor_model_parallel_size=4",
        "--pipeline_model_parallel_size=2",
        "--virtual_pipeline_model_parallel_size=2",
    ],
]

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the little llama."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        yield f"{stem}.input_layernorm.weight", (HIDDEN,)
        yield f"{stem}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{stem}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{stem}.self_attn.k_proj.weight", (HIDDEN * GROUPS // HEADS, HIDDEN)
        yield f"{stem}.self_attn.v_proj.weight", (HIDDEN * GROUPS // HEADS, HIDDEN)
        yield f"{stem}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{stem}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{stem}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{stem}.mlp.down_proj.weight", (HIDDEN, FFN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file from the format's description: length, JSON header, data."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
    )


def read_safetensors(path: Path) -> Tensors:
    """The tensors of one safetensors file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def write_checkpoint(folder: Path) -> Tensors:
    """A llama of random bf16 bits in two shards with an index."""
    folder.mkdir()
    random = np.random.default_rng(0)
    tensors: Tensors = {}
    for name, shape in shapes():
        values = random.standard_normal(shape, dtype=np.float32)
        tensors[name] = ("BF16", shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes())
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:30], "model-00002-of-00002.safetensors": names[30:]}
    for file, inside in shards.items():
        write_safetensors(folder / file, {name: tensors[name] for name in inside})
    index = {
        "metadata": {"total_size": sum(len(data) for _, _, data in tensors.values())},
        "weight_map": {name: file for file, inside in shards.items() for name in inside},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tensors


def read_checkpoint(folder: Path) -> Tensors:
    """Every tensor of a Hugging Face directory."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(read_safetensors(file))
    return tensors


def convert(*arguments: str | Path, expect: int = 0) -> str:
    """Run mca-convert; stops the check if its exit code is not the expected one."""
    command = [str(Path(sysconfig.get_path("scripts")) / "mca-convert"), *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != expect:
        sys.exit(
            f"error: {' '.join(command)} exited {done.returncode}, expected {expect}\n{done.stdout}{done.stderr}"
        )
    return done.stdout + done.stderr


def check_distributions() -> None:
    """No heavy distribution is installed here."""
    names = sorted({distribution.metadata["Name"] for distribution in importlib.metadata.distributions()})
    print("installed:", ", ".join(names))
    if heavy := [name for name in names if HEAVY.search(name)]:
        sys.exit(f"error: mca-convert brought {', '.join(heavy)} along")


def check_round_trips(folder: Path) -> None:
    """HF -> MCA -> HF is bit-exact in every layout, and `verify` can say no."""
    source = folder / "hf"
    tensors = write_checkpoint(source)
    for number, layout in enumerate(LAYOUTS):
        mca, back = folder / f"mca{number}", folder / f"back{number}"
        convert("--checkpoint_path", source, "--output_path", mca, *layout)
        convert("--checkpoint_path", mca, "--output_path", back)
        if read_checkpoint(back) != tensors:
            sys.exit(f"error: HF -> MCA -> HF changed tensors with {layout}")
        if json.loads((back / "config.json").read_text()) != CONFIG:
            sys.exit(f"error: HF -> MCA -> HF changed config.json with {layout}")
        convert("verify", source, back)
        print(f"round trip {' '.join(layout) or 'on one rank'}: {len(tensors)} tensors, bit for bit")
    shard = max(back.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    convert("verify", source, back, expect=1)
    print("verify: notices one flipped bit")


def check_errors(folder: Path) -> None:
    """Wrong usage exits 2, a failure 1; nothing is left at the output path."""
    out = folder / "nothing"
    message = convert("--checkpoint_path", folder / "missing", "--output_path", out, expect=1)
    convert("--checkpoint_path", folder / "hf", "--output_path", out, "--no_such_flag", "1", expect=2)
    (folder / "hf" / "model-00002-of-00002.safetensors").unlink()
    convert("--checkpoint_path", folder / "hf", "--output_path", out, expect=1)
    if out.exists():
        sys.exit("error: a refused conversion left something behind")
    if not re.fullmatch(r"error: .*missing.*\n", message):
        sys.exit(f"error: expected one line that names the missing directory, not\n{message}")
    print("errors: exit codes as documented")


def check_help() -> None:
    """`mca-convert --help` is quick, in CPU seconds (best of three)."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        convert("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    print(f"mca-convert --help: {min(seconds):.2f} s of CPU")
    if min(seconds) >= HELP_SECONDS:
        sys.exit(
            f"error: mca-convert --help takes {min(seconds):.2f} s of CPU, expected under {HELP_SECONDS}"
        )


def main() -> None:
    """Run every check; the first failure ends it."""
    check_distributions()
    with tempfile.TemporaryDirectory(prefix="mca-convert-") as name:
        check_round_trips(Path(name))
        check_errors(Path(name))
    check_help()


if __name__ == "__main__":
    main()
