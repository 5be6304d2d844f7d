"""The losses once more, as plain loops over Python floats: slow, obvious, and sharing no code with
the package.

Tensors come in as nested lists. Masked entries are never looked at.
"""

import math
from typing import Any

Rows = list[list[float]]


def cells(mask: Rows, keep: Rows | None = None) -> list[tuple[int, int]]:
    """Valid positions, in reading order."""
    return [
        (i, t)
        for i in range(len(mask))
        for t in range(len(mask[i]))
        if mask[i][t] and (keep is None or keep[i][t])
    ]


def runs(row: list[float]) -> list[list[int]]:
    """Positions of each contiguous run of ones."""
    found: list[list[int]] = []
    for t, value in enumerate(row):
        if not value:
            continue
        if t and row[t - 1]:
            found[-1].append(t)
        else:
            found.append([t])
    return found


def bounded_exp(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def aggregate(
    loss: dict[tuple[int, int], float],
    mask: Rows,
    mode: str,
    num_tokens: float,
    num_sequences: float,
    weights: list[float] | None = None,
    norm_factor: float | None = None,
) -> float:
    """`loss` has an entry for every valid position."""
    total = 0.0
    for i in range(len(mask)):
        row = [loss[i, t] for t in range(len(mask[i])) if (i, t) in loss]
        if not row:
            continue
        value = sum(row) / len(row) if mode == "seq-mean-token-mean" else sum(row)
        total += value * (1.0 if weights is None else weights[i])
    if mode == "token-mean":
        return total / num_tokens
    if mode == "seq-mean-token-sum-norm":
        return total / (len(mask[0]) if norm_factor is None else norm_factor)
    return total / num_sequences


def k3(lp: float, ref: float) -> float:
    x = min(max(ref - lp, -20.0), 20.0)
    return min(math.exp(x) - x - 1, 10.0)


def kl_loss(kind: str, lp: float, ref: float, frozen: float) -> float:
    """`frozen` is lp where its gradient is stopped."""
    if kind == "k3+":
        return k3(frozen, ref) + ((lp - ref) ** 2 - (frozen - ref) ** 2) / 2
    return {"k3": k3(lp, ref), "mse": (lp - ref) ** 2 / 2, "abs": abs(lp - ref)}[kind]


def log_ratios(
    lp: Rows, old: Rows, mask: Rows, keep: Rows | None, ratio_type: str
) -> dict[tuple[int, int], float]:
    token = {(i, t): lp[i][t] - old[i][t] for i, t in cells(mask, keep)}
    if ratio_type == "token":
        return token
    ratio_type = ratio_type.removesuffix("_token")
    result = {}
    for i, row in enumerate(mask):
        groups = runs(row) if ratio_type == "segment" else [[t for t in range(len(row)) if row[t]]]
        for group in groups:
            kept = [t for t in group if (i, t) in token]
            for t in kept:
                result[i, t] = sum(token[i, s] for s in kept) / len(kept)
    return result


def policy_loss(
    *,
    log_probs: Rows,
    old_log_probs: Rows,
    advantages: Rows,
    mask: Rows,
    mode: str = "token-mean",
    ratio_type: str = "token",
    variant: str = "ppo",
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    keep: Rows | None = None,
    is_weight: Rows | None = None,
    sample_weights: list[float] | None = None,
    ref_log_probs: Rows | None = None,
    kl_coef: float = 0.0,
    entropy: Rows | None = None,
    entropy_coef: float = 0.0,
    pg_coef: float = 1.0,
    num_tokens: float | None = None,
    num_sequences: float | None = None,
    norm_factor: float | None = None,
    frozen_log_probs: Rows | None = None,
    tau: float = 0.1,
    kl_kind: str = "k3",
) -> dict[str, Any]:
    """All parts and statistics. `frozen_log_probs`, if given, is used wherever a gradient is
    stopped."""
    kept = cells(mask, keep)
    n_tok = num_tokens if num_tokens is not None else max(len(cells(mask)), 1)
    n_seq = num_sequences if num_sequences is not None else max(len({i for i, _ in cells(mask)}), 1)

    def agg(
        values: dict[tuple[int, int], float], how: str = mode, weights: list[float] | None = None
    ) -> float:
        return aggregate(values, mask, how, n_tok, n_seq, weights, norm_factor)

    log_rho = log_ratios(log_probs, old_log_probs, mask, keep, ratio_type)
    frozen = log_probs if frozen_log_probs is None else frozen_log_probs
    frozen_rho = log_ratios(frozen, old_log_probs, mask, keep, ratio_type)
    if ratio_type.endswith("_token"):  # the shared ratio is a constant, times p / sg[p]
        log_rho = {
            (i, t): value + log_probs[i][t] - frozen[i][t] for (i, t), value in frozen_rho.items()
        }
    loss, clipped = {}, {}
    for i, t in kept:
        rho, stopped, a, lp = (
            bounded_exp(log_rho[i, t]),
            bounded_exp(frozen_rho[i, t]),
            advantages[i][t],
            log_probs[i][t],
        )
        clipped[i, t] = 0.0
        if variant == "ppo":
            s1, s2 = rho * a, min(max(rho, 1 - low), 1 + high) * a
            value = -min(s1, s2)
            clipped[i, t] = float(s2 < s1)
            if dual is not None and a < 0:
                value = min(value, -dual * a)
        elif variant == "vanilla":
            value = -a * lp
        elif variant == "tis":
            value = -min(max(stopped, low), high) * a * lp
            clipped[i, t] = float(stopped < low or stopped > high)
        elif variant == "cispo":
            value = -min(max(stopped, 1 - low), 1 + high) * a * lp
            clipped[i, t] = float(stopped < 1 - low or stopped > 1 + high)
        elif variant == "topr":
            value = -a * lp if a > 0 else -min(stopped, 1.0) * a * lp
            clipped[i, t] = float(a <= 0 and stopped > 1)
        elif variant == "kimi15":
            value = -a * lp + tau / 2 * min(max(lp - old_log_probs[i][t], -20), 20) ** 2
        else:
            raise AssertionError(variant)
        loss[i, t] = value * (1.0 if is_weight is None else is_weight[i][t])
    pg, weighted = agg(loss), agg(loss, weights=sample_weights)
    kl = 0.0
    if ref_log_probs is not None:
        kl = agg(
            {
                (i, t): kl_loss(kl_kind, log_probs[i][t], ref_log_probs[i][t], frozen[i][t])
                for i, t in kept
            }
        )
    ent = 0.0 if entropy is None else agg({(i, t): entropy[i][t] for i, t in kept})
    rho = {(i, t): bounded_exp(log_rho[i, t]) for i, t in kept}
    delta = {(i, t): log_probs[i][t] - old_log_probs[i][t] for i, t in kept}
    return {
        "total": pg_coef * (weighted + kl_coef * kl) - entropy_coef * ent,
        "pg": pg,
        "weighted_pg": weighted,
        "kl": kl,
        "entropy": ent,
        "clipfrac": agg(clipped),
        "ppo_ratio_high_clipfrac": agg({c: float(rho[c] > 1 + high) for c in kept}, "token-mean"),
        "ppo_ratio_low_clipfrac": agg({c: float(rho[c] < 1 - low) for c in kept}, "token-mean"),
        "ratio_mean": agg(rho, "seq-mean-token-mean"),
        "ratio_max": max(rho.values(), default=-math.inf),
        "ratio_min": min(rho.values(), default=math.inf),
        "approxkl": agg({c: delta[c] ** 2 / 2 for c in kept}),
        "policykl": agg(delta),
    }


def policy_gradient(step: float = 1e-6, **arguments: Any) -> Rows:
    """d total / d log_probs by central differences."""
    log_probs = arguments["log_probs"]
    gradient = [[0.0] * len(row) for row in log_probs]
    for i, t in cells(arguments["mask"]):
        values = []
        for sign in (1, -1):
            moved = [list(row) for row in log_probs]
            moved[i][t] += sign * step
            values.append(
                policy_loss(**{**arguments, "log_probs": moved, "frozen_log_probs": log_probs})[
                    "total"
                ]
            )
        gradient[i][t] = (values[0] - values[1]) / (2 * step)
    return gradient


def train_infer_gap(old: Rows, infer: Rows, mask: Rows) -> dict[str, dict[str, Rows]]:
    """{"ratio": {level: rows}, "diff": {level: rows}}, 0 where masked."""
    shape = [[0.0] * len(row) for row in mask]
    gap = {
        kind: {
            level: [list(row) for row in shape]
            for level in ("token", "segment", "geometric", "sequence")
        }
        for kind in ("ratio", "diff")
    }
    for i, row in enumerate(mask):
        valid = [t for t in range(len(row)) if row[t]]
        q = {t: old[i][t] - infer[i][t] for t in valid}
        d = {t: math.exp(old[i][t]) - math.exp(infer[i][t]) for t in valid}
        groups = {
            "token": [([t], 1.0) for t in valid],
            "segment": [(run, 1 / len(run)) for run in runs(row)],
            "geometric": [(valid, 1 / len(valid))] if valid else [],
            "sequence": [(valid, 1.0)] if valid else [],
        }
        for level, members in groups.items():
            for group, scale in members:
                for t in group:
                    gap["ratio"][level][i][t] = bounded_exp(scale * sum(q[s] for s in group))
                    gap["diff"][level][i][t] = scale * sum(d[s] for s in group)
    return gap


def value_loss(
    values: Rows,
    returns: Rows,
    mask: Rows,
    old_values: Rows | None = None,
    clip: float | None = None,
) -> dict[str, float]:
    """Mean over rows of the mean over tokens."""
    loss, clipped, error = {}, {}, {}
    for i, t in cells(mask):
        v, r = values[i][t], returns[i][t]
        error[i, t] = loss[i, t] = (v - r) ** 2
        clipped[i, t] = 0.0
        if clip is not None and old_values is not None:
            near = min(max(v, old_values[i][t] - clip), old_values[i][t] + clip)
            clipped[i, t] = float((near - r) ** 2 > loss[i, t])
            loss[i, t] = max(loss[i, t], (near - r) ** 2)
    n_seq = max(len({i for i, _ in loss}), 1)
    agg = {
        name: aggregate(values, mask, "seq-mean-token-mean", 1, n_seq)
        for name, values in {"loss": loss, "clipped": clipped, "error": error}.items()
    }
    return {"loss": 0.5 * agg["loss"], "clip_fraction": agg["clipped"], "error": agg["error"]}


def preference_losses(
    loss_type: str,
    policy: tuple[list[float], list[float]],
    reference: tuple[list[float], list[float]],
    lens: tuple[list[int], list[int]],
    beta: float = 0.1,
    ls: float = 0.0,
    tau: float = 0.05,
) -> list[float]:
    """The loss of each pair; (chosen, rejected) tuples."""
    c = [p - r for p, r in zip(policy[0], reference[0], strict=True)]
    r = [p - q for p, q in zip(policy[1], reference[1], strict=True)]
    if loss_type in ("aot", "aot_unpaired"):
        if loss_type == "aot":
            first = sorted(x - y for x, y in zip(*policy, strict=True))
            second = sorted(x - y for x, y in zip(*reference, strict=True))
        else:
            first, second = sorted(c), sorted(r)
        z = [beta * (x - y) for x, y in zip(first, second, strict=True)]
        return [-(1 - ls) * log_sigmoid(x) - ls * log_sigmoid(-x) for x in z]
    return [pair_loss(loss_type, *pair, beta, ls, tau) for pair in zip(c, r, *lens, strict=True)]


def pair_loss(
    loss_type: str, c: float, r: float, len_c: int, len_r: int, beta: float, ls: float, tau: float
) -> float:
    """One pair with log-ratios c and r."""
    z, mean_margin = beta * (c - r), c / max(len_c, 1) - r / max(len_r, 1)
    k = sigmoid(z / tau)
    formulas = {
        "sigmoid": lambda: -(1 - ls) * log_sigmoid(z) - ls * log_sigmoid(-z),
        "sigmoid_norm": lambda: -log_sigmoid(beta * mean_margin),
        "ipo_sum": lambda: (c - r - 1 / (2 * beta)) ** 2,
        "ipo": lambda: (mean_margin - 1 / (2 * beta)) ** 2,
        "hinge": lambda: max(0.0, 1 - z),
        "robust": lambda: (-(1 - ls) * log_sigmoid(z) + ls * log_sigmoid(-z)) / (1 - 2 * ls),
        "exo_pair": lambda: (
            sigmoid(z) * (log_sigmoid(z) - math.log(1 - ls))
            + sigmoid(-z) * (log_sigmoid(-z) - math.log(ls))
        ),
        "nca_pair": lambda: (
            -log_sigmoid(beta * c) - 0.5 * log_sigmoid(-beta * c) - 0.5 * log_sigmoid(-beta * r)
        ),
        "bco_pair": lambda: -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "apo_down": lambda: sigmoid(beta * c) + 1 - sigmoid(z),
        "discopop": lambda: (1 - k) * -log_sigmoid(z) + k * math.exp(-z),
    }
    return formulas[loss_type]()
