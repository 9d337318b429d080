"""Where every test gets the kernel from, and the shapes they share."""

import os
from pathlib import Path

import torch
from kernels import get_kernel

REPO_ID = "kernels-community/deep-gemm"
ROOT = Path(__file__).resolve().parents[1]


def _find_build():
    """Let get_kernel find build/, unless LOCAL_KERNELS already says where the kernel is."""
    entries = [entry for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry]
    if any(entry.startswith(f"{REPO_ID}=") for entry in entries):
        return
    if not (ROOT / "build").is_dir():
        raise FileNotFoundError(f"{ROOT / 'build'} is missing: run `make build`, or name a build in LOCAL_KERNELS")
    os.environ["LOCAL_KERNELS"] = ":".join([*entries, f"{REPO_ID}={ROOT / 'build'}"])


_find_build()
deep_gemm = get_kernel("kernels-community/deep-gemm", version=3)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Hidden sizes of the models that benchmarks and tests have in mind.
HIDDEN = {"Qwen3-30B-A3B": 2048, "Llama-3.1-8B": 4096, "DeepSeek-V3": 7168}


def forget(planned):
    """Drop what a function remembers of earlier calls."""
    planned.plans.clear()
    planned.latest.clear()
