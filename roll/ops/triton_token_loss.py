"""Triton kernels for a whole policy loss: one program reads a row of tokens and gives its share of the loss, of every
metric and of the gradient; a second kernel adds the rows up.

`roll.algorithms.policy_loss` says what is computed; this module is imported only where there is Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from roll.ops.triton_scans import add_in_run, load_mask, newest, pick

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
def _surrogate(ratio, advantage, log_prob, log_ratio, first, second, third, KIND: tl.constexpr):
    """(loss, its derivative by the log-prob, and by the log-ratio, whether a bound decided it) of every token."""
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
        loss += 0.5 * first * log_ratio * log_ratio
        by_log_ratio = first * log_ratio
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
        saturated = (value > MAX_K3) | (tl.abs(delta) > MAX_LOG_RATIO)
        return tl.where(value > MAX_K3, MAX_K3, value), tl.where(saturated, 0.0, -growth)


@triton.jit
def _count(pointer, number, ON_DEVICE: tl.constexpr):
    """A denominator, which lies on the device or came with the launch."""
    value = tl.full((), 0.0, tl.float64) + number
    if ON_DEVICE:
        value = tl.load(pointer).to(tl.float64)
    return value


@triton.jit
def _kept(valid, keep, t, inside, HAS_KEEP: tl.constexpr):
    """Tokens of the mask that a filter left."""
    if HAS_KEEP:
        valid = valid & load_mask(keep, 1, t, inside)
    return valid


@triton.jit
def _load(x, t, valid):
    return tl.load(x + t, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _row_means(
    log_probs, old, mask, keep, run_means, width, RATIO: tl.constexpr, HAS_KEEP: tl.constexpr, TILE: tl.constexpr
):
    """(number of kept tokens, sum of their log-ratios); the mean of each run is left at its end."""
    position = tl.arange(0, TILE)
    zero = tl.full((), 0.0, tl.float64)
    num_kept, row_total, run_total, run_count = zero, zero, zero, zero
    for i in range(tl.cdiv(width, TILE)):
        t = i * TILE + position
        valid = load_mask(mask, 1, t, t < width)
        kept = _kept(valid, keep, t, t < width, HAS_KEEP)
        num_kept += tl.sum(kept.to(tl.float64))
        if RATIO != "token":
            gap = (_load(log_probs, t, kept) - _load(old, t, kept)).to(tl.float64)
            row_total += tl.sum(gap)
            if RATIO == "segment":
                goes_on = valid & load_mask(mask, 1, t - 1, (t > 0) & (t < width))
                is_cut, totals, counts = tl.associative_scan(
                    ((~goes_on).to(tl.int32), gap, kept.to(tl.float64)), 0, add_in_run
                )
                totals = tl.where(is_cut != 0, totals, totals + run_total)
                counts = tl.where(is_cut != 0, counts, counts + run_count)
                ends = valid & ~load_mask(mask, 1, t + 1, t + 1 < width)
                tl.store(run_means + t, totals / tl.where(counts == 0.0, 1.0, counts), mask=ends)
                run_total = pick(totals, position, TILE - 1)
                run_count = pick(counts, position, TILE - 1)
    return num_kept, row_total


@triton.jit
def _add_through_means(
    gradient, mask, keep, run_shares, row_share, width,
    RATIO: tl.constexpr, HAS_KEEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of each kept token its share of what reached the mean of its run, or of its row."""
    position = tl.arange(0, TILE)
    share = row_share
    for i in range(tl.cdiv(width, TILE)):
        t = i * TILE + position
        valid = load_mask(mask, 1, t, t < width)
        kept = _kept(valid, keep, t, t < width, HAS_KEEP)
        shares = tl.zeros_like(position).to(tl.float64) + share
        if RATIO == "segment":
            starts = valid & ~load_mask(mask, 1, t - 1, (t > 0) & (t < width))
            left = tl.load(run_shares + t, mask=starts, other=0.0).to(tl.float64)
            is_set, newer = tl.associative_scan((starts.to(tl.int32), left), 0, newest)
            shares = tl.where(is_set != 0, newer, shares)
            share = pick(shares, position, TILE - 1)
        direct = tl.load(gradient + t, mask=kept, other=0.0)
        tl.store(gradient + t, direct + shares.to(tl.float32), mask=kept)


@triton.jit
def token_loss_kernel(  # noqa: PLR0915, all of it shares what one read brought
    log_probs, old, advantages, mask, keep, is_weights, reference, entropy, row_weights,
    gradient, spread, entropy_gradient, table,
    log_probs_b, old_b, advantages_b, mask_b, keep_b, is_weights_b, reference_b, entropy_b,
    tokens_at, num_tokens, sequences_at, num_sequences, norm_at, norm_factor,
    first, second, third, low, high, pg_coef, kl_coef, entropy_coef, width,
    RATIO: tl.constexpr, SURROGATE: tl.constexpr, KL: tl.constexpr, AGGREGATION: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_IS_WEIGHTS: tl.constexpr, HAS_REFERENCE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_ROW_WEIGHTS: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, WITH_ENTROPY_GRADIENT: tl.constexpr,
    TOKENS_ON_DEVICE: tl.constexpr, SEQUENCES_ON_DEVICE: tl.constexpr, NORM_ON_DEVICE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One row: forwards for the number of its tokens and the means of its log-ratios, backwards for loss, metrics and
    gradient, and once more forwards where a gradient goes through such a mean."""
    row = tl.program_id(0).to(tl.int64)
    log_probs += row * log_probs_b
    old += row * old_b
    advantages += row * advantages_b
    mask += row * mask_b
    keep += row * keep_b
    is_weights += row * is_weights_b
    reference += row * reference_b
    entropy += row * entropy_b
    gradient += row * width
    spread += row * width
    entropy_gradient += row * width
    position = tl.arange(0, TILE)
    zero = tl.full((), 0.0, tl.float64)

    num_kept, row_total = _row_means(log_probs, old, mask, keep, spread, width, RATIO, HAS_KEEP, TILE)
    if RATIO == "segment":
        tl.debug_barrier()  # what one thread left at the end of a run, another picks up
    divisor = tl.where(num_kept == 0.0, 1.0, num_kept)
    tokens = _count(tokens_at, num_tokens, TOKENS_ON_DEVICE)
    tokens = tl.where(tokens < 1.0, 1.0, tokens)
    sequences = _count(sequences_at, num_sequences, SEQUENCES_ON_DEVICE)
    sequences = tl.where(sequences < 1.0, 1.0, sequences)
    if AGGREGATION == "token-mean":
        share = 1.0 / tokens
    elif AGGREGATION == "seq-mean-token-sum":
        share = 1.0 / sequences
    elif AGGREGATION == "seq-mean-token-mean":
        share = 1.0 / (divisor * sequences)
    else:
        share = 1.0 / _count(norm_at, norm_factor, NORM_ON_DEVICE)
    row_weight = zero + 1.0
    if HAS_ROW_WEIGHTS:
        row_weight = tl.load(row_weights + row, mask=num_kept > 0.0, other=0.0).to(tl.float64)
    pg_share = (pg_coef * row_weight * share).to(tl.float32)
    kl_share = (pg_coef * kl_coef * share).to(tl.float32)

    pg_sum, kl_sum, entropy_sum, high_sum, low_sum, clip_sum = zero, zero, zero, zero, zero, zero
    ratio_sum, square_sum, gap_sum, through_mean = zero, zero, zero, zero
    largest = tl.full((), float("-inf"), tl.float32)
    smallest = tl.full((), float("inf"), tl.float32)
    run_mean, run_total, run_count = zero, zero, zero
    tiles = tl.cdiv(width, TILE)
    for i in range(tiles):
        t = (tiles - 1 - i) * TILE + position
        inside = t < width
        valid = load_mask(mask, 1, t, inside)
        kept = _kept(valid, keep, t, inside, HAS_KEEP)
        behind = load_mask(mask, 1, t + 1, (t + 1 < width) & (RATIO == "segment"))
        log_prob = _load(log_probs, t, kept)
        gap = log_prob - _load(old, t, kept)
        mean = gap
        if RATIO == "sequence":
            mean = tl.where(kept, (row_total / divisor).to(tl.float32), 0.0)
        elif RATIO == "segment":
            ends = valid & ~behind
            left = tl.load(spread + t, mask=ends, other=0.0).to(tl.float64)
            is_set, means = tl.associative_scan((ends.to(tl.int32), left), 0, newest, reverse=True)
            means = tl.where(is_set != 0, means, run_mean)
            run_mean = pick(means, position, 0)
            mean = tl.where(kept, means, 0.0).to(tl.float32)
        log_ratio = _clamp(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = tl.exp(log_ratio)
        loss, by_log_prob, by_log_ratio, clipped = _surrogate(
            ratio, _load(advantages, t, kept), log_prob, log_ratio, first, second, third, SURROGATE
        )
        scale = tl.zeros_like(ratio) + pg_share
        if HAS_IS_WEIGHTS:
            is_weight = _load(is_weights, t, kept)
            loss *= is_weight
            scale *= is_weight
        direct = scale * by_log_prob
        by_log_ratio = tl.where(tl.abs(mean) > MAX_LOG_RATIO, 0.0, scale * by_log_ratio)
        if HAS_REFERENCE:
            kl, by_delta = _kl(log_prob - _load(reference, t, kept), KL)
            kl_sum += tl.sum(kl)
            direct += kl_share * by_delta
        if HAS_ENTROPY:
            entropy_sum += tl.sum(_load(entropy, t, kept))
        if WITH_ENTROPY_GRADIENT:
            slope = (-entropy_coef * share).to(tl.float32)
            tl.store(entropy_gradient + t, tl.where(kept, slope, 0.0), mask=inside)
        if WITH_GRADIENT:
            if RATIO == "token":
                direct += by_log_ratio
            tl.store(gradient + t, tl.where(kept, direct, 0.0), mask=inside)
            indirect = tl.where(kept, by_log_ratio, 0.0).to(tl.float64)
            if RATIO == "sequence":
                through_mean += tl.sum(indirect)
            elif RATIO == "segment":
                is_cut = (~(valid & behind)).to(tl.int32)
                is_cut, totals, counts = tl.associative_scan(
                    (is_cut, indirect, kept.to(tl.float64)), 0, add_in_run, reverse=True
                )
                totals = tl.where(is_cut != 0, totals, totals + run_total)
                counts = tl.where(is_cut != 0, counts, counts + run_count)
                run_total = pick(totals, position, 0)
                run_count = pick(counts, position, 0)
                # What each token of a run receives waits at its start. No end of a run is still needed there.
                starts = valid & ~load_mask(mask, 1, t - 1, (t > 0) & inside)
                tl.store(spread + t, totals / tl.where(counts == 0.0, 1.0, counts), mask=starts)
        pg_sum += tl.sum(tl.where(kept, loss, 0.0))
        clip_sum += tl.sum((kept & clipped).to(tl.float32))
        ratio_sum += tl.sum(tl.where(kept, ratio, 0.0))
        square_sum += tl.sum(0.5 * gap * gap)
        gap_sum += tl.sum(gap)
        if HAS_HIGH:
            high_sum += tl.sum((kept & (ratio > high)).to(tl.float32))
        if HAS_LOW:
            low_sum += tl.sum((kept & (ratio < low)).to(tl.float32))
        largest = tl.maximum(largest, tl.max(tl.where(kept, ratio, float("-inf"))))
        smallest = tl.minimum(smallest, tl.min(tl.where(kept, ratio, float("inf"))))

    if WITH_GRADIENT and RATIO != "token":
        tl.debug_barrier()
        _add_through_means(gradient, mask, keep, spread, through_mean / divisor, width, RATIO, HAS_KEEP, TILE)
    line = table + row * NUM_COLUMNS
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


@triton.jit
def total_loss_kernel(table, num_rows, results, loss, pg_coef, kl_coef, entropy_coef, ROWS: tl.constexpr):
    """Adds the lines up. results: the total, the columns of the table, the ratios that are too high or too low; loss:
    the total again, in its own dtype."""
    column = tl.arange(0, 16)
    sums = tl.zeros((16,), tl.float64)
    largest = tl.full((16,), float("-inf"), tl.float64)
    smallest = tl.full((16,), float("inf"), tl.float64)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < NUM_COLUMNS)[None, :]
        lines = tl.load(table + row[:, None].to(tl.int64) * NUM_COLUMNS + column[None, :], mask=inside, other=0.0)
        sums += tl.sum(lines, axis=0)
        largest = tl.maximum(largest, tl.max(tl.where(inside, lines, float("-inf")), axis=0))
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, lines, float("inf")), axis=0))
    is_nan = sums != sums
    extremes = tl.where(column == NUM_SUMS, largest, smallest)
    found = tl.where((column < NUM_SUMS) | is_nan, sums, extremes)
    weighted_pg, kl, entropy = pick(sums, column, 1), pick(sums, column, 2), pick(sums, column, 3)
    total = pg_coef * (weighted_pg + kl_coef * kl) - entropy_coef * entropy
    tl.store(results, total)
    tl.store(loss, total)
    tl.store(results + 1 + column, found, mask=column < NUM_COLUMNS)
    tl.store(results + 1 + NUM_COLUMNS, pick(sums, column, 4) + pick(sums, column, 5))
