#!/usr/bin/env bash
# Start one node of the run `production-multi-gpu`:
#
#   srun bash launch/slurm_two_nodes/node.sh
#
# SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this script: the run saves at the end of its step and ends; the same command resumes it.
# A second SIGINT kills it. The exit code is the run's: 0 finished, 75 stopped and saved, 76 needs a restart, 2 a mistake that you can fix, 1 any other error.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." # the folder that the recipe's paths are relative to

FOLDER=launch/slurm_two_nodes
# shellcheck disable=SC2034 # for environment.sh
VENV=.venv
NODES=2
GPUS_PER_NODE=8 # processes of a node
NODE_RANK=${SLURM_NODEID:?srun starts this script, from launch/slurm_two_nodes/job.sbatch}
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${HOSTS[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # a different port for each job

# shellcheck source=/dev/null
source "$FOLDER/environment.sh"

# Launchers treat signals in different ways: some kill the run after 30 s, some leave its processes behind. `cpt train` passes signals to
# the run's own processes. With --supervise it also restarts the run after a failure, from its newest checkpoint.
set -m # in a process group of its own: Ctrl-C reaches it through the traps below
python -m cpt train recipes/production_multi_gpu.yaml training.gradient_accumulation_steps=4 \
    --launcher "torchrun --nnodes $NODES --node-rank $NODE_RANK --nproc-per-node $GPUS_PER_NODE --master-addr $MASTER_ADDR --master-port $MASTER_PORT" &
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
