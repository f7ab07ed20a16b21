"""Every kernel once or a few times, small: what compute-sanitizer runs.

compute-sanitizer --tool memcheck python -m tests.gpu.allreduce.sanitize      (also initcheck, synccheck)
"""

from __future__ import annotations

import sys

import torch

from tests.gpu.allreduce.conftest import CACHE
from tests.gpu.allreduce.rig import DTYPES, KIB, TOPOLOGIES, same_bits, tree_sum
from verifier.allreduce.group import AllReduceGroup, Norm, virtual_group
from verifier.allreduce.library import KernelLibrary, build_library
from verifier.allreduce.tactics import Tactic, candidate_tactics


def run_one(group: AllReduceGroup, tactic: Tactic, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A plain call, checked on the CPU so that few foreign kernels run; rows get a fused one as well."""
    inputs = [torch.randn(shape).to(dtype) for _ in range(group.topology.world)]
    on_gpu = [each.cuda() for each in inputs]
    outputs = [torch.empty_like(each) for each in on_gpu]
    group.all_reduce(on_gpu, outputs, tactic=tactic)
    expected = tree_sum(inputs, group.topology.island_size)
    if not all(same_bits(output.cpu(), expected) for output in outputs):
        raise RuntimeError(f"{tactic} {dtype} {shape} is wrong")
    if len(shape) == 2:
        weight = torch.ones(shape[-1]).to(dtype).cuda()
        norms = [Norm(residual=on_gpu[0], residual_output=torch.empty_like(x), weight=weight, eps=1e-6) for x in on_gpu]
        group.all_reduce(on_gpu, outputs, tactic=tactic, norms=norms)
        bits = [output.cpu() for output in outputs]
        if not all(torch.equal(each, bits[0]) for each in bits) or not bool(bits[0].isfinite().all()):
            raise RuntimeError(f"{tactic} {dtype} {shape}: the norm is wrong")


def main() -> int:
    library = KernelLibrary(build_library(CACHE, compute_capability=torch.cuda.get_device_capability()))
    calls = 0
    for topology in TOPOLOGIES:
        group = virtual_group(library, topology, ll_bytes=16 * KIB, bulk_bytes=16 * KIB, timeout_s=120.0)
        group.set_epoch(2**24 - 2)  # the sweep is among the calls
        for dtype in DTYPES:
            for tactic in candidate_tactics(topology):
                if tactic.num_ctas == 4:
                    run_one(group, tactic, dtype, (2, 1024))
                    run_one(group, tactic, dtype, (1003,))
                    calls += 3
        torch.cuda.synchronize()
        group.check()
        group.close()
    sys.stdout.write(f"{calls} calls, all right\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
