"""A step for CUDA of every family mixes no devices, and waits for the GPU only where it must; see `test_cuda_paths`.

`--cases all` runs every family, padded and packed, and those with a vision model on images, or those that ``-k``
selects.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import tiny_vision
import transformers

import mca_models
from cases import needed
from cuda_waits import ALWAYS, ONCE, waits_of
from family_sizes import described
from mca_models.templates import config_from_hf
from mca_train.plan.vision_memory import VisionTower

pytestmark = [pytest.mark.fork, pytest.mark.timeout(0)]  # the processes have their own limits
RUN = {"bf16": True, "transformer_impl": "local"}
KINDS: dict[str, dict[str, Any]] = {"padded": {}, "packed": {"sequence_packing": True}}
OF_IMAGES = {"count": 2, "pixels": 32}
KNOWN: dict[str, frozenset[str]] = {
    # transformers' towers make lengths, places and windows of patches, layer by layer, of grids that are on the GPU
    "images ": frozenset(
        f"{kind} in media_features.py:_run_vision" for kind in ("value", "size", "mask", "copy to the GPU")
    ),
    # so do the features that are put in the order of tiles, and of lone images and several
    **{
        f"images {case}": frozenset(
            f"{kind} in media_features.py:{function}" for kind in ("value", "size", "mask", "copy to the GPU")
        )
        for case, function in (("ovis2", "_run_marked"), ("llava_onevision", "_run_alone_and_together"))
    },
    # and keep windows or masks in the host's memory, by which gradients are put back
    **dict.fromkeys(
        ("images qwen2_5_vl", "images qwen2_5_omni", "images exaone4_5", "images gemma4", "images got_ocr2"),
        frozenset({"mask in elsewhere"}),
    ),
    # how many tokens go to experts that have weights is known when they are routed
    "longcat_flash": frozenset({"value in identity_experts.py:counted"}),
}
"""Further waits of some cases, by prefix of their names."""
CASES = [
    f"{case}, {kind}"
    for case in (*tiny_hf.ALL, *(f"images {case}" for case in tiny_vision.CASES))
    for kind in KINDS
]
PROCESSES = 2


def description(case: str) -> dict[str, Any]:
    """``config.json`` of a case."""
    if not case.startswith("images "):
        return described(case)
    config = transformers.AutoConfig.for_model(**tiny_vision.described(case.removeprefix("images ")))
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    found["architectures"] = [transformers.AutoModelForMultimodalLM._model_mapping[type(config)].__name__]
    return found


def case_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the run of `fake_cuda` for a name of `CASES`."""
    case, kind = name.split(", ")
    model = folder / case.replace(" ", "-")
    model.mkdir(exist_ok=True)
    values = description(case)
    (model / "config.json").write_text(json.dumps(values))
    pictured = case.startswith("images ")
    counted = pictured and VisionTower.from_config(config_from_hf(values)) is not None
    changes = RUN | KINDS[kind] | ({"freeze": []} if pictured else {})
    if pictured and "gemma4" in case:
        changes["seq_length"] = 1024  # whose images are enlarged
    return {
        "model": model.name,
        "run": ("sft", changes),
        "images": OF_IMAGES if counted else None,  # models whose towers plans do not know train on text
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    names = needed(request, "name")
    folders = [tmp_path_factory.mktemp("families") for _ in range(max(min(PROCESSES, len(names) // 2), 1))]
    cases = [
        {name: case_of(name, folder) for name in names[number :: len(folders)]}
        for number, folder in enumerate(folders)
    ]
    with ThreadPoolExecutor(len(folders)) as pool:
        results = list(pool.map(waits_of, folders, cases, [120 + 180 * len(each) for each in cases]))
    return {name: waits for result in results for name, waits in result.items()}


@pytest.mark.qualify
@pytest.mark.parametrize("name", CASES)
def test_a_family_waits_for_the_gpu_only_where_it_must(name: str, found: dict[str, Any]) -> None:
    waits = found[name]
    assert isinstance(waits, dict), waits
    known = frozenset().union(*(places for start, places in KNOWN.items() if name.startswith(start)))
    assert not waits.keys() - (ONCE.keys() | ALWAYS | known)
    assert all(waits.get(place, 0) <= times for place, times in ONCE.items())


def test_known_places_exist() -> None:
    files = {path.name: path.read_text() for path in Path(mca_models.__file__).parent.rglob("*.py")}
    for place in sorted(frozenset().union(*KNOWN.values())):
        file, _, function = place.rpartition(" in ")[2].partition(":")
        assert file == "elsewhere" or f"def {function}(" in files[file], place
