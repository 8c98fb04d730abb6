"""Tokens per second of decoding with a constraint and without, alternating in one process.

python benchmarks/constraints.py MODEL_FOLDER
"""

import argparse
import time
from dataclasses import replace

from groupax import Engine, SamplingParams

ANYTHING = "[^\x00-\x08]*"  # rows never end early, as without a constraint


def tokens_per_s(engine: Engine, params: SamplingParams, calls: int) -> float:
    """Returns the throughput of some calls with the same prompt."""
    started_s, num_tokens = time.perf_counter(), 0
    for step in range(calls):
        [group] = engine.generate("Once", params, step=step)
        num_tokens += sum(len(completion.tokens) for completion in group)
    return num_tokens / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    engine = Engine.load(args.model)
    free = SamplingParams(n=args.rows, max_tokens=args.tokens, seed=1, ignore_eos=True)
    constrained = replace(free, regex=ANYTHING)
    for params in (free, constrained):
        engine.generate("Once", params)  # compiles
    for _ in range(args.repeats):
        without, with_one = (tokens_per_s(engine, params, args.calls) for params in (free, constrained))
        print(f"{without:.0f} tokens/s without, {with_one:.0f} with a constraint: {with_one / without:.2f}")


if __name__ == "__main__":
    main()
