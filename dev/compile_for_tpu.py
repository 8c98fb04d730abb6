"""Compile the engine's programs for a TPU topology on a machine without one, and print what each takes.

    pip install --target build/libtpu --no-deps libtpu
    python dev/compile_for_tpu.py build/libtpu [--topology v5e:2x2] [--json]

The shape of Qwen2.5-0.5B in bfloat16, 64 slots per chip in places of 8, prompts of 512 and rows of 1,024 tokens. libtpu
is kept out of the environment, because every jax process would look for a TPU then.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libtpu", type=Path, help="the folder that libtpu was installed into")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ["TPU_LIBRARY_PATH"] = str(args.libtpu / "libtpu" / "libtpu.so")
    sys.path[:0] = [str(args.libtpu), str(Path(__file__).parents[1] / "benchmarks")]

    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh
    from models import QWEN_05B

    from groupax.engine.ahead_of_time import lowered_programs
    from groupax.engine.plan import CacheShape
    from groupax.models.families import read_config
    from groupax.parallel.mesh import AXES

    devices = np.array(topologies.get_topology_desc(args.topology, platform="tpu").devices)
    mesh = Mesh(devices.reshape(-1, 1, 1, 1, 1), AXES)
    shape = CacheShape(num_slots=64, share=8, num_prompt_columns=512, num_columns=1024)
    rows = []
    for name, lowered in lowered_programs(read_config(QWEN_05B), mesh, shape).items():
        started_s = time.perf_counter()
        memory: Any = lowered.compile().memory_analysis()
        rows.append(
            {
                "program": name,
                "topology": args.topology,
                "compile_s": round(time.perf_counter() - started_s, 1),
                "arguments_gb": round(memory.argument_size_in_bytes / 1e9, 3),
                "temporaries_gb": round(memory.temp_size_in_bytes / 1e9, 3),
            }
        )
    for row in rows:
        print(json.dumps(row) if args.json else "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
