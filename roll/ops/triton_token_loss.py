"""A Triton kernel for a whole policy loss: one program reads a row of tokens and gives its share of the loss, of every
metric and of the gradient; the program that is done last adds the rows up.

`roll.algorithms.policy_loss` says what is computed; this module is imported only where there is Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from roll.ops.triton_scans import (
    FROM_LEFT,
    FROM_RIGHT,
    load_mask,
    mean_of,
    pick,
    spread_in_runs,
    sums_in_runs,
)

# Columns of the table that has one line for each row of the batch.
NUM_SUMS = tl.constexpr(11)  # these add up over rows
NUM_COLUMNS = tl.constexpr(13)  # and the largest and smallest ratio
MAX_LOG_RATIO = tl.constexpr(20.0)
MAX_K3 = tl.constexpr(10.0)


@triton.jit
def _clamp(x, low, high):
    """Lets NaN through, unlike tl.clamp."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _surrogate(ratio, advantage, log_prob, gap, first, second, third, KIND: tl.constexpr):
    """(loss, its derivative by the log-prob, and by that of the ratio, whether a bound decided it) of every token;
    gap: the log-ratio of the token alone."""
    nothing = tl.zeros_like(ratio)
    clipped = nothing != 0.0
    loss, by_log_ratio = nothing, nothing
    weight = nothing + 1.0  # of -A log p, in all kinds but PPO
    if KIND == "ppo" or KIND == "ppo_dual":
        free = ratio * advantage
        bounded = _clamp(ratio, first, second) * advantage
        clipped = bounded < free
        loss = -tl.where(clipped, bounded, free)
        by_log_ratio = tl.where(clipped, 0.0, -free)
        weight = nothing
        if KIND == "ppo_dual":
            limit = -third * advantage
            limited = (advantage < 0.0) & (loss > limit)
            loss = tl.where(limited, limit, loss)
            by_log_ratio = tl.where(limited, 0.0, by_log_ratio)
    elif KIND == "tis" or KIND == "cispo" or KIND == "cispo_drop":
        weight = _clamp(ratio, first, second)
        clipped = weight != ratio
        if KIND == "cispo_drop":
            past = ((advantage > 0.0) & (ratio > second)) | ((advantage < 0.0) & (ratio < first))
            weight = tl.where(past, 0.0, weight)
    elif KIND == "topr":
        taper = tl.where(ratio > third, third, ratio)
        weight = tl.where(advantage > 0.0, first, second * taper)
        clipped = (advantage <= 0.0) & (ratio > third)
    by_log_prob = -weight * advantage
    if KIND != "ppo" and KIND != "ppo_dual":
        loss = by_log_prob * log_prob
    if KIND == "kimi15":
        bounded_gap = _clamp(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        loss += 0.5 * first * bounded_gap * bounded_gap
        by_log_prob += tl.where(tl.abs(gap) > MAX_LOG_RATIO, 0.0, first * gap)
    return loss, by_log_prob, by_log_ratio, clipped


@triton.jit
def _kl(delta, KIND: tl.constexpr):
    """(estimate, its derivative) from the difference of two log-probs."""
    if KIND == "kl":
        return delta, tl.zeros_like(delta) + 1.0
    elif KIND == "abs":
        return tl.abs(delta), tl.where(delta > 0.0, 1.0, tl.where(delta < 0.0, -1.0, delta))
    elif KIND == "mse":
        return 0.5 * delta * delta, delta
    else:
        x = _clamp(-delta, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        growth = tl.exp(x) - 1.0
        # e^x - 1 - x would lose all its digits near 0; there the series has them.
        series = 1.0 + x / 6.0 * (1.0 + x / 7.0 * (1.0 + x / 8.0 * (1.0 + x / 9.0)))
        series = 1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * series))
        is_small = tl.abs(x) < 0.5
        small = 0.5 * x * x * series
        value = tl.where(is_small, small, growth - x)
        growth = tl.where(is_small, small + x, growth)
        saturated = tl.abs(delta) > MAX_LOG_RATIO
        slope = delta
        if KIND == "k3":
            saturated |= value > MAX_K3
            slope = -growth
        return tl.where(value > MAX_K3, MAX_K3, value), tl.where(saturated, 0.0, slope)


@triton.jit
def _count(pointer, number):
    """A denominator, which lies on the device or came with the launch."""
    value = tl.full((), 0.0, tl.float64) + number
    if pointer is not None:
        value = tl.load(pointer).to(tl.float64)
    return value


@triton.jit
def _kept(valid, keep, t, inside):
    """Tokens of the mask that a filter left."""
    if keep is not None:
        valid = valid & load_mask(keep, 1, t, inside)
    return valid


@triton.jit
def _load(x, t, valid):
    return tl.load(x + t, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _row_means(
    log_probs, old, mask, keep, run_means, width, RATIO: tl.constexpr, TILE: tl.constexpr
):
    """(number of kept tokens, sum of their log-ratios); the mean of each run is left at its end."""
    position = tl.arange(0, TILE)
    row_total = tl.full((), 0.0, tl.float64)
    run_total = row_total
    num_kept = tl.full((), 0, tl.int32)
    run_count = num_kept
    for i in range(tl.cdiv(width, TILE)):
        t = i * TILE + position
        valid = load_mask(mask, 1, t, t < width)
        kept = _kept(valid, keep, t, t < width)
        num_kept += tl.sum(kept.to(tl.int32))
        if RATIO != "token":
            gap = (_load(log_probs, t, kept) - _load(old, t, kept)).to(tl.float64)
            row_total += tl.sum(gap)
            if RATIO == "segment":
                goes_on = valid & load_mask(mask, 1, t - 1, (t > 0) & (t < width))
                counts, totals = sums_in_runs(kept, gap, goes_on, run_count, run_total, FROM_LEFT)
                ends = valid & ~load_mask(mask, 1, t + 1, t + 1 < width)
                tl.store(run_means + t, mean_of(totals, counts), mask=ends)
                run_total = pick(totals, position, TILE - 1)
                run_count = pick(counts, position, TILE - 1)
    return num_kept, row_total


@triton.jit
def _add_through_means(
    gradient, mask, keep, run_shares, row_share, width, RATIO: tl.constexpr, TILE: tl.constexpr
):
    """Adds to the gradient of each kept token its share of what reached the mean of its run, or of its row."""
    position = tl.arange(0, TILE)
    share = row_share
    for i in range(tl.cdiv(width, TILE)):
        t = i * TILE + position
        valid = load_mask(mask, 1, t, t < width)
        kept = _kept(valid, keep, t, t < width)
        shares = tl.zeros_like(position).to(tl.float32) + share
        if RATIO == "segment":
            starts = valid & ~load_mask(mask, 1, t - 1, (t > 0) & (t < width))
            shares = spread_in_runs(
                starts, tl.load(run_shares + t, mask=starts, other=0.0), shares, FROM_LEFT
            )
            share = pick(shares, position, TILE - 1)
        direct = tl.load(gradient + t, mask=kept, other=0.0)
        tl.store(gradient + t, direct + shares, mask=kept)


@triton.jit
def _add_rows(lines, num_rows, results, loss, pg_coef, kl_coef, entropy_coef):
    """results: the total, the columns of the table, the ratios that are too high or too low; loss: the total again, in
    its own dtype."""
    column = tl.arange(0, 16)
    sums = tl.zeros((16,), tl.float64)
    largest = tl.full((16,), float("-inf"), tl.float64)
    smallest = tl.full((16,), float("inf"), tl.float64)
    for start in range(0, num_rows, 64):
        row = start + tl.arange(0, 64)
        inside = (row < num_rows)[:, None] & (column < NUM_COLUMNS)[None, :]
        found = tl.load(
            lines + row[:, None].to(tl.int64) * NUM_COLUMNS + column[None, :],
            mask=inside,
            other=0.0,
        )
        sums += tl.sum(found, axis=0)
        largest = tl.maximum(largest, tl.max(tl.where(inside, found, float("-inf")), axis=0))
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, found, float("inf")), axis=0))
    is_nan = sums != sums
    extremes = tl.where(column == NUM_SUMS, largest, smallest)
    values = tl.where((column < NUM_SUMS) | is_nan, sums, extremes)
    weighted_pg, kl, entropy = pick(sums, column, 1), pick(sums, column, 2), pick(sums, column, 3)
    total = pg_coef * (weighted_pg + kl_coef * kl) - entropy_coef * entropy
    tl.store(results, total)
    tl.store(loss, total)
    tl.store(results + 1 + column, values, mask=column < NUM_COLUMNS)
    tl.store(results + 1 + NUM_COLUMNS, pick(sums, column, 4) + pick(sums, column, 5))


@triton.jit
def token_loss_kernel(  # noqa: PLR0915, all of it shares what one read brought
    log_probs, old, advantages, mask, keep, is_weights, reference, entropy, row_weights,
    gradient, spread, entropy_gradient, table, results, loss,
    log_probs_b, old_b, advantages_b, mask_b, keep_b, is_weights_b, reference_b, entropy_b,
    tokens_at, num_tokens, sequences_at, num_sequences, norm_at, norm_factor,
    first, second, third, low, high, pg_coef, kl_coef, entropy_coef, width,
    RATIO: tl.constexpr, THROUGH_MEANS: tl.constexpr, SURROGATE: tl.constexpr, KL: tl.constexpr,
    AGGREGATION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row: forwards for the number of its tokens and the means of its log-ratios, backwards for loss, metrics and
    gradient, and once more forwards where a gradient goes through such a mean. What is None is not there. table: a
    zero, to count the programs that are done, then a line for each row."""
    row = tl.program_id(0).to(tl.int64)
    log_probs += row * log_probs_b
    old += row * old_b
    advantages += row * advantages_b
    mask += row * mask_b
    if keep is not None:
        keep += row * keep_b
    if is_weights is not None:
        is_weights += row * is_weights_b
    if reference is not None:
        reference += row * reference_b
    if entropy is not None:
        entropy += row * entropy_b
    if gradient is not None:
        gradient += row * width
    if spread is not None:
        spread += row * width
    if entropy_gradient is not None:
        entropy_gradient += row * width
    position = tl.arange(0, TILE)
    zero = tl.full((), 0.0, tl.float64)

    num_kept, row_total = _row_means(log_probs, old, mask, keep, spread, width, RATIO, TILE)
    if RATIO == "segment":
        tl.debug_barrier()  # what one thread left at the end of a run, another picks up
    divisor = tl.where(num_kept == 0, 1, num_kept).to(tl.float64)
    tokens = _count(tokens_at, num_tokens)
    tokens = tl.where(tokens < 1.0, 1.0, tokens)
    sequences = _count(sequences_at, num_sequences)
    sequences = tl.where(sequences < 1.0, 1.0, sequences)
    if AGGREGATION == "token-mean":
        share = 1.0 / tokens
    elif AGGREGATION == "seq-mean-token-sum":
        share = 1.0 / sequences
    elif AGGREGATION == "seq-mean-token-mean":
        share = 1.0 / (divisor * sequences)
    else:
        share = 1.0 / _count(norm_at, norm_factor)
    row_weight = zero + 1.0
    if row_weights is not None:
        row_weight = tl.load(row_weights + row, mask=num_kept > 0, other=0.0).to(tl.float64)
    # Float64, and so are the products with them: the gradient is rounded once, when it is stored.
    pg_share = pg_coef * row_weight * share
    kl_share = pg_coef * kl_coef * share

    pg_sum, kl_sum, entropy_sum, high_sum, low_sum, clip_sum = zero, zero, zero, zero, zero, zero
    ratio_sum, square_sum, gap_sum, through_mean = zero, zero, zero, zero
    largest = tl.full((), float("-inf"), tl.float32)
    smallest = tl.full((), float("inf"), tl.float32)
    run_mean = tl.full((), 0.0, tl.float32)
    run_total = zero
    run_count = tl.full((), 0, tl.int32)
    tiles = tl.cdiv(width, TILE)
    for i in range(tiles):
        t = (tiles - 1 - i) * TILE + position
        inside = t < width
        valid = load_mask(mask, 1, t, inside)
        kept = _kept(valid, keep, t, inside)
        behind = load_mask(mask, 1, t + 1, (t + 1 < width) & (RATIO == "segment"))
        log_prob = _load(log_probs, t, kept)
        gap = log_prob - _load(old, t, kept)
        mean = gap
        if RATIO == "sequence":
            mean = tl.where(kept, (row_total / divisor).to(tl.float32), 0.0)
        elif RATIO == "segment":
            ends = valid & ~behind
            means = spread_in_runs(
                ends, tl.load(spread + t, mask=ends, other=0.0), run_mean, FROM_RIGHT
            )
            run_mean = pick(means, position, 0)
            mean = tl.where(kept, means, 0.0)
        log_ratio = _clamp(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = tl.exp(log_ratio)
        token_loss, by_log_prob, by_log_ratio, clipped = _surrogate(
            ratio, _load(advantages, t, kept), log_prob, gap, first, second, third, SURROGATE
        )
        scale = tl.zeros_like(ratio).to(tl.float64) + pg_share
        if is_weights is not None:
            is_weight = _load(is_weights, t, kept)
            token_loss *= is_weight
            scale *= is_weight
        direct = scale * by_log_prob
        by_log_ratio = tl.where(tl.abs(mean) > MAX_LOG_RATIO, 0.0, scale * by_log_ratio)
        if reference is not None:
            kl, by_delta = _kl(log_prob - _load(reference, t, kept), KL)
            kl_sum += tl.sum(kl)
            direct += kl_share * by_delta
        if entropy is not None:
            entropy_sum += tl.sum(_load(entropy, t, kept))
        if entropy_gradient is not None:
            slope = (-entropy_coef * share).to(tl.float32)
            tl.store(entropy_gradient + t, tl.where(kept, slope, 0.0), mask=inside)
        if gradient is not None:
            if not THROUGH_MEANS:
                direct += by_log_ratio
            tl.store(gradient + t, tl.where(kept, direct, 0.0), mask=inside)
            indirect = tl.where(kept, by_log_ratio, 0.0)
            if THROUGH_MEANS and RATIO == "sequence":
                through_mean += tl.sum(indirect)
            elif THROUGH_MEANS and RATIO == "segment":
                counts, totals = sums_in_runs(
                    kept, indirect, valid & behind, run_count, run_total, FROM_RIGHT
                )
                run_total = pick(totals, position, 0)
                run_count = pick(counts, position, 0)
                # What each token of a run receives waits at its start. No end of a run is still needed there.
                starts = valid & ~load_mask(mask, 1, t - 1, (t > 0) & inside)
                tl.store(spread + t, mean_of(totals, counts), mask=starts)
        pg_sum += tl.sum(tl.where(kept, token_loss, 0.0))
        clip_sum += tl.sum((kept & clipped).to(tl.float32))
        ratio_sum += tl.sum(tl.where(kept, ratio, 0.0))
        square_sum += tl.sum(0.5 * gap * gap)
        gap_sum += tl.sum(gap)
        high_sum += tl.sum((kept & (ratio > high)).to(tl.float32))
        low_sum += tl.sum((kept & (ratio < low)).to(tl.float32))
        largest = tl.maximum(largest, tl.max(tl.where(kept, ratio, float("-inf"))))
        smallest = tl.minimum(smallest, tl.min(tl.where(kept, ratio, float("inf"))))

    if gradient is not None and THROUGH_MEANS:
        tl.debug_barrier()
        row_share = (through_mean / divisor).to(tl.float32)
        _add_through_means(gradient, mask, keep, spread, row_share, width, RATIO, TILE)
    line = table + 1 + row * NUM_COLUMNS
    tl.store(line, pg_sum * share)
    tl.store(line + 1, pg_sum * share * row_weight)
    tl.store(line + 2, kl_sum * share)
    tl.store(line + 3, entropy_sum * share)
    tl.store(line + 4, high_sum / tokens)
    tl.store(line + 5, low_sum / tokens)
    tl.store(line + 6, clip_sum * share)
    tl.store(line + 7, ratio_sum / (divisor * sequences))
    tl.store(line + 8, square_sum * share)
    tl.store(line + 9, gap_sum * share)
    tl.store(line + 10, num_kept)
    # Maximum and minimum pass over NaN; the sum does not.
    is_nan = ratio_sum != ratio_sum
    tl.store(line + 11, tl.where(is_nan, ratio_sum, largest))
    tl.store(line + 12, tl.where(is_nan, ratio_sum, smallest))

    tl.debug_barrier()  # all threads have stored what they had to before one of them says so
    done_before = tl.atomic_add(table.to(tl.pointer_type(tl.int32)), 1, sem="acq_rel")
    if done_before == tl.num_programs(0) - 1:
        _add_rows(table + 1, tl.num_programs(0), results, loss, pg_coef, kl_coef, entropy_coef)
