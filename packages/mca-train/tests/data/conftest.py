"""Fixtures of tests of rows with images."""

import datasets
import pytest
from drawn_images import image_tokenizer
from image_samples import pictures


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return image_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of 2 x 2, 2 x 3 and 4 x 4 tokens, one that is none, and a processor's directory."""
    folder = tmp_path_factory.mktemp("pictures")
    pictures(folder)
    return folder
