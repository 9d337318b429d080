"""README's benchmark tables, and the plots, from benchmarks/results/*.json.

Fills each `<!-- bench:<stem> --> ... <!-- /bench -->` of README.md.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import RESULTS, cell, met  # noqa: E402

MISSED = "❌"


def load(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def bar_text(row):
    """A bar as a reader sees it: `ratio >= 0.95` is `≥ 0.95x`, `value <= 1` is `≤ 1 us`."""
    if row["bar"] is None:
        return ""
    field, sign, limit, *aim = row["bar"].split()
    unit = "x" if field == "ratio" else f" {row['unit']}"
    return " ".join([{"<=": "≤", ">=": "≥"}[sign], limit + unit.rstrip(), *aim])


def marked(row):
    return cell(row) + (f" {MISSED}" if met(row) is False else "")


def table(rows):
    """Markdown table: metrics one under the other, the columns that the cases name side by side."""
    columns = list(dict.fromkeys(row["case"].partition("; ")[2] for row in rows))
    by_place = {(row["metric"], *row["case"].partition("; ")[::2]): row for row in rows}
    lines = ["| | " + " | ".join([*(column or "measured" for column in columns), "bar"]) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for metric, baseline in dict.fromkeys((row["metric"], row["baseline"]) for row in rows):
        beside = f", beside {baseline}" if baseline else ""
        lines.append(f"| **{metric}**{beside} |" + " |" * (len(columns) + 1))
        for what in dict.fromkeys(case for name, case, _ in by_place if name == metric):
            line = [by_place.get((metric, what, column)) for column in columns]
            bars = dict.fromkeys(bar_text(row) for row in line if row)
            cells = [marked(row) if row else "" for row in line]
            lines.append("| " + " | ".join([what, *cells, ", ".join(bars)]) + " |")
    return "\n".join(lines)


def section(stem, results):
    """Plot and table of one benchmark, for each GPU that it ran on."""
    parts = []
    for gpu, content in results.items():
        rows = [row for row in content["rows"] if row["benchmark"] == stem]
        if not rows:
            continue
        env = content["environment"][stem]
        parts.append(
            f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, Triton {env['triton']}, "
            f"Python {env['python']}, {env['cpu']}; kernel `{env['kernel']}`, {env['date']}."
        )
        if stem in PLOTS:
            parts.append(f"![{stem} on {env['gpu']}](benchmarks/results/{gpu}_{stem}.svg)")
        parts.append(f"Cells: measured / measured beside it in the same run, ratio. {MISSED} misses the bar.")
        parts.append(table(rows))
        parts.append("\n".join(f"- {name}: {text}." for name, text in env["timing"].items()))
    return "\n\n".join(parts)


def render(readme, results):
    """README's text with every marked block filled; blocks without results stay as they are."""
    stems = dict.fromkeys(row["benchmark"] for content in results.values() for row in content["rows"])
    for stem in stems:
        block = re.compile(rf"(<!-- bench:{stem} -->\n).*?(<!-- /bench -->)", re.S)
        if not block.search(readme):
            sys.exit(f"README.md has no <!-- bench:{stem} --> ... <!-- /bench -->")
        text = section(stem, results)
        readme = block.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", readme)
    return readme


def plot_fused_cast(content, path):
    """At hidden 4096: time against tokens, eager and in a graph, and share of the copy rate, beside the reference."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    def series(metric, recipe, value):
        """({tokens: value}) of the rows of a metric and recipe."""
        sizes = [(re.match(rf"(\d+) x 4096\b.*; {re.escape(recipe)}$", row["case"]), row) for row in rows]
        found = {int(size[1]): value(row) for size, row in sizes if size and row["metric"].startswith(metric)}
        return dict(sorted(found.items()))

    def draw(axis, recipe, color, fused, reference):
        axis.plot(fused.keys(), fused.values(), "o-", color=color, label=f"fused, {recipe}")
        axis.plot(reference.keys(), reference.values(), "s--", color=color, alpha=0.6, label=f"reference, {recipe}")

    rows = [row for row in content["rows"] if row["benchmark"] == "fused_cast"]
    style = {"font.size": 10, "lines.markersize": 5, "axes.spines.top": False, "axes.spines.right": False}
    plt.rcParams.update({**style, "svg.hashsalt": "fused_cast"})
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    speedup = "speedup over the reference"
    times = {"Eager call": f"{speedup} (eager)", "Graph replay": f"{speedup} (graph replay)"}
    for recipe, color in zip(dict.fromkeys(row["case"].partition("; ")[2] for row in rows), ("#2563eb", "#ea580c")):
        for axis, metric in zip(axes, times.values()):
            fused, reference = (series(metric, recipe, lambda row: row[key]) for key in ("value", "baseline_value"))
            draw(axis, recipe, color, fused, reference)
        share = series("share of the copy rate", recipe, lambda row: row["ratio"])
        slower = series(times["Graph replay"], recipe, lambda row: row["ratio"])
        draw(axes[2], recipe, color, share, {m: share[m] / slower[m] for m in share if m in slower})

    limits = [limit for axis in axes[:2] for limit in axis.dataLim.intervaly]
    for axis, title in zip(axes, times):
        axis.set(yscale="log", ylabel="time (us)", title=title, ylim=(min(limits) / 1.5, max(limits) * 1.5))
        axis.yaxis.set_major_formatter("{x:g}")
    axes[2].axhline(1, color="0.4", linewidth=1)
    axes[2].set(ylabel="share", ylim=(0, 1.1), title="Rate, device copy = 100%")
    axes[2].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    for axis in axes:
        ticks = sorted({tokens for line in axis.get_lines()[:4] for tokens in line.get_xdata()})
        axis.set(xscale="log", xlabel="tokens")
        axis.set_xticks(ticks, [f"{tokens // 1024}k" if tokens >= 1024 else tokens for tokens in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    gpu = content["environment"]["fused_cast"]["gpu"]
    figure.suptitle(f"fused_per_token_cast_to_fp8 on one {gpu}, BF16 input, hidden 4096", fontsize=12)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


PLOTS = {"fused_cast": plot_fused_cast}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if README.md is stale or a plot missing")
    args = parser.parse_args()
    results, readme = load(RESULTS), ROOT / "README.md"
    rendered = render(readme.read_text(), results)
    plots = {
        RESULTS / f"{gpu}_{stem}.svg": (plot, content)
        for gpu, content in results.items()
        for stem, plot in PLOTS.items()
        if stem in content["environment"]
    }
    if args.check:
        stale = [path.name for path in plots if not path.exists()] + ["README.md"] * (rendered != readme.read_text())
        sys.exit(f"out of date, run scripts/render_results.py: {', '.join(stale)}" if stale else 0)
    readme.write_text(rendered)
    for path, (plot, content) in plots.items():
        plot(content, path)


if __name__ == "__main__":
    main()
