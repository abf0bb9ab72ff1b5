"""Environment variables that Megatron writes for one model do not affect another."""

import os

import pytest

from mca_config.errors import McaError
from mca_models.megatron.factory.chunks import DETERMINISM, NAMES, kernel_choice


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def choose(**wanted: str) -> None:
    """Choose a kernel as Megatron's ``LanguageModule`` does."""
    for name, value in wanted.items():
        assert os.getenv(name) in (None, value), f"{name} set to {os.getenv(name)}, but expected {value}"
        os.environ[name] = value


def test_models_with_our_own_attention_leave_no_choice_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with kernel_choice("local", engine=False):
        choose(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0")
    with kernel_choice(None, engine=False):
        choose(NVTE_FLASH_ATTN="1", NVTE_FUSED_ATTN="1")
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == {"NVTE_FUSED_ATTN": "0"}


def test_the_engines_choice_stays_and_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")  # taken back at the end, with what else is set here
    with kernel_choice("flash", engine=True):
        choose(NVTE_FLASH_ATTN="1")
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    with (
        pytest.raises(McaError, match=r"NVTE_FLASH_ATTN is 1 .* attention_backend unfused; unset"),
        kernel_choice("unfused", engine=True),
    ):
        choose(NVTE_FLASH_ATTN="0")


def test_a_deterministic_model_is_built_so_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DETERMINISM, "1")
    with kernel_choice(None, engine=True, deterministic=True):
        assert os.environ[DETERMINISM] == "0", (
            "else Megatron raises, or Transformer Engine draws its sums in any order"
        )
    assert os.environ[DETERMINISM] == "1", "the next model may be another"


def test_other_assertions_are_passed_on() -> None:
    with pytest.raises(AssertionError, match="heads"), kernel_choice(None, engine=True):
        raise AssertionError("heads")
