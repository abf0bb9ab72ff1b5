"""Inspection of a checkpoint directory, partial if the checkpoint is damaged; no tensor is read by default."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from mca_config.errors import McaError
from mca_config.model_config import McaModelConfig
from mca_config.printable import counted
from mca_config.types import JsonObject
from mca_convert.non_finite import count_by_name, search
from mca_convert.pool import Limits
from mca_models.checkpoint.hf_directory import HfSource, read_config
from mca_models.checkpoint.mca_directory import McaSource, load_config
from mca_models.checkpoint_kinds import CheckpointKind, checkpoint_kind, open_checkpoint
from mca_models.quantization.hf_tensors import read_quantization_config
from mca_models.storage.dtypes import ITEM_SIZES
from mca_models.storage.safetensors import TensorInfo, read_header
from mca_models.storage.source import ModelSource
from mca_models.storage.values import counts_in
from mca_models.templates import get_family
from mca_models.templates.classification_head import class_name
from mca_models.templates.parts.vision_tower import PREFIX
from mca_models.weights import Stage

_SIZES = (
    ("num_layers", "layers"),
    ("mtp_num_layers", "MTP layers"),
    ("hidden_size", "hidden"),
    ("num_attention_heads", "heads"),
    ("num_query_groups", "query groups"),
    ("ffn_hidden_size", "ffn"),
    ("num_moe_experts", "experts"),
    ("vocab_size", "vocabulary"),
)

_ADAPTER_SETTINGS = (
    *("base_model_name_or_path", "r", "lora_alpha", "target_modules", "target_parameters"),
    *("rank_pattern", "alpha_pattern", "modules_to_save", "use_rslora"),
)


@dataclass
class Inspection:
    """Contents of a checkpoint or adapter directory."""

    path: str
    kind: str
    """Kind for people, such as ``MCA checkpoint``."""
    facts: JsonObject = field(default_factory=dict)
    """Properties by their name for people, in display order."""
    sizes: JsonObject = field(default_factory=dict)
    """Sizes of the model by ``McaModelConfig``'s names, and ``layout`` with the parallel sizes."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each file with weights."""
    dtypes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of tensors and bytes of each dtype."""
    biggest: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    """Name, dtype, shape and bytes of the largest tensors."""
    not_finite: dict[str, int] | None = None
    """Numbers of non-finite values by tensor; None: no value was read."""
    problem: str | None = None
    """Error that prevents reading the checkpoint."""


def inspect_directory(path: Path, top: int = 5, limits: Limits | None = None) -> Inspection:
    """Inspect directory ``path``.

    Args:
        path: The directory.
        top: Number of largest tensors to list.
        limits: Threads and memory for reading all values; None: values are not read.

    Raises:
        McaError: There is no such directory.
    """
    kind = checkpoint_kind(path)
    found = Inspection(str(path), kind.value)
    try:
        if kind.is_adapter:
            _adapter(path, kind, found, top, values=limits is not None)
        else:
            _model(path, kind, found, top, limits)
    except McaError as error:
        found.problem = found.problem or str(error)
    return found


def _model(path: Path, kind: CheckpointKind, found: Inspection, top: int, limits: Limits | None) -> None:
    try:
        source = open_checkpoint(path)
    except McaError:
        _configuration(path, kind, found)
        raise
    _describe(source.config, found)
    _layout(source, found)
    tensors = source.stored if isinstance(source, HfSource) else list(source.tensors())
    _count([info for info in tensors if isinstance(info, TensorInfo)], source.path, found)
    if isinstance(source, HfSource):
        _quantisation(path, found)
    found.facts["parameters"] = sum(prod(source.full_shape(param)) for param in source.params)
    if source.config.vision_fields is not None:
        found.facts |= _media_parameters(source)
    carried = [param for param in source.params if param.stage is Stage.PASSTHROUGH]
    if carried:
        found.facts["parameters not used by mca"] = sum(map(prod, map(source.full_shape, carried)))
    if isinstance(source, HfSource):
        shapes = [(info.name, info.dtype, list(info.shape)) for info in source.tensors()]
    else:
        shapes = [
            (param.mca_name(), source.parts(param)[0].info.dtype, list(source.full_shape(param)))
            for param in source.params
        ]
    _biggest(shapes, found, top)
    if limits is not None:
        found.not_finite = count_by_name(search(source, source.params, limits, checksums=True))


def _media_parameters(source: ModelSource) -> JsonObject:
    """Return the numbers of parameters of each tower and of the projectors."""
    family = get_family(source.config.model_type).vision
    assert family is not None, "a model with towers is of a multimodal family"
    counts = dict.fromkeys(("vision", "audio", "projector"), 0)
    for param in source.params:
        if param.stage is Stage.VISION:
            counts[family.owner(param.mca.removeprefix(PREFIX))] += prod(source.full_shape(param))
    return {f"{part} parameters": count for part, count in counts.items() if count}


def _configuration(path: Path, kind: CheckpointKind, found: Inspection) -> None:
    """Record the configuration if the weights cannot be read."""
    try:
        if kind is CheckpointKind.HF:
            config = read_config(path)
            found.facts["model_type"] = config.get("model_type")
            found.problem = _unsupported(config)
        else:
            _describe(load_config(path), found)
    except McaError:
        pass


def _unsupported(config: JsonObject) -> str | None:
    """Return the error if models of this type are not supported, else None."""
    try:
        get_family(str(config.get("model_type")))
    except McaError as error:
        return str(error)
    return None


def _describe(config: McaModelConfig, found: Inspection) -> None:
    found.facts["model_type"] = config.model_type
    if config.head.num_labels is None:
        found.facts["architecture"] = get_family(config.model_type).architecture
    else:
        found.facts["architecture"] = class_name(config.model_type, config.head.head_kind)
        found.facts["head"] = (
            f"{config.head.head_kind.replace('_', ' ')}, {counted(config.head.num_labels, 'label')}"
        )
    found.facts["dtype"] = config.dtype
    flat = config.to_fields()
    sizes = [(what, flat.get(name)) for name, what in _SIZES]
    found.facts["sizes"] = ", ".join(f"{what} {value}" for what, value in sizes if value)
    found.sizes |= {name: value for name, _ in _SIZES if (value := flat.get(name)) is not None}
    found.facts["tied head"] = "yes" if config.head.tie_word_embeddings else "no"
    if config.vision_fields is not None:
        found.facts["text part"] = config.text_model_type
        for part in ("vision", "audio"):
            if (tower := config.vision_fields.get(f"{part}_config")) is not None:
                found.facts[f"{part} part"] = _tower_sizes(tower)


def _tower_sizes(vision: JsonObject) -> str:
    """Return the sizes of a tower's configuration, under the names of its family."""
    named = (
        *("depth", "num_hidden_layers", "embed_dim", "hidden_size", "num_heads", "num_attention_heads"),
        *("patch_size", "encoder_layers", "d_model", "encoder_attention_heads", "num_mel_bins"),
    )
    sizes = ", ".join(f"{name} {vision[name]}" for name in named if name in vision)
    return " ".join(filter(None, (vision.get("model_type"), sizes)))


def _layout(source: ModelSource, found: Inspection) -> None:
    if isinstance(source, McaSource):
        found.facts["iteration"] = source.iteration
    if not isinstance(source, HfSource):
        found.facts["layout"] = str(source.config.layout)
        found.sizes["layout"] = dataclasses.asdict(source.config.layout)


def _quantisation(path: Path, found: Inspection) -> None:
    settings = read_quantization_config(read_config(path))
    if isinstance(settings, dict):
        blocks = settings.get("weight_block_size")
        found.facts["quantised"] = f"{settings.get('quant_method')}" + (
            f", blocks of {blocks}" if blocks else ""
        )


def _count(infos: Iterable[TensorInfo], path: Path, found: Inspection) -> None:
    infos = list(infos)
    for info in infos:
        tensors, nbytes = found.dtypes.get(info.dtype, (0, 0))
        found.dtypes[info.dtype] = tensors + 1, nbytes + info.nbytes
    for file in sorted({info.file for info in infos}):
        name = str(file.relative_to(path)) if file.is_relative_to(path) else str(file)
        found.files[name] = file.stat().st_size


def _biggest(shapes: list[tuple[str, str, list[int]]], found: Inspection, top: int) -> None:
    sized = [(name, dtype, shape, prod(shape) * ITEM_SIZES[dtype]) for name, dtype, shape in shapes]
    found.biggest = sorted(sized, key=lambda entry: -entry[-1])[:top]


def _adapter(path: Path, kind: CheckpointKind, found: Inspection, top: int, *, values: bool) -> None:
    from mca_models.lora import AdapterConfig, open_adapter
    from mca_models.lora.peft_directory import PICKLE, WEIGHTS
    from mca_models.torch_checkpoint.torch_file import read_tensors

    settings = AdapterConfig.load(path).document
    found.facts |= {key: settings[key] for key in _ADAPTER_SETTINGS if settings.get(key)}
    if kind is CheckpointKind.PEFT:
        pickled = (path / PICKLE).exists() and not (path / WEIGHTS).exists()
        stored = read_tensors(path / PICKLE) if pickled else read_header(path / WEIGHTS).tensors
        infos = [info for info in stored.values() if isinstance(info, TensorInfo)]
        _count(infos, path, found)
        found.facts["parameters"] = sum(prod(info.shape) for info in infos)
        _biggest([(info.name, info.dtype, list(info.shape)) for info in infos], found, top)
        if values:
            found.not_finite = counts_in((name, info.array()) for name, info in stored.items())
        return
    adapter = open_adapter(path)
    _describe(adapter.model, found)
    found.facts["layout"] = str(adapter.model.layout)
    files = sorted(path.glob("iter_*/pp_*/*.safetensors"))
    _count([info for file in files for info in read_header(file).tensors.values()], path, found)
    if values:
        found.not_finite = adapter.not_finite()
    wholes = [(param.mca_name(), adapter.read(param)) for param in adapter.params]
    found.facts["parameters"] = sum(int(whole.size) for _, whole in wholes)
