"""Models, datasets and runs of LLaMA-Factory 0.9.5 on mca and on its own Hugging Face backend."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import peft
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from harness import free_port
from mca_train.clients import client_path

Run = dict[str, Any]

WORDS = "the quick brown fox jumps over a lazy dog red blue river mountain sun moon star what where who is".split()
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}

BASE: Run = {
    "do_train": True,
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "sft",
    "template": "qwen",
    "cutoff_len": 128,
    "preprocessing_num_workers": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 20,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "report_to": "none",
    "train_sampling_strategy": "sequential",
}

_RANKS = """
import json, os, signal, socket, sys, traceback
import torch
torch.set_num_threads(1)
import torchaudio
torchaudio.load = lambda path: torch.load(path)  # that of torchaudio needs FFmpeg's libraries
from llamafactory.train import tuner
if "USE_MCA" in os.environ:
    import llamafactory.train.mca.workflow
ranks, runs = json.loads(sys.argv[1])
for run in runs:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            tuner.run_exp(run)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"failed: {run}")
"""
"""Program that imports LLaMA-Factory once and forks the ranks of each run."""


def environment(*, mca: bool) -> dict[str, str]:
    """Return the environment of a run."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(client_path("mcore_adapter")), *filter(None, [os.environ.get("PYTHONPATH")])]
    facade = {"USE_MCA": "1", "PYTHONPATH": os.pathsep.join(paths)} if mca else {}
    return os.environ | offline | facade


def train(runs: list[Run], *, mca: bool, ranks: int = 1) -> None:
    """Train each of ``runs``; the ranks are forked from one process that has imported LLaMA-Factory."""
    words = json.dumps([ranks, runs])
    done = subprocess.run(
        [sys.executable, "-c", _RANKS, words], env=environment(mca=mca), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]


def start(run: Run, folder: Path, *, ranks: int) -> "subprocess.Popen[str]":
    """Start ``llamafactory-cli train`` on mca; it starts its ranks with torchrun."""
    (file := folder / "run.yaml").write_text(json.dumps(run))  # JSON is YAML
    scripts = Path(sys.executable).parent
    path = {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "NPROC_PER_NODE": str(ranks)}
    return subprocess.Popen(
        [scripts / "llamafactory-cli", "train", str(file)],
        env=environment(mca=True) | path | {"MASTER_PORT": str(free_port())},
        stdout=(folder / "launch.log").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(run: Run, folder: Path, *, ranks: int) -> str:
    """Run ``llamafactory-cli train`` on mca, return its log."""
    with start(run, folder, ranks=ranks) as process:
        code = process.wait()
    log = (folder / "launch.log").read_text()
    assert code == 0, log[-6000:]
    return log


def history(output: Path | str, name: str = "loss") -> list[float]:
    """Return the logged values of ``name`` of a run."""
    state = json.loads((Path(output) / "trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] if name in entry]


@dataclass
class Workspace:
    """Folder with models and datasets.

    Args:
        folder: The folder.
    """

    folder: Path
    drawn: random.Random = field(default_factory=lambda: random.Random(0))

    def text(self, low: int, high: int) -> str:
        """Return random words, ``low`` to ``high`` of them."""
        return " ".join(self.drawn.choices(WORDS, k=self.drawn.randint(low, high)))

    def run(self, output: str, model: str = "text", **changes: Any) -> Run:
        """Return a run of the ``model`` that writes to ``output``."""
        paths = {"model_name_or_path": self.folder / model, "dataset_dir": self.folder}
        paths["output_dir"] = self.folder / output
        if changes.get("finetuning_type") == "lora":  # new adapters would have other random numbers
            paths["adapter_name_or_path"] = self.folder / f"{model}-adapter"
        return BASE | {name: str(path) for name, path in paths.items()} | changes

    def write(self, datasets: Mapping[str, list[dict[str, Any]]]) -> None:
        """Write datasets and the file that lists them."""
        known = {
            "pairs": {"ranking": True, "columns": {"chosen": "chosen", "rejected": "rejected"}},
            "texts": {"columns": {"prompt": "text"}},
        }
        info: dict[str, Any] = {}
        for name, rows in datasets.items():
            (self.folder / f"{name}.json").write_text(json.dumps(rows))
            columns: dict[str, Any] = known.get(name.partition("_")[0], {})
            if media := [medium for medium in ("images", "videos", "audios") if medium in rows[0]]:
                rest = {"prompt": "instruction", "query": "input", **{medium: medium for medium in media}}
                answers = {} if "chosen" in rows[0] else {"response": "output"}
                columns = columns | {"columns": columns.get("columns", {}) | rest | answers}
            info[name] = {"file_name": f"{name}.json", **columns}
        (self.folder / "dataset_info.json").write_text(json.dumps(info))

    def draw(self, number: int) -> str:
        """Draw a picture, return its path."""
        sizes = [(16, 16), (24, 16), (16, 32), (24, 24)]
        width, height = sizes[number % len(sizes)]
        image = Image.new("RGB", (width, height))
        values = [self.drawn.randint(0, 255) for _ in range(3 * width * height)]
        image.putdata(list(zip(*[iter(values)] * 3, strict=True)))
        path = self.folder / "pictures" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        image.save(path)
        return str(path)

    def record(self, number: int) -> str:
        """Record a video of 3 to 6 frames, return its path."""
        path = self.folder / "pictures" / f"{number}.mp4"
        path.parent.mkdir(exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=1)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for _ in range(3 + number % 4):
                values = bytes(self.drawn.randbytes(3 * 32 * 32))
                frame = av.VideoFrame.from_image(Image.frombytes("RGB", (32, 32), values))
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return str(path)

    def tone(self, number: int) -> str:
        """Write a tone of 0.2 to 0.8 seconds, return its path."""
        path = self.folder / "pictures" / f"{number}.pt"
        times = torch.arange(3200 * (1 + number % 4)) / 16000
        torch.save(((400 * number * times).sin()[None], 16000), path)
        return str(path)


def workspace(folder: Path) -> Workspace:
    """Return a workspace with models and datasets.

    Models are a Qwen2, a Granite, a Qwen3 with experts, a Qwen2.5-VL, a Qwen3-VL, and a Qwen2-Audio.
    """
    made = Workspace(folder)
    _save_models(folder, _tokenizer(made))
    datasets: dict[str, list[dict[str, Any]]] = {
        "sft": [
            {"instruction": made.text(3, 12), "input": "", "output": made.text(3, 20)} for _ in range(96)
        ],
        "pairs": [_pair(made) for _ in range(96)],
        "texts": [{"text": made.text(20, 60)} for _ in range(160)],
    }
    made.write(datasets | _media_datasets(made, datasets))
    return made


def _save_models(folder: Path, tokenizer: Any) -> None:
    """Save every model, each with the tokenizer."""
    tokenizer.save_pretrained(folder / "text")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=416, **sizes))
    model.save_pretrained(folder / "text")
    _save_adapter(folder / "text-adapter", model)
    _save_vision_model(folder / "vision", tokenizer, sizes)
    _save_qwen3_vl(folder / "vision3", tokenizer, sizes)
    tokenizer.save_pretrained(folder / "moe")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=416, **sizes, **experts)).save_pretrained(folder / "moe")
    tokenizer.save_pretrained(folder / "granite")
    multipliers = {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    GraniteForCausalLM(GraniteConfig(vocab_size=416, **sizes, **multipliers)).save_pretrained(
        folder / "granite"
    )
    _save_qwen2_audio(folder / "audio", tokenizer, sizes)


def _media_datasets(
    made: Workspace, texts: dict[str, list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Return rows of ``texts`` with images, sounds and videos."""
    datasets = {}
    pictures = [made.draw(number) for number in range(12)]
    for name in ("sft", "pairs"):
        datasets[f"{name}_images"] = [
            row | {"instruction": f"<image>{row['instruction']}", "images": [pictures[index % len(pictures)]]}
            for index, row in enumerate(texts[name])
        ]
    tones = [made.tone(number) for number in range(1, 7)]
    datasets["sft_audios"] = [
        row | {"instruction": f"<audio>{row['instruction']}", "audios": [tones[index % len(tones)]]}
        for index, row in enumerate(texts["sft"])
    ]
    videos = [made.record(number) for number in range(6)]
    datasets["sft_videos"] = [
        row
        | {
            "instruction": f"<video>{row['instruction']}<image>",
            "videos": [videos[index % len(videos)]],
            "images": [pictures[index % len(pictures)]],
        }
        for index, row in enumerate(texts["sft"])
    ]
    return datasets


def _save_adapter(folder: Path, model: torch.nn.Module) -> None:
    """Save a LoRA adapter of the language model, whose B is not zero."""
    layers = r".*\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers, task_type="CAUSAL_LM")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder)


def _pair(made: Workspace) -> dict[str, str]:
    return {
        "instruction": made.text(3, 10),
        "input": "",
        "chosen": made.text(3, 16),
        "rejected": made.text(3, 16),
    }


def _tokenizer(made: Workspace) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *VISION, *AUDIO],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokens.train_from_iterator([made.text(30, 30) for _ in range(50)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=SPECIAL[2], pad_token=SPECIAL[0])


def _save_vision_model(folder: Path, tokenizer: PreTrainedTokenizerFast, sizes: dict[str, Any]) -> None:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": 416, **sizes, "rope_parameters": rope},
        vision_config={
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
            **{"out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 16},
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    _save_adapter(folder.with_name(f"{folder.name}-adapter"), model)
    patches = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1024}}
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**patches),
    ).save_pretrained(folder)


def _save_qwen3_vl(folder: Path, tokenizer: PreTrainedTokenizerFast, sizes: dict[str, Any]) -> None:
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={"vocab_size": 416, **sizes, "head_dim": 16, "rope_parameters": rope},
        vision_config={
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
            **{"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    patches = {"patch_size": 4, "merge_size": 2}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches, size={"shortest_edge": 256, "longest_edge": 1024}),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**patches, size={"shortest_edge": 256, "longest_edge": 4096}),
    ).save_pretrained(folder)


def _save_qwen2_audio(folder: Path, tokenizer: PreTrainedTokenizerFast, sizes: dict[str, Any]) -> None:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", "vocab_size": 416, **sizes},
        audio_config={
            **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
            **{"num_mel_bins": 8, "max_source_positions": 50},
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO[0]),
    )
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)
