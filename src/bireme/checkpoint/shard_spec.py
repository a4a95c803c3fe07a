"""Who owns which part of every tensor: one table, parameter → rule, and the arithmetic on it (no torch).

A *source* is a tensor of the checkpoint, a *parameter* is what a rank holds. One dimension of a source is split: it is
a stack of bands, each band a number of units (heads, vocabulary rows, MLP channels) of a certain width. A rank owns a
run of whole units of every band. A parameter is the owned runs of its sources, stitched in order along that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from bireme.checkpoint.names import EMBEDDING, LM_HEAD
from bireme.config import LINEAR_ATTENTION, ModelConfig, rank_shape


class Band(msgspec.Struct, frozen=True):
    """``width`` rows (or columns) for each of the units that the ModelConfig field ``units`` counts."""

    units: str
    width: int = 1


class Source(msgspec.Struct, frozen=True):
    """A checkpoint tensor by its bare name. ``bands`` stack up along the parameter's split dimension."""

    name: str
    shape: tuple[int, ...]
    bands: tuple[Band, ...] = ()


class Parameter(msgspec.Struct, frozen=True):
    """A rank's tensor and where it comes from.

    ``dim``: the split dimension of sources and parameter alike, None for a replicated parameter (one source).
    ``drop_dims``: source dimensions of size 1 that the parameter lacks. ``is_float32``: kept so in every engine dtype.
    """

    name: str
    dim: int | None
    sources: tuple[Source, ...]
    drop_dims: tuple[int, ...] = ()
    is_float32: bool = False


class Segment(msgspec.Struct, frozen=True):
    """Source elements [start, stop) along ``dim`` go to [offset, offset + stop - start) of the parameter.

    ``dim`` None: the whole source is the whole parameter.
    """

    source: Source
    dim: int | None
    start: int
    stop: int
    offset: int

    @property
    def num_elements(self) -> int:
        if self.dim is None:
            return math.prod(self.source.shape)
        return math.prod(self.source.shape) // self.source.shape[self.dim] * (self.stop - self.start)


class Shard(msgspec.Struct, frozen=True):
    """One rank's share of a parameter: the rank-local shape and the segments to stitch.

    ``num_padding``: rows at the end that no source fills; they are zero (vocabulary rows past the last).
    """

    parameter: Parameter
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    num_padding: int = 0


def parameter_table(model: ModelConfig) -> list[Parameter]:
    """Every parameter of the model with its rule, in the order of the forward pass."""
    table = [_vocabulary(EMBEDDING, model)]
    for i, layer_type in enumerate(model.layer_types):
        mixer = _linear_attention(model) if layer_type == LINEAR_ATTENTION else _full_attention(model)
        hidden = model.hidden_size
        layer = [
            _replicated("input_layernorm.weight", hidden),
            *mixer,
            _replicated("post_attention_layernorm.weight", hidden),
            *_mlp(model),
        ]
        table += [_in_layer(i, parameter) for parameter in layer]
    table.append(_replicated("norm.weight", model.hidden_size))
    if not model.tie_word_embeddings:
        table.append(_vocabulary(LM_HEAD, model))
    return table


def _linear_attention(model: ModelConfig) -> list[Parameter]:
    key = Band("linear_num_key_heads", model.linear_key_head_dim)
    value = Band("linear_num_value_heads", model.linear_value_head_dim)
    head = Band("linear_num_value_heads")
    qkv = (key, key, value)
    return [
        _rows(
            "linear_attn.in_proj.weight",
            model,
            {
                "linear_attn.in_proj_qkv.weight": qkv,
                "linear_attn.in_proj_z.weight": (value,),
                "linear_attn.in_proj_b.weight": (head,),
                "linear_attn.in_proj_a.weight": (head,),
            },
            (model.hidden_size,),
        ),
        _rows(
            "linear_attn.conv1d.weight",
            model,
            {"linear_attn.conv1d.weight": qkv},
            (1, model.linear_conv_kernel_dim),
            drop_dims=(1,),
        ),
        _rows("linear_attn.dt_bias", model, {"linear_attn.dt_bias": (head,)}),
        _rows("linear_attn.A_log", model, {"linear_attn.A_log": (head,)}, is_float32=True),
        _replicated("linear_attn.norm.weight", model.linear_value_head_dim),
        _columns("linear_attn.out_proj.weight", model, value),
    ]


def _full_attention(model: ModelConfig) -> list[Parameter]:
    # A query head's band is its query rows and its gate rows together, so a cut between heads never parts the two.
    query_and_gate = Band("num_attention_heads", 2 * model.head_dim)
    kv = Band("num_key_value_heads", model.head_dim)
    return [
        _rows(
            "self_attn.qkv_proj.weight",
            model,
            {
                "self_attn.q_proj.weight": (query_and_gate,),
                "self_attn.k_proj.weight": (kv,),
                "self_attn.v_proj.weight": (kv,),
            },
            (model.hidden_size,),
        ),
        _replicated("self_attn.q_norm.weight", model.head_dim),
        _replicated("self_attn.k_norm.weight", model.head_dim),
        _columns("self_attn.o_proj.weight", model, Band("num_attention_heads", model.head_dim)),
    ]


def _mlp(model: ModelConfig) -> list[Parameter]:
    channel = Band("intermediate_size")
    return [
        _rows(
            "mlp.gate_up_proj.weight",
            model,
            {"mlp.gate_proj.weight": (channel,), "mlp.up_proj.weight": (channel,)},
            (model.hidden_size,),
        ),
        _columns("mlp.down_proj.weight", model, channel),
    ]


def _vocabulary(name: str, model: ModelConfig) -> Parameter:
    return _rows(name, model, {name: (Band("vocab_size"),)}, (model.hidden_size,))


def _replicated(name: str, size: int) -> Parameter:
    return Parameter(name, None, (Source(name, (size,)),))


def _rows(
    name: str,
    model: ModelConfig,
    sources: dict[str, tuple[Band, ...]],
    rest: tuple[int, ...] = (),
    *,
    drop_dims: tuple[int, ...] = (),
    is_float32: bool = False,
) -> Parameter:
    """Split along dimension 0; ``rest`` is the shape behind it."""
    stacked = tuple(Source(source, (_extent(model, bands), *rest), bands) for source, bands in sources.items())
    return Parameter(name, 0, stacked, drop_dims, is_float32)


def _columns(name: str, model: ModelConfig, band: Band) -> Parameter:
    """[hidden_size, extent of ``band``], split along dimension 1."""
    return Parameter(name, 1, (Source(name, (model.hidden_size, _extent(model, (band,))), (band,)),))


def _extent(model: ModelConfig, bands: tuple[Band, ...]) -> int:
    return sum(getattr(model, band.units) * band.width for band in bands)


def _in_layer(i: int, parameter: Parameter) -> Parameter:
    prefix = f"layers.{i}."
    sources = tuple(msgspec.structs.replace(source, name=prefix + source.name) for source in parameter.sources)
    return msgspec.structs.replace(parameter, name=prefix + parameter.name, sources=sources)


def checkpoint_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Bare name → shape of every tensor that the checkpoint must hold."""
    return {source.name: source.shape for parameter in parameter_table(model) for source in parameter.sources}


def owned_units(model: ModelConfig, units: str, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """The half-open run of units that a rank owns of a ModelConfig count.

    Kv heads are shared by ``kv_replicas`` neighbouring ranks; the vocabulary is split in runs of ceil(V / tp_size), of
    which the last may be short or empty; every other count divides.

    Raises:
        ConfigError: a count that does not divide (see ``config.rank_shape``).
    """
    shape = rank_shape(model, tp_size)
    share = getattr(shape, units)
    if units == "num_key_value_heads":
        first = tp_rank // shape.kv_replicas * share
        return first, first + share
    total = getattr(model, units)
    return min(tp_rank * share, total), min((tp_rank + 1) * share, total)


def shard(parameter: Parameter, model: ModelConfig, tp_rank: int, tp_size: int) -> Shard:
    """What rank ``tp_rank`` of ``tp_size`` holds of ``parameter``, and from where.

    Raises:
        ConfigError: a count that does not divide.
    """
    dim = parameter.dim
    if dim is None:
        source = parameter.sources[0]
        return Shard(parameter, source.shape, (Segment(source, None, 0, 0, 0),))
    ranks = rank_shape(model, tp_size)
    segments: list[Segment] = []
    offset = num_padding = 0
    for source in parameter.sources:
        band_start = 0
        for band in source.bands:
            first, last = owned_units(model, band.units, tp_rank, tp_size)
            if first < last:
                start, stop = band_start + first * band.width, band_start + last * band.width
                segments.append(Segment(source, dim, start, stop, offset))
            share = getattr(ranks, band.units)
            offset += share * band.width
            num_padding += (share - (last - first)) * band.width
            band_start += getattr(model, band.units) * band.width
    shape = list(parameter.sources[0].shape)
    shape[dim] = offset
    kept = tuple(size for i, size in enumerate(shape) if i not in parameter.drop_dims)
    return Shard(parameter, kept, tuple(segments), num_padding)


def rank_shards(model: ModelConfig, tp_rank: int, tp_size: int) -> Iterator[Shard]:
    """The shards of every parameter of a rank, in the order of ``parameter_table``."""
    for parameter in parameter_table(model):
        yield shard(parameter, model, tp_rank, tp_size)
