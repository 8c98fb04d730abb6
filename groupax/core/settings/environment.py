"""The names of groupax's environment variables. Imports nothing."""

API_KEY = "GROUPAX_API_KEY"  # secret of servers and their clients
COORDINATOR = "GROUPAX_COORDINATOR"  # host:port of process 0
NUM_PROCESSES = "GROUPAX_NUM_PROCESSES"
PROCESS_INDEX = "GROUPAX_PROCESS_ID"
SERVERS = "GROUPAX_SERVERS"  # addresses of a SLURM job's servers, separated by spaces
