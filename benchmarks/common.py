"""Timing and result rows shared by the bench_<stem>.py files.

results/<gpu>.json is `{"environment": {stem: {...}}, "rows": [...]}`. Running bench_<stem>.py replaces the rows and
the environment of its stem and keeps the others, so that every row keeps the machine and versions it was measured on.
A row holds

    benchmark       the stem
    case            "<what>; <column>": README puts the columns of one <what> side by side; the column is optional
    metric, unit    what `value` and `baseline_value` are
    baseline        name of what was measured beside it in the same run, or null
    ratio           value / baseline_value, or its inverse where the metric starts with "speedup"; null without one
    bar             "<value|ratio> <<=|>=> <limit>", "(aim)" behind it where it is one, or null
"""

import argparse
import functools
import gc
import json
import operator
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROTATED_BYTES = 256 * 2**20  # several times the largest L2, so that a launch finds nothing of its last turn there
TIMING = {
    "graph replay": "device time per launch of a CUDA graph that rotates over its buffer sets (one set only in cases "
    "marked 'in L2'); the graphs compared replay in turn, each behind an untimed replay; median of the replays",
    "eager": "CUDA events around a loop of calls, divided by their number; the calls compared take turns; median",
    "host": "host clock around a loop of calls that the device keeps up with, divided by their number; likewise",
}


@functools.cache
def kernel_source():
    """(repo id, version) of the kernel, from build.toml."""
    toml = (ROOT / "build.toml").read_text()
    return (re.search(r'^repo-id\s*=\s*"(.+)"', toml, re.M)[1], int(re.search(r"^version\s*=\s*(\d+)", toml, re.M)[1]))


def load_kernel():
    """The kernel as a user gets it: LOCAL_KERNELS where set, else this checkout's build/, else the Hub."""
    from kernels import get_kernel

    repo_id, version = kernel_source()
    if "LOCAL_KERNELS" not in os.environ and (ROOT / "build").is_dir():
        os.environ["LOCAL_KERNELS"] = f"{repo_id}={ROOT}"
    return get_kernel(repo_id, version=version)


def rotated(make, nbytes):
    """Results of make(), each `nbytes` large: at least two, and together more than ROTATED_BYTES."""
    return [make() for _ in range(max(2, ROTATED_BYTES // nbytes + 1))]


def copies(nbytes, sets):
    """Workload of device copies that read and write `nbytes` together, over `sets` pairs of buffers.

    Rounded up to pages, for many other sizes were seen to be copied a third slower.
    """
    pages = -(-nbytes // (2 * 4096))
    sources = [torch.randint(256, (pages * 4096,), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    return [functools.partial(torch.empty_like(x).copy_, x) for x in sources]


def warm_up(calls):
    """Call each once, side by side: one after the other, kernels take longer to compile than to measure."""
    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit(call) for call in calls]:
            made.result()
    torch.cuda.synchronize()


def _medians(measures, repeats):
    warm = time.perf_counter() + 0.05  # long enough for the clocks to rise
    while time.perf_counter() < warm:
        for measure in measures:
            measure()
    rounds = [[measure() for measure in measures] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds)]


def _capture(calls, launches):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(-(-launches // len(calls))):
            for call in calls:
                call()
    return graph, -(-launches // len(calls)) * len(calls)


def _event_seconds(run, lead_in=None):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if lead_in:
        lead_in()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def graph_seconds(*workloads, nbytes, repeats=15):
    """Device seconds per launch of each workload, by graph replay (TIMING).

    A workload is a list of calls without arguments, one for each buffer set. `nbytes` is what one launch moves: a graph
    holds as many launches as move 8 GB (about 2 ms on an H200), at most 200, so that the ends of a replay do not count.
    """
    launches = min(200, max(8, int(8e9 // nbytes)))
    graphs = [_capture(calls, launches) for calls in workloads]

    # The untimed replay keeps the device busy while the host submits the timed one.
    return _medians(
        [lambda g=graph, n=count: _event_seconds(g.replay, lead_in=g.replay) / n for graph, count in graphs], repeats
    )


def eager_seconds(*workloads, calls, repeats=7):
    """Seconds per call of each workload as the device sees them, called one by one from Python (TIMING)."""

    def measure(workload):
        def run():
            for i in range(calls):
                workload[i % len(workload)]()

        return _event_seconds(run) / calls

    return _medians([functools.partial(measure, workload) for workload in workloads], repeats)


def host_seconds(*calls, count=1000, repeats=15):
    """Host seconds of each call (TIMING). Where its device work takes longer, this times a full launch queue."""

    def measure(call):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    gc.disable()
    try:
        return _medians([functools.partial(measure, call) for call in calls], repeats)
    finally:
        gc.enable()


def _driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.partition("\n")[0] or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu():
    try:
        return re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor()


def environment(kernel, quick):
    """Where and how the rows were measured."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "kernel": kernel.__name__,
        "kernel_version": kernel_source()[1],
        "date": date.today().isoformat(),
        "timing": TIMING,
        "quick": quick,
    }


class Results:
    """Rows of one benchmark, merged into <folder>/<gpu>.json by save()."""

    def __init__(self, stem, environment, folder):
        self.stem, self.environment, self.rows = stem, environment, []
        gpu = re.sub(r"[^a-z0-9]+", "_", environment["gpu"].lower()).strip("_")
        self.path = Path(folder) / f"{gpu}.json"

    def add(self, case, metric, value, unit, baseline=None, baseline_value=None, bar=None):
        ratio = None
        if baseline is not None:
            ratio = baseline_value / value if metric.startswith("speedup") else value / baseline_value
        row = dict(benchmark=self.stem, case=case, metric=metric, value=value, unit=unit)
        row |= dict(baseline=baseline, baseline_value=baseline_value, ratio=ratio, bar=bar)
        self.rows.append({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()})

    def save(self):
        old = json.loads(self.path.read_text()) if self.path.exists() else {"environment": {}, "rows": []}
        merged = {
            "environment": {**old["environment"], self.stem: self.environment},
            "rows": [row for row in old["rows"] if row["benchmark"] != self.stem] + self.rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(merged, indent=1) + "\n")


def met(row):
    """Whether a row meets its bar; None where it has none."""
    if row["bar"] is None:
        return None
    field, sign, limit = row["bar"].split()[:3]
    return {"<=": operator.le, ">=": operator.ge}[sign](row[field], float(limit))


def number(value):
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def cell(row):
    """`value unit`, or `value / baseline_value unit, ratio` of a row, as text."""
    if row["baseline"] is None:
        return f"{number(row['value'])} {row['unit']}".rstrip()
    ratio = f"{row['ratio']:.3f}" if row["ratio"] < 10 else f"{row['ratio']:.1f}"
    return f"{number(row['value'])} / {number(row['baseline_value'])} {row['unit']}, {ratio}x"


def print_table(rows):
    """The rows as an aligned table on stdout, and how many of them meet their bar."""
    verdict = {None: "", True: "met", False: "MISSED"}
    table = [(row["metric"], row["case"], cell(row), row["bar"] or "", verdict[met(row)]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
    verdicts = [met(row) for row in rows]
    print(f"{verdicts.count(True)} bars met, {verdicts.count(False)} missed")


def run(stem, sections, description):
    """Command line of a bench_<stem>.py: each `section(kernel, results, quick)` adds rows, saved as they come."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats; marked as quick in the results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of <gpu>.json (default: benchmarks/results)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")

    torch.manual_seed(0)
    kernel = load_kernel()
    results, failed = Results(stem, environment(kernel, args.quick), args.out), []
    for section in sections:
        start = time.perf_counter()
        try:
            section(kernel, results, args.quick)
        except Exception:  # what the other sections measured is kept
            traceback.print_exc()
            failed.append(section.__name__)
        results.save()
        print(f"{section.__name__}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    print_table(results.rows)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
