"""Makes what the examples train on: tiny random models with a tokenizer, and a few rows of each kind of data.

    python ../tiny.py        in the directory of an example; a few seconds

Writes `model` (a dense Qwen3), `moe` (a Qwen3 with experts) and `data/*.jsonl` into the current directory.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

MARKS = ["<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

MODELS = {"model": Qwen3Config(**SIZES), "moe": Qwen3MoeConfig(**SIZES, **EXPERTS)}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the marks of a conversation."""
    words = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(MARKS)
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=MARKS[0], eos_token=MARKS[1])
    made.chat_template = CHAT
    return made


def write(name: str, rows: list[dict[str, object]]) -> None:
    """A JSONL file of the folder `data`."""
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    for name, config in MODELS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(name)
        tokenizer().save_pretrained(name)
    sums = [(f"{a} + {b} = ", str(a + b)) for a in range(8) for b in range(8)]
    write("text.jsonl", [{"text": question + answer} for question, answer in sums])
    write("eval.jsonl", [{"text": question + answer} for question, answer in sums[::9]])
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in sums]
    write("chat.jsonl", [{"messages": some} for some in turns])
    write("alpaca.jsonl", [{"instruction": "Add.", "input": q, "output": a} for q, a in sums[:16]])
    write("pairs.jsonl", [{"prompt": q, "chosen": a, "rejected": f"{a}0"} for q, a in sums])
    liked = [(q, a if number % 2 else f"{a}0", bool(number % 2)) for number, (q, a) in enumerate(sums)]
    write("liked.jsonl", [{"prompt": q, "completion": a, "label": good} for q, a, good in liked])
    names = ("negative", "positive")
    write("classes.jsonl", [{"text": q, "label": names[int(a) > 7]} for q, a in sums])
    print("wrote the models", *MODELS, "and", *sorted(map(str, Path("data").glob("*.jsonl"))))


if __name__ == "__main__":
    main()
