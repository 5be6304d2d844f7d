"""Triton kernels over the tokens of a row: first-order recurrences over masks with gaps, and means
over runs of a mask.

Tokens are worked on in tiles; what a tile hands to the next is one number, or two. State is float64
as in the torch versions (`roll.ops.scans`), which say what is computed; this module is imported
only where there is Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a tile, and how many a thread holds of them.
TILE = 1024
_PER_THREAD = 8
# Added to the count of what begins a run, or lies between runs: sums before it do not go on.
CUT = tl.constexpr(1 << 30)
FROM_LEFT, FROM_RIGHT = tl.constexpr(False), tl.constexpr(True)
# A row is cut into pieces, each for a program of its own, when there are too few rows to keep a GPU
# busy.
_ENOUGH_ROWS = 256
_PROGRAMS = 2048
_MAX_PIECES = 128


def tile_shape(width: int) -> dict[str, int]:
    """Launch options for rows of `width` tokens."""
    tile = min(TILE, max(16, triton.next_power_of_2(width)))
    return {"TILE": tile, "num_warps": max(1, tile // (32 * _PER_THREAD))}


def discounted_sums(
    rewards_BT: Tensor, values_BT: Tensor | None, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor | None, Tensor]:
    """(advantages, returns) of `roll.algorithms.advantages.gae`; without values (None, discounted
    returns), lam being 1.

    With E[t] = gamma V[t] + gamma lam A[t], both come from one recurrence: A[t] = r[t] - V[t] +
    E[t'], and E[t] = gamma lam r[t] + gamma (1 - lam) V[t] + gamma lam E[t'].
    """
    num_rows, width = mask_BT.shape
    dtype = torch.promote_types(rewards_BT.dtype, torch.float32)
    returns_BT = torch.empty(mask_BT.shape, dtype=dtype, device=mask_BT.device)
    advantages_BT = None if values_BT is None else torch.empty_like(returns_BT)
    if returns_BT.numel() == 0:
        return advantages_BT, returns_BT
    options = tile_shape(width)
    tiles = triton.cdiv(width, options["TILE"])
    pieces = 1
    if num_rows < _ENOUGH_ROWS:
        pieces = min(tiles, _MAX_PIECES, max(1, _PROGRAMS // num_rows))
    piece_tiles = triton.cdiv(tiles, pieces)
    pieces = triton.cdiv(tiles, piece_tiles)
    # Of every piece the map from the state behind it to the state before it: a factor and a
    # summand.
    maps = returns_BT
    if pieces > 1:
        maps = torch.empty(num_rows, 2, pieces, dtype=torch.float64, device=mask_BT.device)
    values = rewards_BT if values_BT is None else values_BT
    mask = mask_BT.view(torch.uint8)
    arguments = (
        *(rewards_BT, *rewards_BT.stride(), values, *values.stride(), mask, *mask.stride()),
        *(maps, returns_BT if advantages_BT is None else advantages_BT, returns_BT),
        *(width, piece_tiles, pieces, *_two_floats(gamma), *_two_floats(gamma * lam)),
    )
    launch: Any = _recurrence_kernel[(num_rows, pieces)]
    with torch.cuda.device_of(mask_BT):  # Triton launches on the current device
        for is_first_pass in (True, False) if pieces > 1 else (False,):
            launch(
                *arguments,
                HAS_VALUES=values_BT is not None,
                MAPS_ONLY=is_first_pass,
                PIECES=triton.next_power_of_2(pieces),
                **options,
            )
    return advantages_BT, returns_BT


def segment_means(
    x_BT: Tensor, mask_BT: Tensor, keep_BT: Tensor | None, *, backward: bool
) -> Tensor:
    """For every run of the mask: the sum of its kept entries of x over their number, on the whole
    run. `backward`: the sum of all its entries over the number of kept ones, on the kept ones."""
    out_BT = torch.empty(x_BT.shape, dtype=x_BT.dtype, device=x_BT.device)
    if out_BT.numel() == 0:
        return out_BT
    mask = mask_BT.view(torch.uint8)
    keep = mask if keep_BT is None else keep_BT.view(torch.uint8)
    launch: Any = _segment_mean_kernel[(len(x_BT),)]
    with torch.cuda.device_of(x_BT):
        launch(
            *(x_BT, *x_BT.stride(), mask, *mask.stride(), keep, *keep.stride()),
            *(out_BT, x_BT.shape[1]),
            HAS_KEEP=keep_BT is not None,
            BACKWARD=backward,
            STATE=tl.float64 if x_BT.dtype == torch.float64 else tl.float32,
            **tile_shape(x_BT.shape[1]),
        )
    return out_BT


def _two_floats(value: float) -> tuple[float, float]:
    """Numbers reach a kernel as float32; two of them hold all but the last bits of a float64."""
    high = torch.tensor(value, dtype=torch.float32).item()
    return high, value - high


@triton.jit
def after(factor, summand, next_factor, next_summand):
    """The map y -> factor y + summand, then the next one."""
    return factor * next_factor, summand * next_factor + next_summand


@triton.jit
def add_in_run(count, total, next_count, next_total):
    """Numbers and sums since the last cut."""
    is_cut = next_count >= CUT
    return tl.where(is_cut, next_count, count + next_count), tl.where(
        is_cut, next_total, total + next_total
    )


@triton.jit
def sums_in_runs(kept, summand, goes_on, run_count, run_total, REVERSE: tl.constexpr):
    """(number of kept ones, sum) from the start of its run up to each token (REVERSE: from the
    end), the run having begun with `run_count` and `run_total` in an earlier tile where `goes_on`
    never failed so far."""
    marks = kept.to(tl.int32) + tl.where(goes_on, 0, CUT)
    marks, totals = tl.associative_scan((marks, summand), 0, add_in_run, reverse=REVERSE)
    since_cut = marks >= CUT
    counts = tl.where(since_cut, marks - CUT, marks + run_count)
    return counts, tl.where(since_cut, totals, totals + run_total)


@triton.jit
def mean_of(total, count):
    return total / tl.where(count == 0, 1, count)


@triton.jit
def newest(is_set, value, next_is_set, next_value):
    """The last value that was set."""
    return is_set | next_is_set, tl.where(next_is_set != 0, next_value, value)


@triton.jit
def spread_in_runs(is_set, value, before, REVERSE: tl.constexpr):
    """The value that was set last on the way to each token; `before` where none was."""
    found, values = tl.associative_scan((is_set.to(tl.int32), value), 0, newest, reverse=REVERSE)
    return tl.where(found != 0, values, before)


@triton.jit
def pick(x, position, at):
    """x[at], position being 0, 1, 2, ..."""
    return tl.sum(tl.where(position == at, x, 0))


@triton.jit
def load_mask(mask, stride, t, inside):
    return tl.load(mask + t * stride, mask=inside, other=0) != 0


@triton.jit
def _load(x, stride, t, valid):
    return tl.load(x + t * stride, mask=valid, other=0).to(tl.float64)


@triton.jit
def _recurrence_kernel(
    rewards, rewards_b, rewards_t, values, values_b, values_t, mask, mask_b, mask_t,
    maps, advantages, returns, width, piece_tiles, pieces,
    gamma_high, gamma_low, decay_high, decay_low,
    HAS_VALUES: tl.constexpr, MAPS_ONLY: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One piece of one row, from its last tile to its first. `state` is E of the next valid token,
    see above."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    rewards += row * rewards_b
    values += row * values_b
    mask += row * mask_b
    one = tl.full((), 1.0, tl.float64)
    gamma = one * gamma_high + one * gamma_low
    decay = one * decay_high + one * decay_low
    position = tl.arange(0, TILE)
    state = tl.full((), 0.0, tl.float64)
    factor = one
    if PIECES > 1 and not MAPS_ONLY:
        number = tl.arange(0, PIECES)
        behind = (number > piece) & (number < pieces)
        piece_factors = tl.load(maps + row * 2 * pieces + number, mask=behind, other=1.0)
        piece_summands = tl.load(maps + (row * 2 + 1) * pieces + number, mask=behind, other=0.0)
        piece_factors, piece_summands = tl.associative_scan(
            (piece_factors, piece_summands), 0, after, reverse=True
        )
        state = pick(piece_summands, number, 0)
    for i in range(piece_tiles):
        t = ((piece + 1) * piece_tiles - 1 - i) * TILE + position
        # The map at t is that of token t+1, so that the scan gives the state behind t.
        follows = load_mask(mask, mask_t, t + 1, t + 1 < width)
        summand = decay * _load(rewards, rewards_t, t + 1, follows)
        if HAS_VALUES:
            summand += (gamma - decay) * _load(values, values_t, t + 1, follows)
        factors, summands = tl.associative_scan(
            (tl.where(follows, decay, 1.0), summand), 0, after, reverse=True
        )
        states = factors * state + summands
        if MAPS_ONLY:
            factor *= pick(factors, position, 0)
        else:
            inside = t < width
            valid = load_mask(mask, mask_t, t, inside)
            found = _load(rewards, rewards_t, t, valid) + states
            tl.store(returns + row * width + t, tl.where(valid, found, 0.0), mask=inside)
            if HAS_VALUES:
                found -= _load(values, values_t, t, valid)
                tl.store(advantages + row * width + t, tl.where(valid, found, 0.0), mask=inside)
        state = pick(states, position, 0)
    if MAPS_ONLY:
        tl.store(maps + row * 2 * pieces + piece, factor)
        tl.store(maps + (row * 2 + 1) * pieces + piece, state)


@triton.jit
def _segment_mean_kernel(
    x, x_b, x_t, mask, mask_b, mask_t, keep, keep_b, keep_t, out, width,
    HAS_KEEP: tl.constexpr, BACKWARD: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row: forwards to find the mean of each run, which is left at the run's end, and backwards
    to spread it."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_b
    mask += row * mask_b
    keep += row * keep_b
    out += row * width
    position = tl.arange(0, TILE)
    tiles = tl.cdiv(width, TILE)
    total = tl.full((), 0.0, tl.float64)
    count = tl.full((), 0, tl.int32)
    for i in range(tiles):
        t = i * TILE + position
        valid = load_mask(mask, mask_t, t, t < width)
        kept = valid
        if HAS_KEEP:
            kept = valid & load_mask(keep, keep_t, t, t < width)
        goes_on = valid & load_mask(mask, mask_t, t - 1, (t > 0) & (t <= width))
        summand = _load(x, x_t, t, valid if BACKWARD else kept)
        counts, totals = sums_in_runs(kept, summand, goes_on, count, total, FROM_LEFT)
        ends = valid & ~load_mask(mask, mask_t, t + 1, t + 1 < width)
        tl.store(out + t, mean_of(totals, counts), mask=ends)
        total = pick(totals, position, TILE - 1)
        count = pick(counts, position, TILE - 1)
    tl.debug_barrier()  # what one thread left at the end of a run, another picks up
    mean = tl.full((), 0.0, STATE)
    for i in range(tiles):
        t = (tiles - 1 - i) * TILE + position
        valid = load_mask(mask, mask_t, t, t < width)
        ends = valid & ~load_mask(mask, mask_t, t + 1, t + 1 < width)
        means = spread_in_runs(
            ends, tl.load(out + t, mask=ends, other=0.0).to(STATE), mean, FROM_RIGHT
        )
        if BACKWARD and HAS_KEEP:
            valid &= load_mask(keep, keep_t, t, t < width)
        tl.store(out + t, tl.where(valid, means, 0.0), mask=t < width)
        mean = pick(means, position, 0)
