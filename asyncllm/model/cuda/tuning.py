"""Which kernel does what in a step of a given size, and with which block sizes.

Runs on the engine thread while it opens; owns nothing. Invariant: whatever the model's shape, the plan names only
kernels that can compute it; torch's own products are the default.

The sizes are the winners of measurements on an H200 with two shapes (hidden 1024 and 4096, head_dim 128); what won
there in between, and what did not, is written in `benchmarks/gpu_notes.md`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from asyncllm.model.model_config import ModelConfig

__all__ = [
    "DecodeTile",
    "OneRow",
    "OneRowPlan",
    "PromptTile",
    "RowsPlan",
    "StepPlan",
    "Tiled",
    "can_fuse",
    "default_step_tokens",
    "invariant_block",
    "plan_step",
    "row_sizes",
    "token_sizes",
]

_LARGE_HIDDEN: Final = 2048
_FEW_ROWS: Final = 16
_SOME_ROWS: Final = 64
_MANY_ROWS: Final = 256
_LEAST_TILE: Final = 32
_ONE_ROW_PROGRAMS: Final = 128  # about one a multiprocessor
_MOST_GROUP: Final = 16
_STEP_SECONDS: Final = 0.016
_OPERATIONS_PER_SECOND: Final = 5e12  # of a multiprocessor, in large products of 16 bits
_MOST_STEP_TOKENS: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneRow:
    """Block sizes of `one_row_product`."""

    rows: int
    tile: int
    warps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """Block sizes of `tiled_product`."""

    block: int
    width: int
    tile: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """Block sizes of `decode_attention`, and a row's parts: `splits`, or fewer of `least` keys."""

    tile: int
    splits: int
    warps: int
    stages: int
    least: int = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptTile:
    """Block sizes of `prompt_attention`."""

    block: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneRowPlan:
    """A step of one row: five kernels a layer, each launched while the one before runs.

    Args:
        qkv, o, gate_up, down, head: the products.
        decode: attention, with head norms, rope and the KV store inside.
    """

    qkv: OneRow
    o: OneRow
    gate_up: OneRow
    down: OneRow
    head: OneRow
    decode: DecodeTile
    dependent: Final = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsPlan:
    """A step of any number of rows; None stands for torch's own product.

    Args:
        qkv, o, gate_up, down, head: the products.
        decode: attention of rows of one token.
        fused: head norms, rope and the KV store happen inside of it.
        dependent: kernels start before the one before has ended (programmatic dependent launch).
    """

    qkv: Tiled | None = None
    o: Tiled | None = None
    gate_up: Tiled | None = None
    down: Tiled | None = None
    head: Tiled | None = None
    decode: DecodeTile
    fused: bool = False
    dependent: bool = False


StepPlan: TypeAlias = OneRowPlan | RowsPlan


@dataclasses.dataclass(frozen=True, slots=True)
class _Shapes:
    """The products of a model: outputs (of the gate alone) and inputs of each."""

    qkv: tuple[int, int]
    o: tuple[int, int]
    gate_up: tuple[int, int]
    down: tuple[int, int]
    head: tuple[int, int]

    @classmethod
    def of(cls, config: ModelConfig) -> _Shapes:
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_heads * config.head_dim
        return cls(
            qkv=(heads + 2 * config.num_kv_heads * config.head_dim, hidden),
            o=(hidden, heads),
            gate_up=(inner, hidden),
            down=(hidden, inner),
            head=(config.vocab_size, hidden),
        )


def can_fuse(config: ModelConfig) -> bool:
    """Tell whether the kernels take heads of this model's shape."""
    power = config.head_dim & (config.head_dim - 1) == 0
    return power and 32 <= config.head_dim <= 256 and config.num_heads // config.num_kv_heads <= _MOST_GROUP  # noqa: PLR2004


def row_sizes(most: int) -> list[int]:
    """Return the numbers of rows that decode steps are padded to: few where they differ little in time."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, most + 64, 64)]
    return [*(size for size in sizes if size < most), most]


def token_sizes(most: int) -> list[int]:
    """Return the numbers of tokens that mixed steps are padded to: two between powers of two."""
    sizes = [size * 2**power // 4 for power in range(6, 24) for size in (4, 5, 6)]
    return [*(size for size in sizes if size < most), most]


def default_step_tokens(config: ModelConfig, processors: int) -> int:
    """Return how many tokens a step of prompts may have, so that neighbours' tokens wait for tens of milliseconds.

    Args:
        config: the model's shape.
        processors: multiprocessors of the GPU.
    """
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # q and o, k and v
    operations = 2 * config.num_layers * hidden * (heads * width + 3 * inner)  # of a token
    tokens = _STEP_SECONDS * _OPERATIONS_PER_SECOND * processors / operations
    return min(_MOST_STEP_TOKENS, max(1, round(tokens / 128)) * 128)


def plan_step(config: ModelConfig, rows: int, *, decodes: bool) -> StepPlan:
    """Return the plan of a step.

    Args:
        config: the model's shape.
        rows: of the step, padded.
        decodes: whether every row has one token.
    """
    if not decodes:
        return RowsPlan(decode=DecodeTile(tile=64, splits=4, warps=4, stages=2, least=512))
    if rows == 1 and (plan := _one_row_plan(config)) is not None:
        return plan
    decode = _decode_tile(rows * config.num_kv_heads)
    if config.hidden_size > _LARGE_HIDDEN:
        return _few_rows_plan(config, rows, decode) if rows <= _FEW_ROWS else RowsPlan(decode=decode)
    if rows <= _SOME_ROWS:
        return _few_rows_plan(config, rows, decode)
    return _many_rows_plan(config, rows, decode) if rows <= _MANY_ROWS else RowsPlan(decode=decode)


def _decode_tile(programs: int) -> DecodeTile:
    """Return the block sizes of attention for this many rows times kv heads: the fewer, the more parts."""
    if programs <= 32:  # noqa: PLR2004
        return DecodeTile(tile=64, splits=16, warps=4, stages=2)
    if programs <= 320:  # noqa: PLR2004
        return DecodeTile(tile=64, splits=4, warps=4, stages=2, least=64 if programs <= 128 else 256)  # noqa: PLR2004
    if programs < 1536:  # noqa: PLR2004
        return DecodeTile(tile=64, splits=1, warps=4, stages=2)
    return DecodeTile(tile=32, splits=1, warps=2, stages=3)


def _one_row_plan(config: ModelConfig) -> OneRowPlan | None:
    """Return the plan for one row, unless a weight's shape makes its tiles too small to be fast."""
    shapes, programs = _Shapes.of(config), _ONE_ROW_PROGRAMS
    if config.hidden_size <= _LARGE_HIDDEN:
        wishes = ((16, 1024, 4), (2, 2048, 4), (2, 1024, 2), (8, 1024, 4), (4, 1024, 4))
    else:
        wishes = ((4, 2048, 4), (4, 2048, 4), (2, 4096, 8), (4, 2048, 4), (4, 2048, 4))
        programs *= 2
    each = (shapes.qkv, shapes.o, shapes.gate_up, shapes.down, shapes.head)
    fitted = (_one_row(*shape, *wish) for shape, wish in zip(each, wishes, strict=True))
    products = [product for product in fitted if product is not None]
    if len(products) < len(each):
        return None
    qkv, o, gate_up, down, head = products
    splits = _power(programs // config.num_kv_heads, most=32)
    decode = DecodeTile(tile=64, splits=splits, warps=4, stages=1, least=0)
    return OneRowPlan(qkv=qkv, o=o, gate_up=gate_up, down=down, head=head, decode=decode)


def _one_row(outputs: int, inputs: int, rows: int, tile: int, warps: int) -> OneRow | None:
    """Fit block sizes to a weight: no tile may be cut; None if that makes them too small to be fast."""
    while tile > 64 and inputs % tile:  # noqa: PLR2004
        tile //= 2
        rows *= 2
    while rows > 1 and outputs % rows:
        rows //= 2
    return None if inputs % tile or inputs // tile > 16 else OneRow(rows=rows, tile=tile, warps=warps)  # noqa: PLR2004


def _few_rows_plan(config: ModelConfig, rows: int, decode: DecodeTile) -> RowsPlan:
    """Own products throughout; with dependent launches once their tiles are large."""
    shapes = _Shapes.of(config)
    few, small = rows <= _FEW_ROWS, config.hidden_size <= _LARGE_HIDDEN
    block = 16 if few else 32 if rows <= 2 * _FEW_ROWS else 64
    return RowsPlan(
        qkv=_tiled(*shapes.qkv, Tiled(block=block, width=32, tile=256)),
        o=_tiled(
            *shapes.o,
            Tiled(block=block, width=32, tile=128, splits=4, stages=4)
            if few
            else Tiled(block=block, width=16, tile=256, splits=2),
        ),
        gate_up=_tiled(*shapes.gate_up, Tiled(block=block, width=32, tile=128)),
        down=_tiled(*shapes.down, Tiled(block=block, width=32, tile=256, splits=4)),
        decode=decode,
        fused=few and small,
        dependent=rows > 2 * _FEW_ROWS,
    )


def _many_rows_plan(config: ModelConfig, rows: int, decode: DecodeTile) -> RowsPlan:
    """Own products, but torch's for the widest one, and dependent launches between what is left."""
    shapes = _Shapes.of(config)
    down = Tiled(block=64, width=64, tile=64, splits=4, stages=4)
    if rows > 3 * _SOME_ROWS:
        down = Tiled(block=128, width=64, tile=64, splits=4, warps=8, stages=4)
    return RowsPlan(
        qkv=_tiled(*shapes.qkv, Tiled(block=64, width=64, tile=128)),
        o=_tiled(*shapes.o, Tiled(block=128, width=32, tile=128, splits=4 if rows <= 2 * _SOME_ROWS else 2)),
        down=_tiled(*shapes.down, down),
        decode=decode,
        dependent=True,
    )


def _tiled(outputs: int, inputs: int, wish: Tiled) -> Tiled | None:
    """Fit block sizes to a weight; None: leave the product to torch."""
    splits, tile = wish.splits, wish.tile
    while splits > 1 and inputs % splits:
        splits //= 2
    while tile > _LEAST_TILE and (inputs // splits) % tile:
        tile //= 2
    if outputs % wish.width or (inputs // splits) % tile:
        return None
    return dataclasses.replace(wish, splits=splits, tile=tile)


def _power(value: int, *, most: int) -> int:
    """Return the largest power of two <= value, from 1 to `most`."""
    return min(most, 1 << max(0, value.bit_length() - 1))


def invariant_block(outputs: int, inputs: int) -> Tiled | None:
    """Return the tiles of a product that are the same for every number of rows; None if the weight has no such."""
    tile = next((tile for tile in (64, 32, 16) if inputs % tile == 0), None)
    return None if tile is None else Tiled(block=64, width=128 if outputs >= 128 else 16, tile=tile)  # noqa: PLR2004
