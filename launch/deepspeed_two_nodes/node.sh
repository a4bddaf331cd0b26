#!/usr/bin/env bash
# Start one node of the run `production-zero3`:
#
#   bash launch/deepspeed_two_nodes/node.sh NODE_RANK
#
# SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this script: the run saves at the end of its step and ends; the same command resumes it.
# A second SIGINT kills it. The exit code is the run's: 0 finished, 75 stopped and saved, 76 needs a restart, 2 a mistake that you can fix, 1 any other error.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." # the folder that the recipe's paths are relative to

FOLDER=launch/deepspeed_two_nodes
# shellcheck disable=SC2034 # for environment.sh
VENV=.venv
NODES=2
GPUS_PER_NODE=4 # processes of a node
NODE_RANK=${1:?index of this node in the hostfile, 0 for the first}
mapfile -t -n "$NODES" HOSTS < <(awk 'NF && $1 !~ /^#/ { print $1 }' "$FOLDER/hostfile")
MASTER_ADDR=${HOSTS[0]} MASTER_PORT=${MASTER_PORT:-29500} # two runs with the same first host need different ports

# shellcheck source=/dev/null
source "$FOLDER/environment.sh"

# Launchers treat signals in different ways: some kill the run after 30 s, some leave its processes behind. `cpt train` passes signals to
# the run's own processes. With --supervise it also restarts the run after a failure, from its newest checkpoint.
set -m # in a process group of its own: Ctrl-C reaches it through the traps below
python -m cpt train recipes/production_zero3.yaml training.gradient_accumulation_steps=2 \
    --launcher "deepspeed --hostfile $FOLDER/hostfile --no_ssh --node_rank $NODE_RANK --num_nodes $NODES --num_gpus $GPUS_PER_NODE --master_addr $MASTER_ADDR --master_port $MASTER_PORT" &
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
