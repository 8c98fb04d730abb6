"""The job file of SLURM: trainers on the first nodes, servers of rollouts on the others.

What the file does follows from a few facts of SLURM. A signal of `--signal` without B: goes to all tasks and not to the
script. Before the time is over the trainers so get SIGTERM, save their state and end with status 75, and the job puts
itself back into the queue. SIGTERM sent to srun would kill its tasks, so the script never does that to ask for a stop.
After a node has failed or a job of higher priority has come, SLURM requeues the job by itself.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupax.errors import PREEMPTED
from groupax.launch.argv import LAUNCHED, option, options_of, program_of
from groupax.launch.local import MISTAKE
from groupax.settings import environment as env

# A walltime of sbatch: minutes, minutes:seconds, hours:minutes:seconds, with days before a dash.
_TIME = re.compile(r"\d+(-\d+(:\d+(:\d+)?)?|:\d+(:\d+)?)?")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Write the job file of a run on several nodes, and submit it: groupax launch slurm --nodes 5 -- train ...

    One process for each node; the last --server_nodes nodes run `groupax serve` and sample the rollouts."""

    nodes: int = 1
    """All nodes of the job."""
    server_nodes: int = 0
    """How many of them are servers."""
    server_options: str = ""
    """Options of `groupax serve` there, as --server_options="--dtype bfloat16"; --model is by default the program's."""
    server_wait_s: int = 3600
    """Longest time until the servers have loaded the model; the trainers start after that."""
    time: str | None = None
    """Longest time, as 12:00:00 or 2-00:00:00; when it is over the job is requeued and goes on."""
    partition: str | None = None
    """Of the cluster."""
    account: str | None = None
    """That pays."""
    gres: str | None = None
    """Devices of each node, as gpu:8."""
    cpus: int | None = None
    """Cores of each node; by default whole nodes with all their memory."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, without the dashes in front, as constraint=a100 or mail-type=END."""
    setup: tuple[str, ...] = ()
    """Lines of bash that run at the beginning, as "module load cuda"."""
    job_name: str = "groupax"
    """Name of the job and of its output."""
    restarts: int = 3
    """Most times that all is started again within a job after a process failed."""
    requeues: int = 1000
    """Most times that the job is put back into the queue after it saved its state."""
    backoff_s: int = 10
    """Before the first restart; doubled each further time, up to five minutes."""
    grace_s: int = 60
    """When a process has ended the others are killed after so long."""
    notice_s: int = 300
    """How long before the end of its time the run is told to save its state."""
    file: Path | None = None
    """Where to write; by default JOB_NAME.sbatch in this folder. Replaced if it exists."""
    dry_run: bool = False
    """Write the file and submit nothing."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 <= self.server_nodes < self.nodes:
            raise ValueError(
                f"of {self.nodes} nodes {self.server_nodes} cannot be servers: one has to be left that trains; --nodes "
                "counts all of them"
            )
        for name in ("restarts", "requeues", "backoff_s", "grace_s", "notice_s", "server_wait_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be 0 or more, got {getattr(self, name)}")
        if self.cpus is not None and self.cpus < 1:
            raise ValueError(f"--cpus must be at least 1, got {self.cpus}")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(f"--time must be as 90, 12:00:00 or 2-00:00:00, got {self.time!r}")
        if self.time is not None and 0 < _seconds(self.time) <= self.notice_s:
            raise ValueError(
                f"--time {self.time} is all notice: the run is told to save its state {self.notice_s} s before its "
                "end; give it more time, or a shorter --notice_s"
            )
        if not re.fullmatch(r"[\w.+-]+", self.job_name):
            raise ValueError(f"--job_name must be letters, digits and . _ + -, got {self.job_name!r}")
        for each in self.sbatch:
            if not re.fullmatch(r"[a-z][\w-]*(=.*)?", each):
                raise ValueError(f"--sbatch takes options as constraint=a100, got {each!r}")


def _seconds(time: str) -> int:
    """Of a time as SLURM takes it: [days-]hours[:minutes[:seconds]] with days, else [hours:]minutes[:seconds]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def script_of(command: Slurm, words: Sequence[str]) -> str:
    """The text of the job file.

    Args:
        command: the options.
        words: the program, as `program_of` takes it.

    Raises:
        ValueError: the servers' model is not known, or an option cannot stand in the file.
    """
    trainer = program_of(words)
    if command.server_nodes and option(words, "--rollout_servers"):
        raise ValueError("--rollout_servers is set by the job when it has --server_nodes; leave it out")
    if command.server_nodes and words[0] == "eval":
        raise ValueError("groupax eval samples by itself and uses no servers; leave --server_nodes out")
    server = _server(command, words) if command.server_nodes else []
    adds_servers = bool(server) and words[0] in LAUNCHED[:2]
    settings = {
        "NUM_TRAINERS": command.nodes - command.server_nodes,
        "NUM_SERVERS": command.server_nodes,
        "RESTARTS": command.restarts,
        "REQUEUES": command.requeues,
        "BACKOFF_S": command.backoff_s,
        "GRACE_S": command.grace_s,
        "SERVER_WAIT_S": command.server_wait_s,
    }
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH --{each}" for each in _sbatch_options(command)),
        "# Written by groupax launch slurm.",
        "set -e",
        *command.setup,
        "set -uo pipefail",
        "",
        *(f"{name}={value}" for name, value in settings.items()),
        f"PYTHON={shlex.quote(sys.executable)}",
        "# shellcheck disable=SC2016 # words as they were given",
        f"TRAINER=({shlex.join(trainer)})",
        "# shellcheck disable=SC2016",
        f"SERVER=({shlex.join(server)})",
        _BODY.format(
            rollout='TRAINER+=(--rollout_servers "${addresses[@]}")' if adds_servers else ":",
            coordinator=env.COORDINATOR,
            num_processes=env.NUM_PROCESSES,
            process_id=env.PROCESS_INDEX,
            api_key=env.API_KEY,
            servers=env.SERVERS,
            preempted=PREEMPTED,
            mistake=MISTAKE,
        ),
    ]
    return "\n".join(parts)


def _server(command: Slurm, words: Sequence[str]) -> list[str]:
    options = options_of(command.server_options)
    for name in ("--host", "--port", "--api_key"):
        if option(options, name):
            raise ValueError(f"{name} of the servers is set by the job; leave it out of --server_options")
    model = option(options, "--model") or option(words, "--model")
    if model is None:
        raise ValueError(
            "which model do the servers load? give the program a --model, or --server_options='--model MODEL'"
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
    whole = [] if command.cpus else ["exclusive", "mem=0"]
    further = [
        f"{name}{equals}{_quoted(value)}" for name, equals, value in (text.partition("=") for text in command.sbatch)
    ]
    return [*options, "requeue", *whole, *further]


def _quoted(value: str) -> str:
    """As sbatch reads it, which knows quotes and backslashes.

    Raises:
        ValueError: it has more than one line.
    """
    if not value.isprintable():
        raise ValueError(f"an option of sbatch must be one line of printable characters, got {value!r}")
    if re.fullmatch(r"[\w.,:;/@%+=\[\]-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Doubled braces are bash's own.
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

# One task on each of these nodes, with all that the job has there. Only in the background: srun takes the place of the
# subshell, so that it gets the signals.
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

# Servers first, trainers when these answer; the status is the trainers', or of a server that failed.
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
  # shellcheck disable=SC2016 # each task says which one it is
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
      echo "groupax launch: the state is saved, back into the queue"
      scontrol requeue "$SLURM_JOB_ID" && sleep 60
    fi
    exit "$status"
    ;;
  esac
  if ((restart >= RESTARTS)); then
    echo "groupax launch: ended with status $status, not started again after $restart restarts"
    exit "$status"
  fi
  echo "groupax launch: ended with status $status, started again in $wait_s s ($((restart + 1)) of $RESTARTS times)"
  sleep "$wait_s"
  wait_s=$((wait_s * 2 < 300 ? wait_s * 2 : 300))
done
"""


def written(text: str, file: Path) -> Path:
    """The file with this text, whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as aside:
            part = Path(aside.name)
            aside.write(text)
        part.chmod(0o755)
        part.replace(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror or error}") from error
    return file


def submit(file: Path) -> str:
    """What sbatch answers.

    Raises:
        ValueError: sbatch is not there, or refuses the job.
    """
    try:
        done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError(f"there is no sbatch here; {file} is written, submit it where SLURM is") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"sbatch refused {file}: {error.stderr.strip()}") from error
    return done.stdout.strip()
