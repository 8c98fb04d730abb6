"""Prints where the time of `.ci/run` went, and fails if it was more than two ordinary cores may take.

The budget is for a machine that counts `COUNTED` numbers in `COUNTING_S` seconds, as a Zen 3 server does, and reaches
`SGEMM_GFLOPS`, as two cores with AVX2 at 2.5 GHz do; one that is slower in either has more time, in proportion.
PART_TIMES and TEST_TIMES name files of lines that begin with seconds.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path

BUDGET_S = 1800
COUNTED, COUNTING_S = 20_000_000, 0.5
SGEMM_GFLOPS = 160  # 2 cores x 32 operations a cycle x 2.5 GHz


def counting_s() -> float:
    """Returns the least of three times in which this machine counts."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(COUNTED):
            pass
        times.append(time.perf_counter() - start)
    return min(times)


def sgemm_gflops(size: int = 2048) -> float:
    """Returns the speed of a product of two square float32 matrices, the best of five."""
    import numpy as np

    a = np.ones((size, size), np.float32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e9


def main() -> None:
    """Prints the seconds of the parts and of the 20 slowest tests; exits with 1 above the budget."""
    parts = [line.split(maxsplit=1) for line in Path(os.environ["PART_TIMES"]).read_text().splitlines()]
    tests = Counter()
    for line in Path(os.environ["TEST_TIMES"]).read_text().splitlines():
        seconds, name = line.rsplit(maxsplit=1)[0].split(maxsplit=1)
        tests[name] += float(seconds)
    for name, seconds in tests.most_common(20):
        print(f"{seconds:7.1f} s  {name}")
    for seconds, name in parts:
        print(f"{int(seconds):7} s  {name.strip()}")
    speed = sgemm_gflops()
    slowness = max(1.0, counting_s() / COUNTING_S, SGEMM_GFLOPS / speed)
    total, budget = sum(int(seconds) for seconds, _ in parts), BUDGET_S * slowness
    print(f"{total:7} s  in all, of {budget:.0f} s; {len(tests)} tests; {speed:.0f} GFLOP/s (sgemm, 2048)")
    if total > budget:
        sys.exit(f".ci/run took {total} s, its budget is {budget:.0f} s: make tests smaller, or draw their cases")


if __name__ == "__main__":
    main()
