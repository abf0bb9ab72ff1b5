"""Vision and audio towers of a family: their tensors, names in files, and keys of ``config.json``.

Which tensors a vision model has is said in the family's own file, with ``linear``, ``norm`` and ``repeat_shapes``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mca_config.errors import HfConfigError
from mca_config.model_config import McaModelConfig
from mca_config.types import JsonObject, Values
from mca_models.templates.config_table import HfConfig
from mca_models.weights import Param, Stage
from mca_models.weights.layouts import Concat, FusedRotaryHeads

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
"""Tensors of a vision model by the names of transformers' modules below ``model.``, or of a part of them."""

PREFIX = "vision_model."
"""Prefix of the Megatron names of a vision model's parameters."""

SPELLING, MORE = "hf_spelling", "hf_vision_more"
"""Facts in ``extra``: which of the family's spellings a checkpoint has; tensors that no table names, with shapes."""

ImageTokenKind = Literal[
    "patches",
    "padded_patches",
    "tiles",
    "tile_rows",
    "lines",
    "whole_lines",
    "fixed",
    "plain",
    "enclosed",
    "pooled",
    "tile_breaks",
    "named_tiles",
    "joined_tiles",
    "row_column_tiles",
    "thumbnail_tiles",
    "numbered_slices",
    "word_marks",
    "word_tiles",
]
"""Division of an image into tokens: a grid of merged patches, the same of an image that is padded at its ends; tiles of
equally many tokens, the same in rows with marks between them (``tile_rows``), each before a mark (``tile_breaks``), or
behind its number (``named_tiles``); lines with a mark after each, or without marks (``whole_lines``); a fixed number of
tokens, with Gemma 3's marks around them (``fixed``), with InternVL's (``enclosed``), or alone (``plain``); a grid of
pooled patches between Gemma 4's marks (``pooled``); tiles whose features are joined without their padding
(``joined_tiles``); tiles behind their row and column (``row_column_tiles``); the same before the whole image in its own
proportions (``thumbnail_tiles``); the whole image behind its number and before its tiles, all in their own proportions
(``numbered_slices``); or the whole image before its tiles, with marks between them that have features too
(``word_marks``). Chat templates write a word for an image of these and of ``word_tiles``, which are ``tiles``."""

VideoTokenKind = Literal[
    "together", "timestamps", "second_after", "seconds_after", "minutes", "numbered", "pooled", "slices"
]
"""Frames of a video one after the other, or so with a feature at the end (``pooled``); each between marks behind its
time in words (``timestamps``), its minutes and seconds (``minutes``) or its number (``numbered``), or in front of its
whole second (``second_after``) or its seconds (``seconds_after``), as an image;
or as an image and its slices (``slices``)."""

_TEXT, _HEAD = "model.", "lm_head."
_KEYS = (
    *("vision_config", "image_token_id", "image_token_index", "video_token_id", "boi_token_index"),
    *("eoi_token_index", "vision_start_token_id", "vision_end_token_id", "image_start_token_id"),
    *("image_end_token_id", "video_start_token_id", "video_end_token_id", "mm_tokens_per_image"),
    *("image_seq_length", "downsample_ratio", "projector_hidden_act", "vision_feature_layer"),
    *("vision_feature_select_strategy", "multimodal_projector_bias", "spatial_merge_size"),
    *("projector_hidden_size", "video_token_index", "projection_hidden_size", "projection_layer_norm_eps"),
    *("downsample_factor", "alignment_intermediate_size", "adapter_layer_norm_eps"),
    *("audio_config", "audio_token_id", "audio_token_index"),
    *("audio_start_token_id", "audio_end_token_id", "position_id_per_seconds", "seconds_per_chunk"),
    "user_token_id",
    *("image_grid_pinpoints", "vision_aspect_ratio", "scale_factor"),
    *("insert_layer_id", "downsample_mode", "merge_kernel_size", "merger_times", "drop_vision_last_layer"),
    *("projector_bias", "projector_use_layernorm", "visual_indicator_token_ids"),
    *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
)
_ROPES = ("rope_parameters", "rope_scaling")
_MROPE = ("mrope_section", "mrope_interleaved")


def linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Shapes:
    """The tensors of a linear, or of anything else with as many biases as rows."""
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def norm(name: str, width: int, *, bias: bool = True) -> Shapes:
    """The tensors of a norm."""
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if bias else {})}


def gated_mlp(name: str, inner: int, width: int, *, bias: bool = True) -> Shapes:
    """Return the three matrices of a gated MLP, whose names begin with ``name``."""
    return {
        **linear(f"{name}gate_proj", inner, width, bias=bias),
        **linear(f"{name}up_proj", inner, width, bias=bias),
        **linear(f"{name}down_proj", width, inner, bias=bias),
    }


def repeat_shapes(name: str, count: int, inside: Shapes) -> Shapes:
    """``inside`` so many times, below ``name`` and a number."""
    return {f"{name}.{i}.{tensor}": shape for i in range(count) for tensor, shape in inside.items()}


@dataclass(frozen=True)
class Spelling:
    """Names in files for the names of modules.

    Args:
        text: For ``model.`` of a text-only model.
        head: For ``lm_head.``.
        vision: For the beginnings of a vision model's names.
        inside: For parts of a vision model's names behind their beginnings, of which a name has one at most.
        layers: For ``layers.`` of a text-only model.
    """

    text: str
    head: str
    vision: Mapping[str, str]
    inside: tuple[tuple[str, str], ...] = ()
    layers: str = "layers."

    def _text(self) -> tuple[tuple[str, str], ...]:
        return (f"{_TEXT}layers.", f"{self.text}{self.layers}"), (_TEXT, self.text), (_HEAD, self.head)

    def text_to_file(self, name: str) -> str:
        """Return the file's name for a text model's ``name``."""
        return _exchanged(name, self._text())

    def vision_to_file(self, name: str) -> str:
        """Return the file's name for a vision model's ``name``."""
        return _exchanged_inside(_exchanged(name, self.vision.items()), self.inside)

    def text_from_file(self, name: str) -> str:
        """The inverse of ``text_to_file``."""
        return _exchanged(name, ((its, own) for own, its in self._text()))

    def vision_from_file(self, name: str) -> str | None:
        """The inverse of ``vision_to_file``; None if the file's ``name`` is not a vision model's."""
        inside = [(its, own) for own, its in self.inside]
        found = _exchanged_inside(_exchanged(name, ((its, own) for own, its in self.vision.items())), inside)
        return found if any(name.startswith(its) for its in self.vision.values()) else None


FUSED_QKV = ".wqkv."


def split_qkv(name: str) -> tuple[str, ...]:
    """Return the names of transformers' modules for a fused tensor's ``name``; none for another tensor."""
    return tuple(name.replace(FUSED_QKV, f".{x}_proj.") for x in "qkv") if FUSED_QKV in name else ()


def _exchanged(name: str, beginnings: Iterable[tuple[str, str]]) -> str:
    for before, after in beginnings:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _exchanged_inside(name: str, parts: Iterable[tuple[str, str]]) -> str:
    before, after = next((pair for pair in parts if pair[0] in name), ("", ""))
    return name.replace(before, after) if before else name


def module_spelling(*parts: str) -> Spelling:
    """Return the names of transformers' modules, which adapters use for every checkpoint."""
    return Spelling("model.language_model.", _HEAD, {part: f"model.{part}" for part in parts})


def llava_spelling(*parts: str) -> Spelling:
    """Return the names of Llava's files: a causal-LM model next to the parts of the vision model."""
    return Spelling("language_model.model.", "language_model.lm_head.", {part: part for part in parts})


@dataclass(frozen=True, kw_only=True)
class AudioTower:
    """Audio tower of a family, a part of its `VisionModel`.

    Args:
        names: Beginnings of the names of its tensors.
        mask: Input that marks the frames of a clip, ``[clips, frames]``; None: all frames of a window count.
        tokens: Features of a clip, by the number of its frames.
        chunk: Frames of a chunk, where the features of a shorter clip depend on the padding that longer ones give it;
            such clips are computed alone.
        marks: Keys of the tokens around a clip that the processor writes; None: chat templates write them.
        unpadded: The processor takes clips of any length, without padding.
        windows: Most windows of the feature extractor that the processor makes of a longer clip; None: any number.
    """

    names: tuple[str, ...]
    mask: str | None
    tokens: Callable[[McaModelConfig, int], int]
    chunk: Callable[[McaModelConfig], int] | None = None
    marks: tuple[str, str] | None = None
    unpadded: bool = False
    windows: int | None = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        return ("input_features",) if self.mask is None else ("input_features", self.mask)


@dataclass(frozen=True, kw_only=True)
class VideoRules:
    """Rules for the videos of a processor that counts time by the rate at which a run asks for frames.

    The text goes on behind the last frame.

    Args:
        fps: Frames per second, where neither the run nor the checkpoint gives a number.
        pixels: Fewest and most pixels of a frame, also where the checkpoint's video processor has others.
        exact: Time positions are not rounded down.
        sound: Order of the tokens of a video and its sound: ``chunks`` of ``seconds_per_chunk``, first those of the
            frames, with the marks around both at one position; or by ``time``.
    """

    fps: float
    pixels: tuple[int, int]
    exact: bool = False
    sound: Literal["chunks", "time"]


@dataclass(frozen=True, kw_only=True)
class VisionModel:
    """Towers of a multimodal family, for images or audio, and their projectors.

    Args:
        tensors: All tensors of a model's towers and projectors.
        spellings: Names of tensors in files: those of published ones first, those of transformers' modules last.
        projector: Prefixes of the names of the projectors' tensors.
        unused: Prefixes of the names of tensors that no feature depends on, or that transformers never trains.
        image_tokens: Kind of the tokens of an image in a row; None: its processor writes tokens that mca does not.
        video_tokens: Kind of the tokens of a video in a row; None: mca does not write the tokens of its frames.
        tokens_per_second: Time positions of a second of video if ``vision_config`` does not say; None: a frame is one.
        video_rules: Rules for videos; None: those of the video processor, and time by the rate of the found frames.
        tokens_per_image: Features of an image, or of a tile, where all have the same number.
        tokens_of_size: Features of an image by its height and width, which the tower gets as ``image_sizes``, or as
            ``spatial_shapes`` or ``target_sizes`` in patches.
        tokens_together: Features of an image that is not the only one of its sequence, where these are others.
        tokens_per_frame: Features of a frame of a video, behind whose last one is another.
        reach: Largest number of later tokens that an image token attends to; 0: attention is causal.
        windowed: Only layers with a sliding window have bidirectional attention inside images.
        audio: The audio tower; None: there is none.
        fused_qkv: Files have q, k and v of a tower's layer in one tensor, ``FUSED_QKV``, and so has mca; transformers'
            modules have three. It is the order of rows in that tensor: with the channels of a RoPE pair next to each
            other (``rope pairs``), or as in the modules; None: there is no such tensor.
    """

    tensors: Callable[[McaModelConfig], Shapes]
    spellings: tuple[Spelling, ...]
    projector: tuple[str, ...]
    unused: Callable[[McaModelConfig], tuple[str, ...]] = lambda config: ()
    image_tokens: ImageTokenKind | None = "patches"
    video_tokens: VideoTokenKind | None = None
    tokens_per_second: float | None = None
    video_rules: VideoRules | None = None
    tokens_per_image: Callable[[McaModelConfig], int] | None = None
    tokens_of_size: Callable[[McaModelConfig, int, int], int] | None = None
    tokens_together: Callable[[McaModelConfig], int] | None = None
    tokens_per_frame: Callable[[McaModelConfig], int] | None = None
    reach: Callable[[McaModelConfig], int] = lambda config: 0
    windowed: bool = False
    audio: AudioTower | None = None
    fused_qkv: Literal["rope pairs", "one after the other"] | None = None

    def component(self, name: str, config: McaModelConfig) -> str:
        """Return the component of a tower's ``name``: ``vision``, ``audio``, ``projector``, or ``unused``."""
        return "unused" if name.startswith(self.unused(config)) else self.owner(name)

    def owner(self, name: str) -> str:
        """Return the part with the tensor ``name``, used or not: ``vision``, ``audio`` or ``projector``."""
        if name.startswith(self.projector):
            return "projector"
        return "audio" if self.audio is not None and name.startswith(self.audio.names) else "vision"

    def parts(self, config: McaModelConfig) -> frozenset[str]:
        """Return the parts with tensors that are used: of ``vision``, ``audio`` and ``projector``."""
        return frozenset(self.component(name, config) for name in self.tensors(config)) - {"unused"}

    def spelling(self, config: McaModelConfig) -> Spelling:
        """Return the spelling of the checkpoint of ``config``; the published one by default."""
        return self.spellings[config.extra.get(SPELLING, 0)]

    @property
    def text_module(self) -> str:
        """Return the name of the text model in transformers' class."""
        return next(part for part in self.spellings[-1].text.split(".") if part.endswith("_model"))

    def params(self, config: McaModelConfig) -> list[Param]:
        """Every parameter of the vision model: whole on each tensor rank of the first stage."""
        more = {name: tuple(shape) for name, shape in config.extra.get(MORE, {}).items()}
        spelling, shapes = self.spelling(config), {**self.tensors(config), **more}
        return [self._param(name, shape, spelling, config) for name, shape in shapes.items()]

    def _param(self, name: str, shape: Shape, spelling: Spelling, config: McaModelConfig) -> Param:
        plain = Param(mca=PREFIX + name, hf=(spelling.vision_to_file(name),), stage=Stage.VISION, shape=shape)
        if not (self.fused_qkv and FUSED_QKV in name and spelling is self.spellings[-1]):
            return plain
        names = tuple(spelling.vision_to_file(own) for own in split_qkv(name))
        if self.fused_qkv == "one after the other":
            return replace(plain, hf=names, layout=Concat((1, 1, 1)))
        heads = (config.vision_fields or {})["vision_config"].get("num_attention_heads", 16)
        return replace(plain, hf=names, layout=FusedRotaryHeads(shape[0] // 3 // heads // 2))

    def split_names(self, param: Param) -> tuple[str, ...]:
        """Return transformers' names of the weights that it splits ``param`` into on reading; none for most."""
        own = split_qkv(param.mca.removeprefix(PREFIX)) if self.fused_qkv else ()
        return tuple(self.spellings[-1].vision_to_file(name) for name in own)

    def detect_spelling(self, config: McaModelConfig, names: Collection[str]) -> int:
        """Return the index of the spelling of a checkpoint with these tensor names."""
        own = self.tensors(config)
        hits = [
            (
                sum(each.vision_to_file(name) in names for name in own),
                any(name.startswith(each.text + each.layers) for name in names),
            )
            for each in self.spellings
        ]
        return hits.index(max(hits))

    def more(
        self, config: McaModelConfig, spelling: Spelling, names: Collection[str], shapes: Mapping[str, Shape]
    ) -> dict[str, list[int]]:
        """Tensors of the vision model that no table names; they are carried like the others."""
        known = {own for name in self.tensors(config) for own in (name, *split_qkv(name))}
        found = {own: name for name in names if (own := spelling.vision_from_file(name)) is not None}
        return {own: list(shapes[name]) for own, name in found.items() if own not in known and name in shapes}


@dataclass(frozen=True, kw_only=True)
class NestedTextConfig:
    """``config.json`` with the text model's keys in ``text_config``, or at the top with the vision model's.

    Args:
        text_model_type: HF's name of the text model, which `vision_language_family` fills in.
        tied: Whether the head is tied if the file does not say.
        text_ties: If ``tie_word_embeddings`` of the text part ties it ``too``, ``alone`` or ``never``; ``nothing``:
            transformers' class always has a separate head.
        rope: Sections of RoPE, where the family has any, if the file does not say; and whether they interleave.
        deepstack: Number of decoder layers that get features, by the vision model's configuration.
        defaults: Default values of the keys outside of ``vision_config``.
        towers: Keys of the towers' configurations.
        repeated: Keys of the text model that are at the top too, with the same values.
    """

    text_model_type: str = ""
    tied: bool = False
    text_ties: Literal["never", "too", "alone", "nothing"] = "never"
    rope: tuple[tuple[int, ...], bool] | None = None
    deepstack: Callable[[JsonObject], int] = lambda vision: 0
    defaults: Values = field(default_factory=dict)
    towers: tuple[str, ...] = ("vision_config",)
    repeated: tuple[str, ...] = ()

    def text_config(self, hf: HfConfig) -> HfConfig:
        """Return the keys that describe the text model."""
        text = (
            as_object(hf, "text_config") if "text_config" in hf else {k: hf[k] for k in hf if k not in _KEYS}
        )
        shared: HfConfig = {key: hf[key] for key in ("dtype", "torch_dtype") if key in hf}
        tied = hf.get("tie_word_embeddings")
        tied = self.tied if tied is None else tied
        if self.text_ties == "too":
            tied = tied or text.get("tie_word_embeddings") or False
        elif self.text_ties == "alone":
            tied = text.get("tie_word_embeddings") or False
        elif self.text_ties == "nothing":
            tied = False
        ropes = {key: _without_sections(text[key]) for key in _ROPES if isinstance(text.get(key), dict)}
        named = {"model_type": self.text_model_type, "tie_word_embeddings": tied}
        return {**text, **shared, **ropes, **named}

    def other_fields(self, hf: HfConfig) -> Values:
        """Return the fields of ``McaModelConfig`` that the text keys do not give."""
        vision = {**self.defaults, **{key: hf[key] for key in _KEYS if key in hf}}
        vision |= {key: as_object(hf, key) for key in self.towers}
        self._require_equal(hf)
        sections, turns = self._sections(hf) if self.rope else (None, False)
        return {
            "text_model_type": self.text_model_type,
            "vision_fields": vision,
            "mrope_section": sections,
            "mrope_interleaved": turns,
            "deepstack_layers": self.deepstack(vision.get("vision_config", {})),
        }

    def _require_equal(self, hf: HfConfig) -> None:
        text = hf.get("text_config") or {}
        for key in self.repeated:
            if key in hf and key in text and hf[key] != text[key]:
                raise HfConfigError(
                    f"config.json: '{key}' is {hf[key]!r:.80}, but {text[key]!r:.80} in text_config; they must be equal"
                )

    def _sections(self, hf: HfConfig) -> tuple[tuple[int, ...], bool]:
        """Return RoPE sections; whether they interleave follows from the family alone, as in transformers."""
        text = hf.get("text_config") or hf
        ropes: list[JsonObject] = [text[key] for key in _ROPES if isinstance(text.get(key), dict)]
        rope = ropes[-1] if ropes else {}
        default, interleaved = self.rope or ((), False)
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("dynamic", "longrope"):
            raise HfConfigError(
                f"config.json: 'rope_type' is {kind!r} with mrope_section; supported: those that do "
                "not depend on the length"
            )
        return tuple(rope.get("mrope_section") or default), interleaved

    def update_text(self, hf: HfConfig, changes: Values) -> HfConfig:
        """Return ``hf`` with ``changes`` to its text keys."""
        if "text_config" not in hf:
            return {**hf, **changes}
        both = {key: changes[key] for key in self.repeated if key in changes and key in hf}
        return {**hf, **both, "text_config": {**hf["text_config"], **changes}}

    def compose(self, text: HfConfig, config: McaModelConfig) -> HfConfig:
        """Compose the file for ``config`` from the keys ``text`` of its text model."""
        inside = {**text, "model_type": self.text_model_type}
        kept = () if self.text_ties == "alone" else ("tie_word_embeddings",)
        top = {key: inside.pop(key) for key in ("architectures", "dtype", *kept)}
        top |= {key: inside[key] for key in self.repeated}
        if config.mrope is not None:
            sections = {
                "mrope_section": list(config.mrope.mrope_section),
                "mrope_interleaved": config.mrope.mrope_interleaved,
            }
            inside["rope_parameters"] = {**inside["rope_parameters"], **sections}
        return {**top, "model_type": config.model_type, "text_config": inside, **(config.vision_fields or {})}


def as_object(hf: HfConfig, key: str) -> JsonObject:
    """Return the object of ``key``.

    Raises:
        HfConfigError: It is missing, or not an object.
    """
    value = hf.get(key)
    if not isinstance(value, dict):
        raise HfConfigError(
            f"config.json: '{key}' must be an object, not {value!r:.80}; a {hf['model_type']} model needs it"
        )
    return value


def _without_sections(rope: JsonObject) -> JsonObject:
    """A rope without its sections, of which old files made a type."""
    kept = {key: value for key, value in rope.items() if key not in _MROPE}
    for key in ("rope_type", "type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    return kept


TOWER = "vision_tower."


PROJECTOR = "multi_modal_projector."


AUDIO_TOWER = "audio_tower."
