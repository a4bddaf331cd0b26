#!/usr/bin/env bash
# Start one node of the run `@NAME@`:
#
#   @START@
#
# SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this script: the run saves at the end of its step and ends; the same command resumes it.
# A second SIGINT kills it. The exit code is the run's: 0 finished, 75 stopped and saved, 76 needs a restart, 2 a mistake that you can fix, 1 any other error.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/@BACK@" # the folder that the recipe's paths are relative to

FOLDER=@FOLDER@
# shellcheck disable=SC2034 # for environment.sh
VENV=@VENV@
NODES=@NODES@
GPUS_PER_NODE=@GPUS@ # processes of a node
@NODE@

# shellcheck source=/dev/null
source "$FOLDER/environment.sh"

# Launchers treat signals in different ways: some kill the run after 30 s, some leave its processes behind. `cpt train` passes signals to
# the run's own processes. With --supervise it also restarts the run after a failure, from its newest checkpoint.
set -m # in a process group of its own: Ctrl-C reaches it through the traps below
python -m cpt train @RECIPE@ \
    --launcher "@LAUNCHER@" &
run=$!
for signal in INT TERM HUP USR1; do
    # shellcheck disable=SC2064 # with the values of now
    trap "kill -s $signal $run 2> /dev/null || true" "$signal"
done
echo "$$" > "$FOLDER/node-$NODE_RANK.pid" # for start.sh, or whoever wants to send one of these signals
while kill -0 "$run" 2> /dev/null; do wait "$run" || true; done
code=0
wait "$run" || code=$?
rm -f "$FOLDER/node-$NODE_RANK.pid"
# srun kills the other nodes as soon as this one ends with an error; they may still be ending by themselves.
[ "$code" = 0 ] || [ -z "${SLURM_NODEID:-}" ] || sleep 10
exit "$code"
