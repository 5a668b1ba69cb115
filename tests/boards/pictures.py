"""Owns the pictures in dashboards/pictures: panels of the boards, drawn from the last recorded run by the panels' own
queries, units and legends, with matplotlib (pip install matplotlib), as no Grafana can be had in a test.

Refuses data of its own. `python3 tests/boards/pictures.py` after `make test-exports`.
"""

import collections
import datetime
import math
import pathlib
import re
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.dates import DateFormatter, SecondLocator  # noqa: E402
from matplotlib.ticker import FuncFormatter, MultipleLocator  # noqa: E402

import node  # noqa: E402
import promql  # noqa: E402
import recorded  # noqa: E402
import shipped  # noqa: E402

PICTURES = {
    "fleet": ("Cotenant / Fleet", ["Top culprits", "Top victims", "Top tenants by memory held", "Top tenants by churn"]),
    "gpu": ("Cotenant / GPU", ["Memory by tenant", "Churn", "Time blocked by a neighbour", "Slowest calls"]),
    "tenant": ("Cotenant / Tenant", ["Time blocked, by who had it", "Length of calls", "Churn", "Calls"]),
    "incident": ("Cotenant / Incident", ["Blame", "Blocked by a neighbour", "Who grew and who shrank", "Calls that failed"]),
}
CHOSEN = "systemd:chat.service"
COLOURS = ["#5794f2", "#73bf69", "#f2cc0c", "#b877d9", "#ff9830", "#8ab8ff", "#96d98d", "#ffee52", "#ca95e5", "#ffb357"]
FIXED = {"(limit)": "#e02f44", "(reserved)": "#9a9a9a", "(unattributed)": "#c4700b"}
LEGEND = 6
# What Grafana would choose for scrapes of 1 s.
WINDOW = 4


def bytes_of(value, _=None):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}"
        value /= 1024


def seconds_of(value, _=None):
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value) * factor >= 1 or unit == "µs":
            return f"{value * factor:.3g} {unit}" if value else "0"


UNITS = {
    "bytes": bytes_of,
    "Bps": lambda value, _=None: f"{bytes_of(value)}/s",
    "percentunit": lambda value, _=None: f"{value * 100:g} %",
    "s": seconds_of,
    "cps": lambda value, _=None: f"{value:.0f}/s",
    "short": lambda value, _=None: f"{value:g}",
}


def legend(target, metric):
    if target["legendFormat"] == "__auto":
        return ", ".join(f"{key}={value}" for key, value in metric.items())
    name = re.sub(r"{{(\w+)}}", lambda found: metric.get(found[1], ""), target["legendFormat"])
    return re.sub(r"(GPU-)[0-9a-f-]{28}(\w{4})", r"\1…\2", name)


class Drawing:
    def __init__(self, prometheus, start, end):
        self.prometheus, self.start, self.end = prometheus, start, end
        self.gpu = recorded.gpus(prometheus, end)[0]

    def series(self, panel):
        """Legend, labels and {time: value}, target by target."""
        step = WINDOW if "interval" in panel else 1
        for target in panel["targets"]:
            expr = promql.filled(target["expr"], recorded.NODE, self.gpu, CHOSEN, f"{WINDOW}s", f"{int(self.end - self.start)}s")
            expr = shipped.brisk(expr, recorded.FASTER) if ":rate5m" in expr else expr
            for one in self.prometheus.over(expr, self.start, self.end, step):
                values = {float(at): float(value) for at, value in one["values"] if value != "NaN"}
                yield legend(target, one["metric"]), one["metric"], values

    def matrix(self, axes, panel):
        cells = {}
        for _, metric, values in self.series(panel):
            cells[metric["victim"], metric["culprit"]] = list(values.values())[-1]
        victims = sorted({victim for victim, _ in cells})
        culprits = sorted({culprit for _, culprit in cells}, key=lambda name: (":" not in name, name))
        table = [[cells.get((victim, culprit), float("nan")) for culprit in culprits] for victim in victims]
        axes.imshow(table, cmap="YlOrRd", aspect="auto", vmin=0)
        axes.set_xticks(range(len(culprits)), culprits, rotation=18, ha="right", fontsize=8)
        axes.set_yticks(range(len(victims)), victims, fontsize=8)
        axes.set_xlabel("culprit")
        axes.set_ylabel("victim")
        top = max(cells.values())
        for row, victim in enumerate(victims):
            for column, culprit in enumerate(culprits):
                value = cells.get((victim, culprit))
                if value is not None:
                    axes.text(column, row, seconds_of(value), ha="center", va="center", color="white" if value > top * 0.6 else "black", fontsize=8)

    def graph(self, axes, panel):
        defaults = panel["fieldConfig"]["defaults"]
        stacked = defaults["custom"]["stacking"]["mode"] == "normal"
        bars = defaults["custom"]["drawStyle"] == "bars"
        below = [one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"] if any(p["value"] == "negative-Y" for p in one["properties"])]
        drawn = [(name, values) for name, _, values in self.series(panel) if values]
        # The largest that the legend has room for; the rest is drawn and not named.
        ranked = sorted(drawn, key=lambda one: -max(map(abs, one[1].values())))
        named = [name for name, _ in ranked if name not in FIXED][:LEGEND]
        bases = dict.fromkeys(name.removesuffix(" freed") for name in named)
        colour = dict(zip(bases, COLOURS))
        ground = collections.Counter()
        for name, values in drawn:
            down = any(re.search(pattern.strip("/"), name) for pattern in below)
            times = [self.start + second for second in range(int(self.end - self.start) + 1)]
            heights = [values.get(at, float("nan")) * (-1 if down else 1) for at in times]
            dates = [datetime.datetime.fromtimestamp(at, datetime.UTC) for at in times]
            ink = FIXED.get(name) or colour.get(name.removesuffix(" freed"), "#cccccc")
            label = name if name in named or name in FIXED else None
            if name == "(limit)":
                axes.plot(dates, heights, color=ink, linestyle="--", linewidth=1.5, label=label)
            elif bars:
                axes.bar(dates, heights, width=0.9 * WINDOW / 86400, color=ink, label=label)
            elif stacked:
                low = [ground[at] for at in times]
                high = [bottom + (height if height == height else 0) for bottom, height in zip(low, heights)]
                axes.fill_between(dates, low, high, color=ink, alpha=0.55, linewidth=0.8, edgecolor=ink, label=label)
                ground.update({at: top - bottom for at, bottom, top in zip(times, low, high)})
            else:
                axes.plot(dates, heights, color=ink, linewidth=1.2, linestyle=":" if down else "-", label=label)
        if defaults["unit"] == "s":
            axes.set_yscale("log")
        elif defaults["unit"] in ("bytes", "Bps"):
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2((high - low) / 6))))
        axes.yaxis.set_major_formatter(FuncFormatter(UNITS[defaults["unit"]]))
        axes.xaxis.set_major_locator(SecondLocator(bysecond=range(0, 60, 10)))
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
        axes.tick_params(axis="x", labelsize=7)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=1 if max(map(len, named), default=0) > 44 else 2, fontsize=7, frameon=False)

    def picture(self, board, titles, path):
        (board,) = [one for one in shipped.boards() if one["title"] == board]
        panels = {panel["title"]: panel for panel in board["panels"]}
        figure, places = plt.subplots(2, 2, figsize=(13, 8.2), layout="constrained")
        chosen = {"Cotenant / GPU": f"{recorded.NODE}, {self.gpu}", "Cotenant / Tenant": CHOSEN}.get(board["title"], recorded.NODE)
        figure.suptitle(f"{board['title']}: {chosen}", fontsize=12)
        for axes, title in zip(places.flat, titles):
            panel = panels[title]
            axes.set_title(f"{title} ({panel['fieldConfig']['defaults']['unit']})".replace("(percentunit)", "(threads at a time)"), fontsize=10, loc="left")
            (self.matrix if panel["type"] == "table" else self.graph)(axes, panel)
        figure.savefig(path, dpi=80)
        plt.close(figure)


def main():
    place, start, end = recorded.kept()
    with tempfile.TemporaryDirectory() as scratch, node.prometheus(pathlib.Path(scratch), "{}", place / "data") as prometheus:
        drawing = Drawing(prometheus, round(start) + 1, int(end))
        for name, (board, titles) in PICTURES.items():
            path = shipped.DASHBOARDS / "pictures" / f"{name}.png"
            drawing.picture(board, titles, path)
            print(path.relative_to(shipped.ROOT), path.stat().st_size)


if __name__ == "__main__":
    main()
