"""The table of LLaMA-Factory's arguments; ``test_llamafactory_keys.py`` compares it with the installed one."""

import re
from pathlib import Path

import pytest

from mca_config.errors import McaError
from mca_config.reference import update_document
from mca_train.clients.llama_factory_keys import DATA, FINETUNING, GROUPS, MEGATRON, MODEL, TABLES
from mca_train.clients.options import reject_unsupported

CLIENT = {"stage": "sft", "finetuning_type": "full", "adapter_name_or_path": None}
ARGS = {"do_train": True}
REJECTED = {
    name: key
    for name, key in {**MODEL, **DATA, **FINETUNING, **MEGATRON}.items()
    if key.use == "error" and key.raised_by == "mca"
}


def test_the_page_has_the_tables():
    page = "docs/reference/llama_factory_keys.md"
    text = (Path(__file__).parents[3] / page).read_text()
    assert all(f"<!-- {name} -->" in text for name in TABLES)
    assert update_document(text, TABLES) == text, f"python -m mca_train.clients.llama_factory_keys {page}"


def test_an_argument_has_one_row():
    names = [name for keys in GROUPS.values() for name in keys]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", REJECTED)
def test_a_value_that_changes_the_result_raises_an_error_with_the_remedy(name):
    key = REJECTED[name]
    value = False if True in key.harmless else ["language"] if name in MEGATRON else "other"
    client, args = (CLIENT, ARGS | {name: value}) if name in MEGATRON else (CLIENT | {name: value}, ARGS)
    with pytest.raises(McaError, match=rf"{name}: .* is not supported .*{re.escape(key.note)}"):
        reject_unsupported(client, args)


@pytest.mark.parametrize("name", REJECTED)
def test_a_default_value_raises_no_error(name):
    for value in REJECTED[name].harmless:
        client, args = (CLIENT, ARGS | {name: value}) if name in MEGATRON else (CLIENT | {name: value}, ARGS)
        reject_unsupported(client, args)


def test_an_empty_list_of_frozen_parts_is_a_value():
    with pytest.raises(McaError, match=r"freeze: \[\] is not supported .*set freeze_vision_tower"):
        reject_unsupported(CLIENT, ARGS | {"freeze": []})
