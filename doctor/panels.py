"""Draw a dump as five panels, by which a reader recognises its cause.

    save(tokens, "figure.png")          # a row of one's own, above those of the known causes
"""

from pathlib import Path
from typing import Any

import torch

from three_policies.doctor.tokens import Tokens, log_odds, pairs

SIGNATURES = Path(__file__).parent.parent / "math/figures/signatures.png"
TITLES = ("logit π over logit μ", "gap in logits, by token", "gap: response × token",
          "Δ log π over Δ log μ, same prefix", "running E[ρ] − 1, ± 2 errors")
DPI = 110                               # of the book's figures
SHOWN = 600                             # most points of a panel; more would blur
DOTS: dict[str, Any] = {"s": 3, "linewidths": 0, "color": "#0072B2", "antialiaseds": False}


def draw_row(axes: Any, x: Tokens, name: str) -> None:
    """Draw one dump into five axes."""
    cloud, by_token, grid, after, running = axes
    step, gap = max(1, len(x.mu) // SHOWN), x.e()
    wide = gap.abs().quantile(0.99).clamp(min=0.05).item()

    _scatter(cloud, log_odds(x.mu)[::step], log_odds(x.pi)[::step])
    cloud.set_ylabel(name)
    _draw_by_token(by_token, x, gap, wide, step)
    _draw_grid(grid, x, gap, wide)
    i, j, *_ = pairs(x)
    _scatter(after, x.mu[i] - x.mu[j], x.pi[i] - x.pi[j])
    _draw_running(running, (x.pi - x.mu).clamp(max=20).expm1(), step)


def _draw_by_token(axis: Any, x: Tokens, gap: torch.Tensor, wide: float, step: int) -> None:
    """Draw the gap over the position in the response, and its median at each."""
    axis.scatter(x.t[::step].numpy(), gap[::step].numpy(), **DOTS)
    places = x.t.unique().tolist()
    axis.plot(places, [gap[x.t == t].median().item() for t in places], color="#D55E00",
              linewidth=1.2)
    axis.axhline(0, color="#999999", linewidth=0.6)
    axis.set_ylim(-1.3 * wide, 1.3 * wide)


def _draw_grid(axis: Any, x: Tokens, gap: torch.Tensor, wide: float) -> None:
    """Draw the gap of each token of the first 48 responses as a colour."""
    rows = x.row.unique(return_inverse=True)[1]
    table = torch.full((int(rows.max()) + 1, int(x.t.max()) + 1), torch.nan, dtype=gap.dtype)
    table[rows, x.t] = gap
    axis.imshow(table[:48].numpy(), cmap="RdBu", vmin=-wide, vmax=wide, aspect="auto",
                interpolation="nearest")
    axis.text(1.02, 0, f"±{wide:.2g}", transform=axis.transAxes, rotation=90, fontsize=7)


def _draw_running(axis: Any, less_one: torch.Tensor, step: int) -> None:
    """Draw the mean of ρ − 1 over ever more tokens, with two standard errors."""
    n = torch.arange(1, len(less_one) + 1)
    mean, error = less_one.cumsum(0) / n, less_one.square().cumsum(0).sqrt() / n
    at, mean, error = (column[10::step].numpy() for column in (n, mean, error))
    axis.fill_between(at, mean - 2 * error, mean + 2 * error, color="#56B4E9", alpha=0.5,
                      linewidth=0)
    axis.plot(at, mean, color="#0072B2", linewidth=1)
    axis.axhline(0, color="#999999", linewidth=0.6)


def _scatter(axis: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Draw points and the diagonal on which they would lie if the two sides agreed."""
    if len(x):
        axis.axline((0, 0), slope=1, color="#999999", linewidth=0.6)
        ends = [f(torch.cat([x, y])).item() for f in (torch.min, torch.max)]
        axis.set(xlim=ends, ylim=ends)
    axis.scatter(x.numpy(), y.numpy(), **DOTS)


def draw(dumps: dict[str, Tokens]) -> Any:
    """Return a figure with a row for each dump."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10.5, 0.4 + 1.3 * len(dumps)), layout="constrained")
    axes = figure.subplots(len(dumps), 5, squeeze=False)
    for row, (name, x) in zip(axes, dumps.items()):
        draw_row(row, x, name)
        for axis in row:
            axis.tick_params(labelsize=7)
    for axis, title in zip(axes[0], TITLES):
        axis.set_title(title, fontsize=9)
    return figure


def save(x: Tokens, path: str) -> None:
    """Draw a dump of one's own above the signatures of chapter 8, and save both as one image."""
    import io

    from PIL import Image
    memory = io.BytesIO()
    draw({"this dump": x}).savefig(memory, dpi=DPI)
    own, known = Image.open(memory), Image.open(SIGNATURES)
    both = Image.new("RGB", (own.width, own.height + known.height), "white")
    both.paste(own, (0, 0))
    both.paste(known, (0, own.height))
    both.save(path)
