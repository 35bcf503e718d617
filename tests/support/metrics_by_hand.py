"""Every metric of a correction from lists of numbers, one response after another, without torch."""

import itertools
import math
import sys

import torch


# --------------------------------------------------------------------------------- metrics, by hand

def exp(x, bound=20.0):
    return math.exp(max(-bound, min(bound, x)))


def mean(values):
    return sum(values) / len(values) if values else 0.0


def std(values, lost=0):
    squares = sum((v - mean(values)) ** 2 for v in values)
    return math.sqrt(squares / max(1, len(values) - lost)) if values else 0.0


def ess(values):
    squares = sum(v * v for v in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def spread(prefix, rows, center, weights=True):
    """Return the metrics of a list of numbers for every response."""
    flat, means = [v for row in rows for v in row], [mean(row) for row in rows]
    found = {"mean": mean(flat), "max": max(flat, default=0), "min": min(flat, default=0),
             "seq_mean": mean(means), "seq_max": max(means, default=0),
             "seq_min": min(means, default=0), "seq_std": std(means, 1),
             "seq_max_deviation": max((abs(m - center) for m in means), default=0)}
    if weights:
        found |= {"std": std(flat), "eff_sample_size": ess(flat), "seq_eff_sample_size": ess(means)}
    return {f"{prefix}_{name}": value for name, value in found.items()}


def at(level, rows):
    """Return log ρ of a level, on every token."""
    if level == "token":
        return rows
    if level == "prefix":
        return [list(itertools.accumulate(row)) for row in rows]
    return [[sum(row) / (len(row) if level == "geometric" else 1)] * len(row) for row in rows]


def z(values):
    squares = sum(v * v for v in values)
    return sum(values) / math.sqrt(squares) if squares else 0.0


def share(rows, of_rows=False):
    flat = [any(row) for row in rows] if of_rows else [v for row in rows for v in row]
    return mean([float(v) for v in flat])


def of_ratio(prefixes, logs, applied, bounds, by_row):
    """Return the metrics of ρ and of the applied weights, with shares beyond the bounds."""
    lo, hi = 0 if bounds[0] is None else bounds[0], math.inf if bounds[1] is None else bounds[1]
    rho, found = [[exp(x) for x in row] for row in logs], {}
    for prefix, rows in zip(prefixes, (rho, applied), strict=False):
        found |= spread(prefix, rows, 1)
        found |= {
            f"{prefix}_ratio_fraction_low": share(
                [[lo > 0 and x < math.log(lo) for x in row] for row in logs], by_row),
            f"{prefix}_ratio_fraction_high": share(
                [[hi < math.inf and x > math.log(hi) for x in row] for row in logs], by_row),
            f"{prefix}_seq_fraction_low": mean([float(mean(row) < lo) for row in rho]),
            f"{prefix}_seq_fraction_high": mean([float(mean(row) > hi) for row in rho])}
    return found


def second_moment(rows, bound):
    """Return the largest term up to which the mean is at most `bound`; 0 where there is none."""
    flat = [v for row in rows for v in row]
    return max((v for v in flat if mean([w for w in flat if w <= v]) <= bound), default=0.0)


def two_outcomes(log_p, log_q):
    """Return KL(p‖q) of a token or any other one."""
    other_p, other_q = (-math.expm1(min(0.0, x)) for x in (log_p, log_q))
    other = other_p * math.log(other_p / max(other_q, sys.float_info.min)) if other_p else 0.0
    return math.exp(log_p) * (log_p - log_q) + other


def of_criterion(name, bound, logs, advantages, mu):
    """Return the metrics of one criterion, and which tokens it rejects."""
    prefix = f"rollout_rs_{name}"
    limited = [[max(-20.0, min(20.0, x)) for x in row] for row in logs]
    estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    both = [[(m, min(0.0, m + x)) for x, m in zip(*pair)] for pair in zip(logs, mu)]
    if name in ("opsm", "vaco"):
        rows = [[-x for x in row] for row in logs]
        if name == "vaco":
            rows = [[abs(math.expm1(x)) for x in row] for row in limited]
        rows, least, most = at("geometric", rows), -math.inf, bound
    elif "binary_kl" in name:
        rows = [[max(two_outcomes(m, p), 0 if name.startswith("seq") else two_outcomes(p, m))
                 for m, p in row] for row in both]
        least, most = -math.inf, bound
    elif name == "second_moment":
        rows = [[torch.tensor(x * x).float().item() for x in row] for row in logs]
        least, most = -math.inf, second_moment(rows, bound)
    elif "_tv" in name:
        apart = [[math.exp(p) - math.exp(m) for m, p in row] for row in both]
        signs = [[(a > 0) - (a < 0) if name.endswith("outward") else 1 if v > 0 else -1
                  for a, v in zip(*pair)] for pair in zip(advantages, apart)]
        rows = [[a * s for a, s in zip(*pair)] for pair in zip(apart, signs)]
        least, most = -math.inf, bound
    else:
        rows = [[estimate[name[-2:]](x) for x in row] for row in limited]
        least, most = -math.inf, bound
        if name.endswith("k1"):
            least, most = (-math.inf if bound[1] is None else -math.log(bound[1]),
                           math.inf if bound[0] is None else -math.log(bound[0]))
    lowest = highest = rows
    if name.startswith("seq_max"):
        lowest, highest = ([[end(row)] * len(row) for row in rows] for end in (min, max))
    elif name.startswith("seq"):
        lowest = highest = at("sequence" if name.startswith("seq_sum") else "geometric", rows)
    judged = lowest, highest
    if name.endswith("k1"):                     # judged as it is, reported within ±20 a token
        own = [[-x for x in row] for row in logs]
        level = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}.get(name[:-3])
        judged = [at(level, own)] * 2 if level else [
            [[end(row)] * len(row) for row in own] for end in (min, max)]
    low = [[v < least for v in row] for row in judged[0]]
    high = [[v > most for v in row] for row in judged[1]]
    if name == "opsm":
        high = [[h and a < 0 for h, a in zip(*pair)] for pair in zip(high, advantages)]
    if name == "vaco":
        high = [[h and a * x > 0 for h, a, x in zip(*of)] for of in zip(high, advantages, logs)]
    gone = [[a or b for a, b in zip(*pair)] for pair in zip(low, high)]
    found = spread(prefix, highest, 0, weights=False)
    found[f"{prefix}_std"] = std([max(least, min(most, v)) for row in highest for v in row])
    for end, hit, far in (("low", low, [mean(row) < least for row in highest]),
                          ("high", high, [mean(row) > most for row in highest])):
        by_row = not name.startswith("token") and name != "second_moment"
        found[f"{prefix}_fraction_{end}"] = share(hit, by_row)
        found[f"{prefix}_seq_fraction_{end}"] = (
            share(hit, True) if by_row else mean([float(f) for f in far]))
    found |= {f"{prefix}_masked_fraction": share(gone),
              f"{prefix}_seq_masked_fraction": share(gone, True)}
    level = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}.get(name)
    if level:
        found |= of_ratio([f"{prefix}_rho"], at(level, logs), None, bound, level != "token")
    return found, gone


def by_hand(train, rollout, mask, config, advantages):
    """Return {metric: value} of a batch; responses without a token are left aside."""
    def listed(x):
        return [[v for v, m in zip(row, on) if m]
                for row, on in zip(x.tolist(), mask.tolist()) if any(on)]
    logs = [[a - b for a, b in zip(*rows)] for rows in zip(listed(train), listed(rollout))]
    flat, rho = [x for row in logs for x in row], [exp(x) for row in logs for x in row]
    ppl = {name: [-mean(row) for row in listed(x)]
           for name, x in (("training", train), ("rollout", rollout))}
    apart = [-mean(row) for row in logs]
    found = {"kl": -mean(flat), "k3_kl": mean([r - 1 - x for r, x in zip(rho, flat)]),
             "chi2_token": mean([r * r - 1 for r in rho]), "is_ratio_mean": mean(rho),
             "is_ratio_std": std(rho, 1),
             "is_ratio_max": max(rho, default=0), "is_ratio_min": min(rho, default=0),
             "chi2_seq": mean([exp(2 * sum(row), 40) - 1 for row in logs]),
             "log_ppl_diff": mean(apart), "log_ppl_diff_max": max(apart, default=0),
             "log_ppl_diff_min": min(apart, default=0),
             "log_ppl_abs_diff": mean([abs(x) for x in apart]),
             "ppl_ratio": mean([exp(x, 80) for x in apart]),
             "kl_z": z([-x for x in flat]), "is_ratio_z": z([r - 1 for r in rho]),
             "bitwise_frac": mean([float(x != 0) for x in flat])}
    for name, values in ppl.items():
        found |= {f"{name}_log_ppl": mean(values),
                  f"{name}_ppl": mean([exp(x, 80) for x in values])}
    if config.rollout_is is not None:
        found |= weights_by_hand(logs, config)
    kept = [[True] * len(row) for row in logs]
    for name, bound in config.rollout_rs.items():
        metrics, gone = of_criterion(name, bound, logs, listed(advantages), listed(rollout))
        found |= metrics
        if not config.metrics_only:
            kept = [[k and not g for k, g in zip(*rows)] for rows in zip(kept, gone)]
    veto = (config.rollout_rs.get("seq_max_k1") or (None,))[0]
    vetoed = [[veto is not None and x < math.log(veto) for x in row] for row in logs]
    gone = [[not k for k in row] for row in kept]
    return found | {"rollout_is_catastrophic_token_fraction": share(vetoed),
                    "rollout_is_veto_fraction": share(vetoed, True),
                    "rollout_rs_masked_fraction": share(gone),
                    "rollout_rs_seq_masked_fraction": share(gone, True),
                    "all_rejected": float(bool(kept) and not any(k for row in kept for k in row))}


def weights_by_hand(logs, config):
    level, bound = config.rollout_is, config.rollout_is_threshold
    logs = at(level, logs)
    if isinstance(bound, tuple):
        inside = [[(bound[0] is None or x >= math.log(bound[0]))
                   and (bound[1] is None or x <= math.log(bound[1]))
                   for x in row] for row in logs]
        applied = [[exp(x) * keep for x, keep in zip(*rows)] for rows in zip(logs, inside)]
        zeroed = [[not keep for keep in row] for row in inside]
    else:
        applied = [[min(exp(x), bound) for x in row] for row in logs]
    bounds = bound if isinstance(bound, tuple) else (1 / bound, bound)
    if config.rollout_is_count_below is not None:
        bounds = config.rollout_is_count_below, bounds[1]
    found = of_ratio(["rollout_is_raw", "rollout_is"], logs, applied, bounds, level == "sequence")
    per_sequence = float(bool(logs) and level in ("sequence", "geometric"))
    if config.metrics_only:
        found = {name: value for name, value in found.items() if name.startswith("rollout_is_raw")}
        return found | {"rollout_is_per_sequence": per_sequence}
    found["rollout_is_per_sequence"] = per_sequence
    if isinstance(bound, tuple):
        found |= {"rollout_is_masked_fraction": share(zeroed),
                  "rollout_is_seq_masked_fraction": share(zeroed, True)}
    if config.rollout_is_batch_normalize:
        of_tokens = level in ("token", "prefix")
        found["rollout_is_batch_norm_factor"] = found[
            "rollout_is_mean" if of_tokens else "rollout_is_seq_mean"]
    return found
