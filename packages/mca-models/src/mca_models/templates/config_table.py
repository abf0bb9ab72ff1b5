"""Tables that translate a HF ``config.json`` to a ``McaModelConfig`` and back.

A fact that is one key is a `Field`; one that needs several keys, or computation, is a `Lens`. The tables of the
families are in the files of the families; `parts.vision_tower` implements `CompositeConfig` for vision-language models.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from mca_config.errors import HfConfigError, McaError
from mca_config.model import DEFAULTS, SECTIONS
from mca_config.model_config import McaModelConfig, require_ranges
from mca_config.types import JsonObject, Typed, Values

HfConfig = JsonObject
REQUIRED: Typed = object()

_DTYPES = ("float32", "bfloat16", "float16")
_BOOLEANS = frozenset(
    field.name
    for entry in SECTIONS.values()
    for field in dataclasses.fields(entry.cls)  # type: ignore[arg-type]
    if field.type in (bool, bool | None)
)

ORIGINAL = "original_max_position_embeddings"
_WITHIN = ("llama3", "yarn", "longrope")
"""HF's types of rope that know the context of the first training."""


class _Watched(JsonObject):
    """Dict that records which key was read last, to name it in errors."""

    last = ""

    def __getitem__(self, key: str) -> Typed:
        self.last = key
        return super().__getitem__(key)

    def get(self, key: str, default: Typed = None) -> Typed:
        self.last = key
        return super().get(key, default)


@dataclass(frozen=True)
class Field:
    """Field of ``McaModelConfig`` with its key of ``config.json``.

    Args:
        mca: Field of ``McaModelConfig``.
        hf: Key of ``config.json``.
        default: What an absent key means to ``transformers``; a function is called with the whole dict.
    """

    mca: str
    hf: str
    default: Typed = REQUIRED

    def read(self, hf: Values) -> Typed:
        """The value in ``hf`` (lists become tuples), or the default."""
        value = hf.get(self.hf)
        if value is None and self.default is not REQUIRED:
            value = self.default(hf) if callable(self.default) else self.default
        if value is None and self.default is REQUIRED:
            raise HfConfigError(f"config.json has no '{self.hf}'; a {hf.get('model_type')} model needs it")
        return tuple(value) if isinstance(value, list) else value

    def check_boolean(self, value: Typed) -> None:
        """Raise unless ``value`` is a boolean (or 0, 1 or None) where the field is one."""
        if self.mca in _BOOLEANS and not isinstance(value, int | None):
            raise HfConfigError(f"config.json: '{self.hf}' must be true or false, not {value!r:.80}")


@dataclass(frozen=True)
class Fixed:
    """A HF key for which only some values can be represented.

    Args:
        hf: Key of ``config.json``.
        allowed: The values that can be; the first is what an absent key means.
        why: What is missing otherwise.
    """

    hf: str
    allowed: tuple[Typed, ...]
    why: str

    def check(self, hf: Values) -> None:
        """Reject a value that is not allowed, by name."""
        value = hf.get(self.hf, self.allowed[0])
        if value not in self.allowed:
            raise HfConfigError(
                f"config.json: '{self.hf}' is {value!r}; supported: {_words(self.allowed)} ({self.why})"
            )


@dataclass(frozen=True)
class DropoutTogether:
    """Dropout of embeddings, which Megatron has only together with that of layers.

    Args:
        embeddings: HF's key of that of embeddings.
        layers: HF's key of that behind layers.
        default: What an absent key means.
    """

    embeddings: str
    layers: str
    default: float = 0.0

    def check(self, hf: Values) -> None:
        """Reject the first without the second, by name."""
        own, theirs = hf.get(self.embeddings, self.default), hf.get(self.layers, self.default)
        if own and not theirs:
            raise HfConfigError(
                f"config.json: '{self.embeddings}' is {own} and '{self.layers}' {theirs or 0}; supported: 0 both, or "
                "neither (Megatron drops of embeddings as of layers)"
            )


def _write_nothing(values: Values) -> HfConfig:
    return {}


@dataclass(frozen=True)
class Lens:
    """A fact of ``config.json``, or several that depend on each other, in both directions.

    Args:
        read: Return the fields of ``McaModelConfig`` for the keys of ``config.json``.
        write: Return the keys for the fields by name; by default the other keys determine the fields.
    """

    read: Callable[[HfConfig], JsonObject]
    write: Callable[[Values], HfConfig] = _write_nothing


class CompositeConfig(Protocol):
    """Layout of a ``config.json`` that holds the keys of a text model and others."""

    def text_config(self, hf: JsonObject) -> JsonObject:
        """Return the keys of the text model, as in a text-only file."""

    def other_fields(self, hf: JsonObject) -> Values:
        """Return the fields of ``McaModelConfig`` that the other keys give."""

    def update_text(self, hf: JsonObject, changes: Values) -> JsonObject:
        """Return ``hf`` with ``changes`` to its text keys."""

    def compose(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """Compose the file for ``config`` from the keys ``text`` of its text model."""


class TextOnlyConfig:
    """A ``config.json`` that describes a text model and nothing else."""

    def text_config(self, hf: JsonObject) -> JsonObject:
        """Return the keys that describe the text model."""
        return hf

    def other_fields(self, hf: JsonObject) -> Values:
        """Return the fields of ``McaModelConfig`` that the text keys do not give."""
        return {}

    def update_text(self, hf: JsonObject, changes: Values) -> JsonObject:
        """Return ``hf`` with ``changes`` to its text keys."""
        return {**hf, **changes}

    def compose(self, text: JsonObject, config: McaModelConfig) -> JsonObject:
        """Compose the file for ``config`` from the keys ``text`` of its text model."""
        return text


TEXT_ONLY = TextOnlyConfig()


CAUSAL = Fixed("is_causal", (True,), "Megatron's decoder is causal")


@dataclass(frozen=True, kw_only=True)
class ConfigTable:
    """Translation of one family's ``config.json`` to ``McaModelConfig`` and back.

    Args:
        fields: Fields that have one key each.
        defaults: What absent HF keys mean, where it is not what the fields say.
        constants: ``McaModelConfig`` fields that follow from the family alone.
        fixed: HF keys with values that cannot be represented, alone or together.
        facts: Lenses for what no single key holds; a later one wins. They write only where there is no source
            ``config.json``.
        aliases: Other names of HF keys, which win in transformers where a file has both.
        partial_rotary: Whether HF's models rotate ``partial_rotary_factor`` of a head; others rotate all of it.
        composite: Where ``config.json`` has what this table reads.
    """

    fields: tuple[Field, ...]
    defaults: Values = dataclasses.field(default_factory=dict)
    constants: Values = dataclasses.field(default_factory=dict)
    fixed: tuple[Fixed | DropoutTogether, ...] = ()
    facts: tuple[Lens, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    partial_rotary: bool = False
    composite: CompositeConfig = TEXT_ONLY

    def to_mca(self, hf: HfConfig) -> McaModelConfig:
        """The model that ``hf`` describes."""
        text = self.composite.text_config(hf)
        for part in (hf, text):
            CAUSAL.check(part)
        said = {name: text[alias] for alias, name in self.aliases.items() if alias in text}
        full = _Watched({**self.defaults, **text, **said})
        try:
            values = self._values(full) | dict(self.composite.other_fields(hf))
            config = McaModelConfig.from_fields(
                model_type=hf["model_type"], dtype=read_dtype(text), hf_config=hf, **values
            )
            return config
        except McaError:
            raise
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            raise HfConfigError(
                f"config.json: a {hf['model_type']} model cannot be made of its values ({error}; "
                f"'{full.last}' is {full.get(full.last)!r:.80})"
            ) from error

    def _values(self, hf: HfConfig) -> JsonObject:
        for fixed in self.fixed:
            fixed.check(hf)
        values = {field.mca: field.read(hf) for field in self.fields}
        for field in self.fields:
            field.check_boolean(values[field.mca])
        # before lists are made that are as long as they say
        require_ranges(values, {field.mca: field.hf for field in self.fields})
        values |= dict(self.constants) | read_rope(hf)
        for fact in self.facts:
            values |= fact.read(hf)
        if self.partial_rotary:
            _require_pairs(values)
        else:
            values["rotary_percent"] = _whole_head(values)
        return values

    def to_hf(self, config: McaModelConfig, architecture: str) -> HfConfig:
        """``config.hf_config`` with every fact that changed since brought up to date.

        Raises:
            McaError: There is no source ``config.json``, and the family's HF keys cannot say what ``config`` does.
        """
        if not config.hf_config:
            return self._from_scratch(config, architecture)
        hf = dict(config.hf_config)
        if hf.get("model_type") != config.model_type:
            raise McaError(
                f"the config.json of the source is of model_type {hf.get('model_type')!r:.80}, the model of "
                f"{config.model_type!r}; restore mca_config.json"
            )
        before = self.to_mca(hf)
        old, new = before.to_fields(), config.to_fields()
        changes = {
            field.hf: _plain(value)
            for field in self.fields
            if (value := new.get(field.mca)) != old.get(field.mca)
        }
        hf = self.composite.update_text(hf, changes) if changes else hf
        return hf if config.dtype == before.dtype else with_dtype(hf, config.dtype)

    def _from_scratch(self, config: McaModelConfig, architecture: str) -> HfConfig:
        hf: HfConfig = {
            "architectures": [architecture],
            "model_type": config.model_type,
            "dtype": config.dtype,
        }
        flat = config.to_fields()
        known = {**DEFAULTS, **flat}
        hf |= {field.hf: _plain(known.get(field.mca)) for field in self.fields}
        rope = {
            "rope_theta": config.rope.rotary_base,
            "rope_type": "default",
            **(config.rope.rope_scaling or {}),
        }
        if config.rope.rotary_percent != 1.0:
            rope["partial_rotary_factor"] = config.rope.rotary_percent
        hf |= {"rope_parameters": rope, "hidden_act": config.mlp.hidden_act}
        for fact in self.facts:
            hf |= fact.write(known)
        hf = self.composite.compose(hf, config)
        back = self.to_mca(hf).to_fields()
        for name in {**flat, **back}.keys() - {"hf_config", "extra", "layout"}:
            if back.get(name) != flat.get(name):
                raise McaError(
                    f"config.json of a {config.model_type} model cannot say that {name} is {flat.get(name)!r}: it "
                    f"would mean {back.get(name)!r}"
                )
        return hf


@dataclass(frozen=True)
class TextFamilyTable:
    """``ConfigTable`` whose text part may be of several families.

    Args:
        tables: By HF's ``model_type`` of that part.
        assumed: A part without a type is of the first.
    """

    tables: Mapping[str, ConfigTable]
    assumed: bool = False

    @cached_property
    def _first(self) -> ConfigTable:
        return next(iter(self.tables.values()))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return the fields of the first text family."""
        return self._first.fields

    def to_mca(self, hf: HfConfig) -> McaModelConfig:
        """Return the model that ``hf`` describes."""
        return self._table(hf).to_mca(hf)

    def to_hf(self, config: McaModelConfig, architecture: str) -> HfConfig:
        """Return ``config.json`` for ``config``."""
        return self.tables[config.text_model_type or ""].to_hf(config, architecture)

    def _table(self, hf: HfConfig) -> ConfigTable:
        text = hf.get("text_config")
        if self.assumed and not (isinstance(text, dict) and text.get("model_type")):
            return self._first
        kind = str(text.get("model_type") if isinstance(text, dict) else None)
        if kind not in self.tables:
            raise HfConfigError(
                f"config.json: text_config is of model_type {kind!r:.80}; supported in a {hf['model_type']} model: "
                f"{', '.join(self.tables)}"
            )
        return self.tables[kind]


def _require_pairs(values: JsonObject) -> None:
    """Raise if a head rotates an odd number of its dimensions: RoPE rotates them in pairs."""
    width, share = values["kv_channels"], values["rotary_percent"]
    if (rotated := int(width * share)) % 2:
        raise HfConfigError(
            f"config.json: 'partial_rotary_factor' is {share:g}, which rotates {rotated} of the {width} dimensions of "
            "a head; expected an even number, as they are rotated in pairs"
        )


def _whole_head(values: Values) -> float:
    """Return the rotated share of a head without partial RoPE: transformers ignores the factor of an unscaled rope."""
    percent, scaling = values["rotary_percent"], values["rope_scaling"]
    if percent != 1.0 and scaling is not None:
        raise HfConfigError(
            f"config.json: 'partial_rotary_factor' is {percent} with rope_type {scaling['rope_type']!r}; supported: "
            "1.0 (transformers fails with it in this family)"
        )
    return 1.0


QUANTIZATION = "quantization_config"
"""Key of the quantisation of the stored weights, which all readers trust."""


def without_quantization(hf: Values) -> JsonObject:
    """A ``config.json`` of weights that are not quantised; transformers looks at its top and into its text part."""
    plain = {key: value for key, value in hf.items() if key != QUANTIZATION}
    text = plain.get("text_config")
    if isinstance(text, dict) and QUANTIZATION in text:
        plain["text_config"] = {key: value for key, value in text.items() if key != QUANTIZATION}
    return plain


_DTYPE_KEYS = ("dtype", "torch_dtype")


def with_dtype(hf: Values, dtype: str) -> HfConfig:
    """Return ``hf`` for the model in ``dtype``, with the parts that have their own dtype key."""
    parts = {
        part: {**value, **{key: dtype for key in _DTYPE_KEYS if key in value}}
        for part, value in hf.items()
        if isinstance(value, dict) and part.endswith("_config") and part != QUANTIZATION
    }
    own = [key for key in _DTYPE_KEYS if key in hf] or ["dtype"]
    return {**hf, **parts, **dict.fromkeys(own, dtype)}


def read_dtype(hf: Values) -> Literal["float32", "bfloat16", "float16"]:
    """The weights' dtype: ``dtype``, or ``torch_dtype`` as transformers 4 spelled it; float32 if neither."""
    value = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise HfConfigError(f"config.json: 'dtype' is {value!r}; supported: {_words(_DTYPES)}")
    return name  # type: ignore[return-value]


def read_rope(hf: Values) -> JsonObject:
    """``rotary_base`` and ``rope_scaling`` from transformers 5's ``rope_parameters`` or 4's two keys."""
    given = (
        hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    )  # where both are there, as transformers 5
    if not isinstance(given, dict):
        raise HfConfigError(
            f"config.json: 'rope_parameters' (or 'rope_scaling') must be an object, not {given!r:.80}"
        )
    rope = dict(given)
    base = rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if kind in _WITHIN and (original := _original_context(rope, hf)):
        rope[ORIGINAL] = original
    percent = rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    for name, value in (("rope_theta", base), ("partial_rotary_factor", percent)):
        if not isinstance(value, int | float):
            raise HfConfigError(f"config.json: '{name}' must be a number, not {value!r:.80}")
    scaling = None if kind == "default" else {"rope_type": kind, **rope}
    return {"rotary_base": float(base), "rope_scaling": scaling, "rotary_percent": float(percent)}


def _original_context(rope: Values, hf: Values) -> Typed:
    """Return the original context: the key outside of RoPE wins; the default is the full context."""
    return hf.get(ORIGINAL) or rope.get(ORIGINAL) or hf.get("max_position_embeddings")


def is_moe_layer(values: Values, layer: int) -> bool:
    """Return whether decoder ``layer`` has experts."""
    flags = values["moe_layer_freq"]
    return values["num_moe_experts"] is not None and (flags is None or bool(flags[layer]))


def is_mamba_layer(values: Values, layer: int) -> bool:
    """Return whether decoder ``layer`` is a Mamba layer."""
    return bool(values["layer_types"] and values["layer_types"][layer] == "mamba")


def head_dim(hf: Values) -> int:
    """HF's default head dimension."""
    return int(hf["hidden_size"] // hf["num_attention_heads"])


def dense_fields(*, tied: bool = False, eps: float = 1e-6) -> tuple[Field, ...]:
    """Return the fields of the sizes of every decoder-only transformer."""
    return (
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("num_query_groups", "num_key_value_heads", lambda hf: hf["num_attention_heads"]),
        Field("kv_channels", "head_dim", head_dim),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_position_embeddings"),
        Field("layernorm_epsilon", "rms_norm_eps", eps),
        Field("tie_word_embeddings", "tie_word_embeddings", tied),
        Field("init_method_std", "initializer_range", 0.02),
        Field("pad_token_id", "pad_token_id", None),
        Field("attention_dropout", "attention_dropout", 0.0),
    )


def norm_epsilon(fields: Iterable[Field], key: str) -> tuple[Field, ...]:
    """``fields`` with HF's ``key`` for the epsilon of norms."""
    return tuple(
        dataclasses.replace(field, hf=key) if field.mca == "layernorm_epsilon" else field for field in fields
    )


def _no_bias(hf: str, alone: str) -> Fixed:
    return Fixed(hf, (False,), f"Megatron has no bias on {alone}")


NO_ATTENTION_BIAS = _no_bias("attention_bias", "the attention projections alone, output included")
NO_MLP_BIAS = _no_bias("mlp_bias", "the MLP alone")
SILU = Fixed("hidden_act", ("silu",), "this family's gated MLP is built with SwiGLU")
SWIGLU_WITHOUT_BIASES = (SILU, NO_ATTENTION_BIAS, NO_MLP_BIAS)
RELU2 = Fixed("hidden_act", ("relu2",), "this family's MLP")
RELU2_MLP = {"hidden_act": "relu2", "gated_linear_unit": False}
GELU = "gelu_pytorch_tanh"
GELU_SANDWICH: Values = {
    "hidden_act": GELU,
    "layernorm_zero_centered_gamma": True,
    "norm_placement": "sandwich",
}
GELU_ONLY = Fixed("hidden_activation", (GELU,), "Gemma's gated MLP")
NO_BIDIRECTIONAL = Fixed("use_bidirectional_attention", (False, None), "Megatron's decoder is causal")
BOTH = "Megatron has biases on all linears or on none"


def _plain(value: Typed) -> Typed:
    return list(value) if isinstance(value, tuple) else value


def _words(values: Iterable[Typed]) -> str:
    return ", ".join(repr(value) for value in values)
