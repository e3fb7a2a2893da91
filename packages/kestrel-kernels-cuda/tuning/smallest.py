"""The smallest shared cases of every kernel, in one process, for ``compute-sanitizer``.

compute-sanitizer --tool memcheck python packages/kestrel-kernels-cuda/tuning/smallest.py [--dtype bfloat16] [--cases 2]
"""

from __future__ import annotations

import argparse

import torch
from stopwatch import need_gpu

from kestrel.ops import OPS, Case, Inputs
from kestrel.spi import Yes
from kestrel_kernels_cuda.backend import CudaBackend
from kestrel_kernels_cuda.launch import DTYPES


def size(inputs: Inputs) -> int:
    """Numbers among the arguments."""
    return sum(x.numel() for x in inputs.args if isinstance(x, torch.Tensor))


def main() -> None:
    """Run them; the sanitizer says what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--cases", type=int, default=2, help="of each op")
    args = parser.parse_args()
    need_gpu()
    device, count = torch.device("cuda"), 0
    for name, impl in CudaBackend().impls().items():
        known = args.dtype if args.dtype in OPS[name].tolerances else "float32"
        dtype = DTYPES[known]
        made: list[tuple[int, Case]] = []
        for case in OPS[name].cases():
            if isinstance(impl.supports(case.query(dtype)), Yes):
                numbers = size(case.make(0, torch.device("cpu"), dtype))
                if numbers:
                    made.append((numbers, case))
        for _, case in sorted(made, key=lambda pair: pair[0])[: args.cases]:
            inputs = case.make(0, device, dtype)
            values = list(inputs.args)
            if inputs.weight is not None:
                values[inputs.weight] = impl.pack(values[inputs.weight])
            impl.fn(*values, **inputs.kwargs)
            torch.cuda.synchronize()
            count += 1
            print(f"{case}, {known}", flush=True)
    print(f"{count} cases ran")


if __name__ == "__main__":
    main()
