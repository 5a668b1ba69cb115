"""Owns the picture of the calibration: what the forecast said against what came true, from tests/risk/results/calibration.tsv.

Refuses other figures than those of the unseen runs. `python3 tests/risk/calibration.py` after `COTENANT_BLESS=1 cargo test -p cotenant-risk-runs`.
"""

import csv
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parents[1] / "dashboards/pictures/calibration.png"


def spread(true_ones, forecasts):
    """Wilson's interval, 95 %: forecasts of one run hang together, so the truth is wider."""
    part, z = true_ones / forecasts, 1.96
    middle = (part + z * z / 2 / forecasts) / (1 + z * z / forecasts)
    half = z / (1 + z * z / forecasts) * math.sqrt(part * (1 - part) / forecasts + z * z / 4 / forecasts**2)
    return max(middle - half, 0), min(middle + half, 1)


def main():
    figure, axes = plt.subplots(figsize=(6, 6), dpi=110)
    axes.plot([0, 1], [0, 1], linestyle="--", color="#9a9a9a", label="as often as said")
    with (HERE / "results/calibration.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    for runs, colour in (("generated", "#5794f2"), ("recorded", "#ff9830")):
        points = [(float(row["said"]), int(row["true_ones"]), int(row["forecasts"])) for row in rows if row["runs"] == runs]
        if not points:
            continue
        said = [point[0] for point in points]
        came = [true_ones / forecasts for _, true_ones, forecasts in points]
        ends = [spread(true_ones, forecasts) for _, true_ones, forecasts in points]
        below = [max(one - low, 0) for one, (low, _) in zip(came, ends)]
        above = [max(high - one, 0) for one, (_, high) in zip(came, ends)]
        axes.errorbar(said, came, yerr=[below, above], fmt="o-", color=colour, capsize=3, label=f"{runs} runs, {sum(point[2] for point in points):,} forecasts")
        for x, y, (_, _, forecasts) in zip(said, came, points):
            axes.annotate(f"{forecasts:,}", (x, y), textcoords="offset points", xytext=(6, -10), fontsize=7, color=colour)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="risk within 60 s, as said", ylabel="part that came true", title="Calibration on unseen runs")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, bbox_inches="tight")
    print(PICTURE)


if __name__ == "__main__":
    main()
