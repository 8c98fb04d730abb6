"""Stand-ins for SLURM's commands: a job runs on this machine, and its nodes are 127.0.0.1, 127.0.0.2 and so on."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# One task on each node, with the variables of a step that jax reads; SIGTERM goes on to the tasks.
SRUN = """
while [[ "$1" == --* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; --nodelist=*) nodes=${1#*=} ;; esac
  shift
done
echo "srun on $nodes is $$"
export SLURM_STEP_NODELIST=$nodes SLURM_LOCALID=0
export SLURM_NTASKS=$tasks SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_NUM_NODES=$tasks
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" & runs+=($!); done
trap 'signalled=1; kill "${runs[@]}"' TERM
status=0
for run in "${runs[@]}"; do
  signalled=0 code=0
  wait "$run" || code=$?
  if ((signalled)); then code=0; wait "$run" || code=$?; fi
  ((code > status)) && status=$code
done
echo "step on $nodes ended with $status"
exit $status
"""
SCONTROL = """
case "$*" in
"show hostnames $SLURM_JOB_NODELIST") for ((node = 1; node <= SLURM_NNODES; node++)); do echo "127.0.0.$node"; done ;;
"requeue $SLURM_JOB_ID") echo "requeued $2"; kill -TERM "$PPID"; exit 1 ;;
esac
"""
LONGEST_S = 900
GROUPAX = f'exec {sys.executable} -m groupax "$@"'


def run_job(folder, text, **variables):
    """Runs a job, and kills all that it has started and left; returns its status and its output.

    Args:
        folder: for the job's file and the commands.
        text: of the job; `#SBATCH --nodes=` says how many nodes it has.
        variables: of the environment.
    """
    for name, lines in (("srun", SRUN), ("scontrol", SCONTROL), ("groupax", GROUPAX)):
        (folder / name).write_text(f"#!/bin/bash\n{lines}")
        (folder / name).chmod(0o755)
    (folder / "job.sbatch").write_text(text)
    [num_nodes] = re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    own = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "list", "SLURM_NNODES": num_nodes}
    environment = {
        **os.environ,
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **own,
        **variables,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["bash", str(folder / "job.sbatch")]
    with subprocess.Popen(command, cwd=folder, env=environment, process_group=0, **pipes) as process:
        try:
            out, _ = process.communicate(timeout=LONGEST_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out
