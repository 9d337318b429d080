"""The benchmark tables of README.md and docs/, and the plots, from benchmarks/results/*.json.

Fills each `<!-- bench:<stem> --> ... <!-- /bench -->`.
"""

import argparse
import functools
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


def section(stem, results, root):
    """Plot and table of one benchmark, for each GPU that it ran on; root: the way from the page to README's folder."""
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
            parts.append(f"![{stem} on {env['gpu']}]({root}benchmarks/results/{gpu}_{stem}.svg)")
        parts.append(f"Cells: measured / measured beside it in the same run, ratio. {MISSED} misses the bar.")
        parts.append(table(rows))
        parts.append("\n".join(f"- {name}: {text}." for name, text in env["timing"].items()))
    return "\n\n".join(parts)


def render(page, results, root=""):
    """A page's text with every marked block filled; blocks without results stay as they are."""
    for stem in measured(results):
        block = re.compile(rf"(<!-- bench:{stem} -->\n).*?(<!-- /bench -->)", re.S)
        if block.search(page):
            text = section(stem, results, root)
            page = block.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)
    return page


def measured(results):
    return dict.fromkeys(row["benchmark"] for content in results.values() for row in content["rows"])


def plot_fused_cast(content, path):
    """At hidden 4096: time against tokens, eager and in a graph, and share of the copy rate, beside the reference."""
    plt = _pyplot("fused_cast")

    def series(metric, recipe, value):
        """({tokens: value}) of the rows of a metric and recipe."""
        sizes = [(re.match(rf"(\d+) x 4096\b.*; {re.escape(recipe)}$", row["case"]), row) for row in rows]
        found = {int(size[1]): value(row) for size, row in sizes if size and row["metric"].startswith(metric)}
        return dict(sorted(found.items()))

    def draw(axis, recipe, color, fused, reference):
        axis.plot(fused.keys(), fused.values(), "o-", color=color, label=f"fused, {recipe}")
        axis.plot(reference.keys(), reference.values(), "s--", color=color, alpha=0.6, label=f"reference, {recipe}")

    rows = [row for row in content["rows"] if row["benchmark"] == "fused_cast"]
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
    axes[2].yaxis.set_major_formatter(plt.matplotlib.ticker.PercentFormatter(1))
    for axis in axes:
        ticks = sorted({tokens for line in axis.get_lines()[:4] for tokens in line.get_xdata()})
        axis.set(xscale="log", xlabel="tokens")
        axis.set_xticks(ticks, [f"{tokens // 1024}k" if tokens >= 1024 else tokens for tokens in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    gpu = content["environment"]["fused_cast"]["gpu"]
    figure.suptitle(f"fused_per_token_cast_to_fp8 on one {gpu}, BF16 input, hidden 4096", fontsize=12)
    _save(figure, path)


def plot_shares(stem, content, path):
    """The share of the copy rate of each kernel of a benchmark, one bar for each of its cases."""
    plt = _pyplot(stem)
    rows = [row for row in content["rows"] if row["benchmark"] == stem and row["metric"].startswith("share")]
    figure, axis = plt.subplots(figsize=(9, 0.24 * len(rows) + 1.2), layout="constrained")
    colors = ["#dc2626" if met(row) is False else "#2563eb" for row in rows]
    axis.barh([row["case"] for row in rows], [row["ratio"] for row in rows], color=colors)
    for place, row in enumerate(rows):
        if row["bar"]:
            axis.plot([float(row["bar"].split()[2])] * 2, [place - 0.45, place + 0.45], color="0.1", linewidth=1.5)
    axis.axvline(1, color="0.4", linewidth=1)
    axis.xaxis.set_major_formatter(plt.matplotlib.ticker.PercentFormatter(1))
    axis.invert_yaxis()
    axis.set(title=f"Rate on one {content['environment'][stem]['gpu']}, device copy = 100%; black: the bar")
    _save(figure, path)


def _pyplot(stem):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 10, "lines.markersize": 5, "axes.spines.top": False, "axes.spines.right": False}
    plt.rcParams.update({**style, "svg.fonttype": "none", "svg.hashsalt": stem})
    return plt


def _save(figure, path):
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    _pyplot(path.stem).close(figure)


SHARES = ("fused_block_cast", "fused_transpose_cast", "fused_activation", "fused_norm", "fused_moe")
PLOTS = {"fused_cast": plot_fused_cast, **{stem: functools.partial(plot_shares, stem) for stem in SHARES}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a page is stale or a plot missing")
    args = parser.parse_args()
    results = load(RESULTS)
    pages = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    for stem in measured(results):
        if not any(f"<!-- bench:{stem} -->" in page for page in pages.values()):
            sys.exit(f"no page has <!-- bench:{stem} --> ... <!-- /bench -->")
    rendered = {path: render(page, results, "../" * (path.parent != ROOT)) for path, page in pages.items()}
    plots = {
        RESULTS / f"{gpu}_{stem}.svg": (plot, content)
        for gpu, content in results.items()
        for stem, plot in PLOTS.items()
        if stem in content["environment"]
    }
    if args.check:
        stale = [path.name for path in plots if not path.exists()]
        stale += [path.name for path, page in pages.items() if rendered[path] != page]
        sys.exit(f"out of date, run scripts/render_results.py: {', '.join(stale)}" if stale else 0)
    for path, page in rendered.items():
        path.write_text(page)
    for path, (plot, content) in plots.items():
        plot(content, path)


if __name__ == "__main__":
    main()
