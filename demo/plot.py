"""The picture: where the vocabulary was cut, what that did to the bits of a token's loss, and how it spread over the training."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator

INK, FAINT, OURS, USUAL = "#1f2933", "#7b8794", "#0b7a5b", "#c8382d"
SHADES = ["#3d6fa5", "#a9c4e0"]
MONO = "DejaVu Sans Mono"


def bits(loss: torch.Tensor) -> str:
    return f"{int(loss.view(torch.int32)) & 0xFFFFFFFF:08X}"


def shorten(word: str) -> str:
    return repr(word if len(word) <= 12 else word[:11] + "…")


def telling_token(runs, cuts, step: int) -> int:
    """The token whose float32 loss changes at the most cuts, and takes the most values; the first of them."""
    values = torch.stack([runs[name].losses[step] for name in cuts])
    changed = (values != values[0]).sum(0)
    return max(range(values.shape[1]), key=lambda i: (int(changed[i]), len(values[:, i].unique()), -i))


def draw_cuts(ax, cuts):
    width = max(bounds[-1] for bounds in cuts.values())
    for row, bounds in enumerate(cuts.values()):
        for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
            ax.barh(row, hi - lo, left=lo, height=0.6, color=SHADES[i % 2])
            if hi - lo > 1:
                continue
            # Too narrow to see: drawn wider, and named.
            ax.plot([lo, lo], [row - 0.3, row + 0.3], color=INK if hi > lo else "white", linewidth=2, linestyle="-" if hi > lo else (0, (2, 1.2)))
            ax.text(lo, row - 0.31, "one column" if hi > lo else "empty", ha="center", va="bottom", fontsize=8.5, color=FAINT)
    ax.set(xlim=(0, width), ylim=(len(cuts) - 0.4, -0.5), xticks=[0, width // 4, width // 2, 3 * width // 4, width])
    ax.set_yticks(range(len(cuts)), [f"{len(b) - 1} shards" if len(b) > 2 else "uncut" for b in cuts.values()])
    ax.set_xlabel("vocabulary column", color=FAINT)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.text(0, -1.0, "Where the vocabulary is cut", fontsize=12, fontweight="bold", va="bottom")


def draw_bits(ax, cuts, columns):
    """One column of hexadecimal words for each (heading, colour of heading, words in the order of the cuts)."""
    ax.set(xlim=(0, 4), ylim=(len(cuts) - 0.4, -0.5))
    ax.axis("off")
    step = 0.084
    for column, (heading, colour, words) in enumerate(columns):
        left = column + (0.08 if column < 2 else 0.16)
        ax.text(left, -0.62, heading, color=colour, fontsize=10.5, fontweight="bold", va="bottom")
        for row, word in enumerate(words):
            for i, digit in enumerate(word):
                other = digit != words[0][i]
                box = {"boxstyle": "square,pad=0.16", "facecolor": "#f9d9d5", "edgecolor": "none"} if other else None
                ax.text(left + step * (i + 0.5), row, digit, family=MONO, fontsize=13.5, ha="center", va="center",
                        color=USUAL if other else INK, fontweight="bold" if other else "normal", bbox=box)


def draw_curve(ax, ours, usual, differing, tokens):
    steps = len(usual["1"].means)
    x = range(1, steps + 1)
    marker = "o" if steps == 1 else None
    cut = [name for name in usual if name not in ("1", "1 again")]
    for i, name in enumerate(cut):
        ax.plot(x, differing(usual[name], usual["1"]), color=USUAL, alpha=1 - 0.14 * i, linewidth=1.6, marker=marker)
    for name in ours:
        ax.plot(x, differing(ours[name], ours["1"]), color=OURS, linewidth=3.2, marker=marker, solid_capstyle="butt", clip_on=False)
    worst = max(int(differing(ours[name], ours["1"]).max()) for name in ours)
    ax.set(xlim=(1, max(steps, 2)), ylim=(0, tokens * 1.06), yticks=[0, tokens // 4, tokens // 2, 3 * tokens // 4, tokens])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(f"Tokens, of the {tokens:,} of each step, whose loss differs from the uncut run's", loc="left", pad=12)
    ax.set_xlabel("training step", color=FAINT)
    ax.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(length=0)
    ends = torch.tensor([int(differing(usual[name], usual["1"])[-1]) for name in cut]).float().mean()
    label = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False, "fontweight": "bold"}
    ax.annotate(f"float32 combine,\n{len(cut)} cuts", (1.012, float(ends)), color=USUAL, **label)
    ax.annotate(f"det-cross-entropy,\n{len(ours) - 1} cuts: " + ("0, always" if worst == 0 else f"up to {worst}"), (1.012, 0.06 * tokens),
                color=OURS, **label)


def draw(path: Path, cuts, ours, usual, differing, tokens, word_at):
    """`word_at(step, token)` is the text that the loss was for."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10.5, "text.color": INK, "axes.titlesize": 12,
                         "axes.titleweight": "bold", "xtick.color": FAINT, "ytick.color": INK, "axes.edgecolor": "#cbd2d9"})
    figure = plt.figure(figsize=(15, 9), dpi=150, facecolor="white")
    grid = figure.add_gridspec(2, 2, width_ratios=[1, 1.75], height_ratios=[1.25, 1], left=0.065, right=0.985, top=0.815, bottom=0.075,
                               wspace=0.05, hspace=0.42)
    figure.text(0.02, 0.945, "The same training with the vocabulary cut in other places", fontsize=19, fontweight="bold")
    same = all(torch.equal(r.weights, ours["1"].weights) and not differing(r, ours["1"]).any() for r in ours.values())
    figure.text(
        0.02, 0.91, "With det-cross-entropy every token's loss and every weight " +
        ("has the same bits at every cut." if same else "should have the same bits at every cut, AND HERE DOES NOT.") +
        " A float32 combine changes last digits, and the training then drifts apart.", fontsize=12, color=FAINT)

    draw_cuts(figure.add_subplot(grid[0, 0]), cuts)
    ax = figure.add_subplot(grid[0, 1])
    last = len(usual["1"].means) - 1
    columns = []
    for step in sorted({0, last}):
        token = telling_token(usual, cuts, step)
        for heading, colour, runs in (("det-cross-entropy", OURS, ours), ("float32 combine", USUAL, usual)):
            columns.append((heading, colour, [bits(runs[name].losses[step, token]) for name in cuts]))
        ax.text(len(columns) - 2 + (0.08 if step == 0 else 0.16), -1.0, f"Step {step + 1}" + (" (same weights)" if step == 0 else "")
                + f": the loss of {shorten(word_at(step, token))}", fontsize=12, fontweight="bold", va="bottom", parse_math=False)
    draw_bits(ax, cuts, columns)
    ax.text(0.08, len(cuts) - 0.28, "float32 bits in hexadecimal; ", color=FAINT, va="top")
    ax.text(1.08, len(cuts) - 0.28, "digits unlike the uncut run's", color=USUAL, va="top", fontweight="bold")

    curve = figure.add_subplot(grid[1, :])
    box = curve.get_position()
    curve.set_position([box.x0, box.y0, box.width - 0.13, box.height])
    draw_curve(curve, ours, usual, differing, tokens)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
