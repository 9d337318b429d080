"""Speed of RMSNorm with the cast, and of its backward, beside a device copy of the same bytes and beside separate steps.

Needs a CUDA GPU. Prints a table and merges its rows into <out>/<gpu>.json (form: common.py).
"""

from functools import partial

import torch
import torch.nn.functional as F

from common import copies, eager_seconds, graph_seconds, rotated, run, warm_up

RECIPES = {
    "group 32, packed UE8M0": dict(use_ue8m0=True, gran_k=32, use_packed_ue8m0=True),
    "group 128, FP32": dict(use_ue8m0=False, gran_k=128, use_packed_ue8m0=False),
}
COPY = "device copy of the same bytes"
SEPARATE = "addition, torch.nn.functional.rms_norm, fused cast"
AUTOGRAD = "torch.autograd.grad of torch.nn.functional.rms_norm"
SHAPES = tuple((rows, hidden) for hidden in (4096, 7168) for rows in (8192, 16384))
SMALL = (1, 64, 512)  # here one buffer set is timed over and over, and it stays in L2
EPS = 1e-6
US = 1e6


def case(rows, hidden, column, extra=""):
    return f"{rows} x {hidden}{extra}{' in L2' if rows in SMALL else ''}; {column}"


def sets(make, rows, nbytes):
    return [make()] if rows in SMALL else rotated(make, nbytes)


def bf16(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def forward_buffers(rows, hidden, options, residual):
    """Keyword arguments of one call, outputs given."""
    columns, sf_dtype = hidden // options["gran_k"], torch.float32
    if options["use_packed_ue8m0"]:
        columns, sf_dtype = columns // 4, torch.int32
    arguments = dict(x=bf16(rows, hidden), weight=bf16(hidden), eps=EPS, **options)
    arguments["out"] = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device="cuda")
    arguments["out_sf"] = torch.empty(rows, columns, dtype=sf_dtype, device="cuda")
    if residual:
        arguments["residual"] = bf16(rows, hidden)
        arguments["out_residual"] = torch.empty_like(arguments["residual"])
    return arguments


def forward_bytes(rows, hidden, options, residual):
    """Bytes that the forward must read and write."""
    sf_bytes = 1 if options["use_packed_ue8m0"] else 4
    return rows * (hidden * (7 if residual else 3) + hidden // options["gran_k"] * sf_bytes) + 2 * hidden


def separate_steps(kernel, arguments, options):
    """What a user has without the fused kernel."""
    h, weight = arguments["x"], arguments["weight"]
    if "residual" in arguments:
        h = torch.add(h, arguments["residual"], out=arguments["out_residual"])
    y = F.rms_norm(h, weight.shape, weight, EPS)
    return kernel.fused_per_token_cast_to_fp8(y, **options, out=arguments["out"], out_sf=arguments["out_sf"])


def compilation(kernel, results, quick):
    rows, calls = 128, []
    for hidden in sorted({hidden for _, hidden in SHAPES}):
        for options in RECIPES.values():
            for residual in (False, True):
                arguments = forward_buffers(rows, hidden, options, residual)
                calls.append(partial(kernel.fused_rms_norm_cast_to_fp8, **arguments))
            calls.append(partial(separate_steps, kernel, arguments, options))
        calls.append(partial(kernel.fused_rms_norm_cast_to_fp8, **arguments, with_transposed=True))
        rstd = torch.ones(rows, device="cuda")
        calls.append(partial(kernel.fused_rms_norm_backward, bf16(rows, hidden), bf16(rows, hidden), bf16(hidden), rstd))
    warm_up(calls)


def forward(kernel, results, quick):
    for recipe, options in RECIPES.items():
        for residual in (False, True):
            for rows, hidden in SHAPES[::3] if quick else SHAPES:
                nbytes = forward_bytes(rows, hidden, options, residual)
                buffers = sets(partial(forward_buffers, rows, hidden, options, residual), rows, nbytes)
                fused, separate, copy = graph_seconds(
                    [partial(kernel.fused_rms_norm_cast_to_fp8, **arguments) for arguments in buffers],
                    [partial(separate_steps, kernel, arguments, options) for arguments in buffers],
                    copies(nbytes, len(buffers)),
                    nbytes=nbytes,
                    repeats=5 if quick else 9,
                )
                name = case(rows, hidden, recipe, " + residual" if residual else "")
                results.add(name, "forward, share of the copy rate (graph replay)", nbytes / fused / 1e12, "TB/s", COPY,
                            nbytes / copy / 1e12, "ratio >= 0.92")
                results.add(name, "speedup over separate steps (graph replay)", fused * US, "us", SEPARATE,
                            separate * US)


def few_rows(kernel, results, quick):
    hidden = 4096
    for recipe, options in RECIPES.items():
        for rows in SMALL:
            nbytes = forward_bytes(rows, hidden, options, True)
            buffers = sets(partial(forward_buffers, rows, hidden, options, True), rows, nbytes)
            fused = [partial(kernel.fused_rms_norm_cast_to_fp8, **arguments) for arguments in buffers]
            separate = [partial(separate_steps, kernel, arguments, options) for arguments in buffers]
            name = case(rows, hidden, recipe, " + residual")
            for metric, (one, three) in {
                "speedup over separate steps (graph replay)": graph_seconds(fused, separate, nbytes=nbytes, repeats=7),
                "speedup over separate steps (eager)": eager_seconds(fused, separate, calls=100, repeats=5),
            }.items():
                results.add(name, metric, one * US, "us", SEPARATE, three * US)


def transposed(kernel, results, quick):
    options = RECIPES["group 128, FP32"]
    for rows, hidden in SHAPES[::3] if quick else SHAPES:
        nbytes = forward_bytes(rows, hidden, options, True) + rows * hidden * 33 // 32

        def make():
            arguments = forward_buffers(rows, hidden, options, True)
            arguments["out_transposed"] = torch.empty(hidden, rows, dtype=torch.float8_e4m3fn, device="cuda")
            arguments["out_transposed_sf"] = torch.empty(hidden, rows // 128, device="cuda")
            return arguments

        buffers = sets(make, rows, nbytes)
        fused, copy = graph_seconds(
            [partial(kernel.fused_rms_norm_cast_to_fp8, **arguments) for arguments in buffers],
            copies(nbytes, len(buffers)),
            nbytes=nbytes,
            repeats=5,
        )
        results.add(case(rows, hidden, "group 128, FP32", " + residual"),
                    "forward with the transposed copy, two launches, share of the copy rate (graph replay)",
                    nbytes / fused / 1e12, "TB/s", COPY, nbytes / copy / 1e12)


def backward(kernel, results, quick):
    for rows, hidden in SHAPES[::3] if quick else SHAPES:
        nbytes = rows * (hidden * 6 + 4) + 4 * hidden

        def make():
            h, weight = bf16(rows, hidden), bf16(hidden)
            rstd = h.float().square().mean(1).add(EPS).rsqrt()
            return bf16(rows, hidden), h, weight, rstd, None, torch.empty_like(h), torch.empty_like(weight)

        def autograd(dy, h, weight):
            y = F.rms_norm(h.requires_grad_(), weight.shape, weight.requires_grad_(), EPS)
            return partial(torch.autograd.grad, y, (h, weight), dy, retain_graph=True)

        buffers = sets(make, rows, nbytes)
        calls = [partial(kernel.fused_rms_norm_backward, *arguments) for arguments in buffers]
        fused, copy = graph_seconds(calls, copies(nbytes, len(buffers)), nbytes=nbytes, repeats=5)
        results.add(case(rows, hidden, "bf16"), "backward, share of the copy rate (graph replay)", nbytes / fused / 1e12,
                    "TB/s", COPY, nbytes / copy / 1e12)
        separate = [autograd(*(t.clone() for t in arguments[:3])) for arguments in buffers[:2]]
        fused, torchs = eager_seconds(calls, separate, calls=20, repeats=3)
        results.add(case(rows, hidden, "bf16"), "speedup of the backward (eager)", fused * US, "us", AUTOGRAD, torchs * US)


SECTIONS = (compilation, forward, few_rows, transposed, backward)


if __name__ == "__main__":
    run("fused_norm", SECTIONS, __doc__)
