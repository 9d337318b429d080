"""Compile and interpret the kernels with several releases of Triton, and print what passed.

Each release is installed by pip into a temporary directory and put before the current environment, which stays as it
is. No GPU is needed. The kernel must be built (`make build`).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
NEWEST = "newest"


def run(command, environment):
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def suites():
    """Name -> files and environment variables of the tests that need Triton but no GPU."""
    interpreted = sorted(TESTS.glob("test_*_interpreter.py"))
    compiled = sorted(TESTS.glob("test_compile*.py"))
    return {"compile": (compiled, {}), "interpreter": (interpreted, {"TRITON_INTERPRET": "1"})}


def check(release, directory):
    """Version that pip installed, and for each suite whether it passed and pytest's last line."""
    requirement = "triton" if release == NEWEST else f"triton=={release}"
    packages = str(directory / "packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, requirement], check=True
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    environment["TRITON_CACHE_DIR"] = str(directory / "cache")
    asked = run([sys.executable, "-c", "import triton; print(triton.__version__, triton.__file__)"], environment)
    version, _, path = asked.stdout.strip().partition(" ")
    if asked.returncode or not path.startswith(packages):
        raise RuntimeError(f"{requirement} cannot be imported from {packages}: {asked.stdout}")
    results = {}
    for name, (files, variables) in suites().items():
        start = time.monotonic()
        tested = run(
            [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *map(str, files)],
            {**environment, **variables},
        )
        summary = tested.stdout.strip().rpartition("\n")[2]
        # A suite that skips everything has shown nothing.
        passed = tested.returncode == 0 and " passed" in summary
        print(f"triton {version}, {name}: {summary}", flush=True)
        if not passed:
            print(tested.stdout)
        results[name] = f"{'passed' if passed else 'FAILED'} ({time.monotonic() - start:.0f} s)"
    return version, results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "releases", nargs="*", default=["3.6.0", "3.8.0", NEWEST], help=f"versions on the package index, or {NEWEST!r}"
    )
    rows = []
    for release in parser.parse_args().releases:
        with tempfile.TemporaryDirectory() as directory:
            rows.append(check(release, Path(directory)))
    names = list(suites())
    print()
    lines = [["triton", *names], ["---"] * (1 + len(names))]
    for line in lines + [[version, *results.values()] for version, results in rows]:
        print("| " + " | ".join(line) + " |")
    return any("FAILED" in result for _, results in rows for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
