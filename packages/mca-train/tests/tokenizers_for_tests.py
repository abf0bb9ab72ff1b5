"""Small tokenizers made in memory."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's habit: an empty thinking block in the last assistant turn only.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning models' habits: thoughts are dropped once a user's turn follows, calls of tools stand beside empty content.
REASONING = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 < last.user %}{{ m['content'].split('</think>')[-1] }}"
    "{% elif m['role'] == 'assistant' and '</think>' not in m['content'] %}<think></think>{{ m['content'] }}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call['function']['name'] }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# One that opens the thought itself: its prompt is no beginning of an earlier turn.
OPENS_THOUGHT = REASONING.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
# One that says itself what the assistant wrote.
MARKED = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }};{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


# One whose prompt ends in a space, which belongs to the first token of the answer.
SPACED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPACED_MARKED = SPACED.replace(
    "{{ m['content'] }}{{ eos_token }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}",
)


def spaced_tokenizer(chat_template: str | None = SPACED) -> PreTrainedTokenizerFast:
    """A token per letter, with the space before it if there is one; texts begin with a space, as of sentencepiece."""
    letters = [*map(chr, range(33, 127))]
    vocab = {
        token: number
        for number, token in enumerate(
            ["<|eos|>", "\n", "▁", *letters, *(f"▁{letter}" for letter in letters)]
        )
    }
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", letter) for letter in letters]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens(["<|eos|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|eos|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def byte_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A token per byte, plus the marks of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: number for number, token in enumerate([*marks, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|eos|>")
    tokenizer.chat_template = chat_template
    return tokenizer
