"""Workloads for `kernels benchmark`: wall clock of single calls, checked against the reference.

The runner synchronises after every call and counts the casts back to FP32 into its "Ref" column: bench_fused_cast.py
has the device times and the fair comparison.
"""

import torch
from kernels.benchmark import Benchmark


class _PerTokenCast:
    seed = 0

    def _setup(self, tokens, hidden):
        self.x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=self.device)
        # Each row has its own scale, so that a scale of another row does not pass.
        self.x *= torch.exp2(torch.arange(tokens, device=self.device) % 7 - 3).to(self.x.dtype)[:, None]

    def _cast(self):
        self.result = self.kernel.fused_per_token_cast_to_fp8(self.x, **self.options)

    def _verify(self):
        self.out = self._cast_back(*self.result)
        return self._cast_back(*self.kernel.utils.per_token_cast_to_fp8(self.x, **self.options))

    def _cast_back(self, x_fp8, sf):
        options = {name: self.options[name] for name in ("gran_k", "use_packed_ue8m0")}
        return self.kernel.utils.cast_back_from_fp8(x_fp8, sf, **options)

    def setup_1x4096(self):
        self._setup(1, 4096)

    def setup_512x7168(self):
        self._setup(512, 7168)

    def setup_4096x4096(self):
        self._setup(4096, 4096)

    benchmark_1x4096 = benchmark_512x7168 = benchmark_4096x4096 = _cast
    verify_1x4096 = verify_512x7168 = verify_4096x4096 = _verify


class FusedCastGroup32Packed(_PerTokenCast, Benchmark):
    options = dict(use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)


class FusedCastGroup128(_PerTokenCast, Benchmark):
    options = dict(use_ue8m0=False, gran_k=128, use_packed_ue8m0=False)
