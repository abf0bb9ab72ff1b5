"""A small model with a tokenizer and chats, and verl's command-line overrides for training on them."""

import io
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WORDS = "the quick brown fox jumps over a lazy dog red blue river mountain sun moon star what where who is".split()
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VISION_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SIZES: dict[str, Any] = {
    "vocab_size": 416,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MOE = Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def write_inputs(folder: Path) -> None:
    """Write models, an ``adapter`` of ``folder/model``, and ``folder/train.parquet``."""
    drawn = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(low, high)))

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=letters)
    tokens.train_from_iterator([text(30, 30) for _ in range(50)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    made = {"model": Qwen2ForCausalLM(Qwen2Config(**SIZES)), "moe": Qwen3MoeForCausalLM(MOE)}
    torch.manual_seed(1)
    made |= {"critic": Qwen2ForTokenClassification(Qwen2Config(**SIZES, num_labels=1))}
    made |= {"reward": Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1, pad_token_id=0))}
    for name, model in made.items():
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)
    base = Qwen2ForCausalLM.from_pretrained(folder / "model")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder / "adapter")
    chats = [
        [{"role": "user", "content": text(3, 12)}, {"role": "assistant", "content": text(3, 20)}]
        for _ in range(64)
    ]
    pyarrow.parquet.write_table(pyarrow.table({"messages": chats}), folder / "train.parquet")


def write_vision_inputs(folder: Path) -> None:
    """Write ``folder/vision``, a Qwen2.5-VL, and ``folder/images.parquet``, after `write_inputs`.

    Each chat has images, because a batch of verl's trainer cannot have chats with and without them. The sides of images
    are multiples of the size of a token, so that no program resizes them.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": VISION})
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": rope},
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
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "vision")
    patches = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    tokenizer.chat_template = VISION_CHAT
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**patches),
        chat_template=VISION_CHAT,
    ).save_pretrained(folder / "vision")
    drawn = random.Random(1)
    rows = []
    for number in range(32):
        sizes = [(drawn.choice((16, 24, 32)), drawn.choice((16, 24, 32))) for _ in range(1 + number % 2)]
        question = "".join(["<image>"] * len(sizes)) + " ".join(drawn.choices(WORDS, k=5))
        answer = " ".join(drawn.choices(WORDS, k=drawn.randint(3, 12)))
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": chat, "images": [_image(size, drawn) for size in sizes]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "images.parquet")


def _image(size: tuple[int, int], drawn: random.Random) -> dict[str, bytes]:
    """Return a picture of random pixels as verl reads it from a table."""
    file = io.BytesIO()
    Image.frombytes("RGB", size, drawn.randbytes(3 * size[0] * size[1])).save(file, "png")
    return {"bytes": file.getvalue()}


def sft_overrides(folder: Path, name: str, steps: int) -> list[str]:
    """Return the overrides that all runs share; run ``name`` writes its checkpoints to ``folder/name``."""
    return [
        f"model.path={folder}/model",
        "model.enable_gradient_checkpointing=false",
        f"data.train_files={folder}/train.parquet",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=2",
        "data.use_dynamic_bsz=false",
        "data.num_workers=0",
        "data.ignore_input_ids_mismatch=true",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[file]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder}/{name}",
        "optim.lr=1e-3",
        "optim.weight_decay=0.0",  # FSDP decays biases and norms too, Megatron does not
        "optim.lr_warmup_steps=4",
    ]


MCA = [
    "hydra.searchpath=[pkg://mca_train.clients.verl.config]",
    "engine=mca",
    "optim=megatron",
    "engine.dtype=float32",
    "optim.lr_decay_style=cosine",
]

FSDP = [
    "engine=fsdp",
    "engine.strategy=fsdp2",
    "engine.dtype=float32",
    "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "engine.use_torch_compile=false",
    "model.use_remove_padding=false",  # removing padding needs flash attention
    "+model.override_config.attn_implementation=sdpa",
    "optim.lr_scheduler_type=cosine",
]
