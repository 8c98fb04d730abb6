"""The job script that `groupax launch slurm` writes.

It relies on three facts about SLURM. A `--signal` without "B:" goes to all tasks and not to the script: before the time
limit the trainers receive SIGTERM, save their state and end with status 75, and the job requeues itself. SIGTERM sent
to srun would kill its tasks, so the script never uses it to request a stop. After a node failure or a preemption by
another job, SLURM requeues the job.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from groupax.errors import PREEMPTED
from groupax.launch.argv import LAUNCHED, option, program_of, split_options
from groupax.launch.local import MISTAKE
from groupax.launch.slurm import Slurm
from groupax.settings import environment as env


def script_of(command: Slurm, argv: Sequence[str]) -> str:
    """Returns the text of the job script.

    Args:
        command: The options.
        argv: The program, as `program_of` takes it.

    Raises:
        ValueError: The servers' model is unknown, or an option cannot be written into the script.
    """
    trainer = program_of(argv)
    if command.server_nodes and option(argv, "--rollout_servers"):
        raise ValueError("--rollout_servers is set by the job when it has --server_nodes; leave it out")
    if command.server_nodes and argv[0] == "eval":
        raise ValueError("groupax eval samples without servers; leave --server_nodes out")
    server = _server(command, argv) if command.server_nodes else []
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{each}" for each in _sbatch_options(command)),
        "# Written by groupax launch slurm.",
        "set -e",
        *command.setup,
        "set -uo pipefail",
        "",
        *(f"{name}={value}" for name, value in _settings(command).items()),
        f"PYTHON={shlex.quote(sys.executable)}",
        "# shellcheck disable=SC2016 # arguments are literal",
        f"TRAINER=({shlex.join(trainer)})",
        "# shellcheck disable=SC2016",
        f"SERVER=({shlex.join(server)})",
        _body(adds_servers=bool(server) and argv[0] in LAUNCHED[:2]),
    ]
    return "\n".join(lines)


def _settings(command: Slurm) -> dict[str, int]:
    return {
        "NUM_TRAINERS": command.nodes - command.server_nodes,
        "NUM_SERVERS": command.server_nodes,
        "RESTARTS": command.restarts,
        "REQUEUES": command.requeues,
        "BACKOFF_S": command.backoff_s,
        "GRACE_S": command.grace_s,
        "SERVER_WAIT_S": command.server_wait_s,
    }


def _body(adds_servers: bool) -> str:
    return _BODY.format(
        rollout='TRAINER+=(--rollout_servers "${addresses[@]}")' if adds_servers else ":",
        coordinator=env.COORDINATOR,
        num_processes=env.NUM_PROCESSES,
        process_id=env.PROCESS_INDEX,
        api_key=env.API_KEY,
        servers=env.SERVERS,
        preempted=PREEMPTED,
        mistake=MISTAKE,
    )


def _server(command: Slurm, argv: Sequence[str]) -> list[str]:
    options = split_options(command.server_options)
    for name in ("--host", "--port", "--api_key"):
        if option(options, name):
            raise ValueError(f"{name} of the servers is set by the job; leave it out of --server_options")
    model = option(options, "--model") or option(argv, "--model")
    if model is None:
        raise ValueError(
            "the servers have no model to load; give the program a --model, or --server_options='--model MODEL'"
        )
    given = [] if option(options, "--model") else ["--model", model]
    return [sys.executable, "-m", "groupax", "serve", *given, *options, "--host", "0.0.0.0"]


def _sbatch_options(command: Slurm) -> list[str]:
    values: list[tuple[str, object]] = [
        ("job-name", command.job_name),
        ("nodes", command.nodes),
        ("ntasks-per-node", 1),
        ("time", command.time),
        ("partition", command.partition),
        ("account", command.account),
        ("gres", command.gres),
        ("cpus-per-task", command.cpus),
        ("chdir", Path.cwd()),
        ("output", f"{command.job_name}-%j.log"),
        ("open-mode", "append"),
        ("signal", f"TERM@{command.notice_s}"),
    ]
    options = [f"{name}={_quoted(str(value))}" for name, value in values if value is not None]
    all_resources = [] if command.cpus else ["exclusive", "mem=0"]
    extra = [f"{name}{sign}{_quoted(value)}" for name, sign, value in (text.partition("=") for text in command.sbatch)]
    return [*options, "requeue", *all_resources, *extra]


def _quoted(value: str) -> str:
    """Quotes a value for sbatch, which understands quotes and backslashes."""
    if not value.isprintable():
        raise ValueError(f"an option of sbatch must be one line of printable characters, got {value!r}")
    if re.fullmatch(r"[\w.,:;/@%+=\[\]-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Braces that belong to bash are doubled.
_BODY = """
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${{nodes[@]:0:NUM_TRAINERS}}")
servers=("${{nodes[@]:NUM_TRAINERS}}")
port=$((10000 + 2 * SLURM_JOB_ID % 20000))

addresses=()
if ((NUM_SERVERS)); then
  {api_key}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
  export {api_key}
  for node in "${{servers[@]}}"; do addresses+=("http://$node:$((port + 1))"); done
  SERVER+=(--port "$((port + 1))")
  export {servers}="${{addresses[*]}}"
  {rollout}
fi

# Runs one task on each of these nodes, with all that the job has there. Call it in the background only: srun replaces
# the subshell, so that it receives the signals.
on() {{
  local where="$1" number="$2" label=()
  shift 2
  ((number == 1)) || label=(--label)
  exec srun --nodes="$number" --ntasks="$number" --ntasks-per-node=1 --nodelist="$where" --export=ALL --cpu-bind=none \\
    ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} --wait="$GRACE_S" --kill-on-bad-exit=0 \\
    ${{label[@]+"${{label[@]}}"}} "$@"
}}
listed() {{ local IFS=,; echo "$*"; }}
running() {{ [[ -n "$1" ]] && kill -0 "$1" 2>/dev/null; }}

server_run="" trainer_run=""
end_all() {{
  local run
  for run in "$trainer_run" "$server_run"; do
    if running "$run"; then kill -TERM "$run" 2>/dev/null || true; wait "$run" || true; fi
  done
  server_run="" trainer_run=""
}}
trap end_all EXIT

# Starts the servers, and the trainers once these answer. Returns the status of the trainers, or of a failed server.
attempt() {{
  local status=0 ready_run
  if ((NUM_SERVERS)); then
    {num_processes}=1 {process_id}=0 {coordinator}=localhost:1 \\
      on "$(listed "${{servers[@]}}")" "$NUM_SERVERS" --output="$SLURM_JOB_NAME-%j-servers.log" --open-mode=append \\
      "${{SERVER[@]}}" &
    server_run=$!
    "$PYTHON" -m groupax.launch.readiness "$SERVER_WAIT_S" "${{addresses[@]}}" &
    ready_run=$!
    wait -n "$server_run" "$ready_run" || status=$?
    if running "$ready_run"; then
      echo "groupax launch: a server ended with status $status before it answered"
      kill "$ready_run"
      return $((status ? status : 1))
    fi
    ((status == 0)) || return "$status"
  fi
  # shellcheck disable=SC2016 # expanded by each task
  {coordinator}="${{nodes[0]}}:$port" {num_processes}=$NUM_TRAINERS \\
    on "$(listed "${{trainers[@]}}")" "$NUM_TRAINERS" \\
    bash -c 'export {process_id}=$SLURM_PROCID; exec "$@"' trainer "${{TRAINER[@]}}" &
  trainer_run=$!
  if [[ -n "$server_run" ]]; then
    wait -n "$trainer_run" "$server_run" || status=$?
    if running "$trainer_run" && ((status)); then
      echo "groupax launch: a server ended with status $status"
      return "$status"
    fi
    status=0
  fi
  wait "$trainer_run" || status=$?
  return "$status"
}}

wait_s=$BACKOFF_S
for ((restart = 0; ; restart++)); do
  status=0
  attempt || status=$?
  end_all
  case $status in
  0 | {mistake}) exit "$status" ;;
  {preempted})
    if ((${{SLURM_RESTART_COUNT:-0}} < REQUEUES)); then
      echo "groupax launch: the state is saved; requeueing the job"
      scontrol requeue "$SLURM_JOB_ID" && sleep 60
    fi
    exit "$status"
    ;;
  esac
  if ((restart >= RESTARTS)); then
    echo "groupax launch: ended with status $status; not restarted again after $restart restarts"
    exit "$status"
  fi
  echo "groupax launch: ended with status $status; restarting in $wait_s s ($((restart + 1)) of $RESTARTS times)"
  sleep "$wait_s"
  wait_s=$((wait_s * 2 < 300 ? wait_s * 2 : 300))
done
"""
