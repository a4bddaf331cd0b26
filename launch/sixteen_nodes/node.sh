#!/usr/bin/env bash
# One node of the run `production-multi-gpu`: its environment, the check of the cluster, then torchrun with 8 process(es).
#
#   bash launch/sixteen_nodes/node.sh NODE_RANK      on every host; start.sh does that by ssh
#
# SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this script: the run saves at the end of its step and ends. SIGUSR2 ends it at
# once. How it ended is in runs/production-multi-gpu/status.json; the exit codes of launchers do not say it.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

NODES=16
GPUS_PER_NODE=8

NODE_RANK=${1:?which node of the hostfile is this? 0 for the first one}
CPT_NODES=$(awk 'NF && $1 !~ /^#/ { print $1 }' launch/sixteen_nodes/hostfile | head -n "$NODES" | paste -sd,)
MASTER_ADDR=${MASTER_ADDR:-${CPT_NODES%%,*}}
MASTER_PORT=${MASTER_PORT:-29500}
export CPT_NODES MASTER_ADDR MASTER_PORT

# shellcheck source=/dev/null
source launch/sixteen_nodes/environment.sh

# Launchers answer signals in ways of their own: some end the run after 30 s, some leave it behind. So they get none (a
# session of their own, SIGUSR1 ignored), and the run's processes are told directly. One that is still starting hears
# of it the next time.
SECONDS_BETWEEN_SIGNALS=10
launcher=
told_to_stop=
trap 'told_to_stop=1' INT TERM HUP USR1
trap 'tell KILL ""' USR2
pid_file=launch/sixteen_nodes/node-$NODE_RANK.pid # for start.sh, or whoever wants to send one of these signals
echo "$$" > "$pid_file"
trap 'rm -f "$pid_file"' EXIT

tell() { # a signal $1 to the launcher and all below it whose command line has the word $2
    ps -e -ww -o pid=,ppid=,args= | awk -v top="${launcher:-none}" -v word="$2" '
        { above[$1] = $2; line[$1] = $0 }
        END {
            for (pid in above) {
                for (up = pid; up in above && up != top; up = above[up]);
                if (up == top && index(line[pid], word)) print pid
            }
        }' | xargs -r kill "-$1" 2>/dev/null || true
}

start() { # and wait for its end, whatever signals come
    (trap '' USR1 && exec setsid -- "$@") &
    launcher=$!
    while kill -0 "$launcher" 2>/dev/null; do
        if [ -z "$told_to_stop" ]; then
            wait "$launcher" || true
        else
            tell USR1 train.py
            sleep "$SECONDS_BETWEEN_SIGNALS" > /dev/null 2>&1 &
            wait -n "$launcher" "$!" || true
        fi
    done
    code=0
    wait "$launcher" || code=$?
}

# Whether the nodes fit together: versions, recipe, data, ports, shared folders. It names what does not, and where.
start python -m cpt doctor recipes/production_multi_gpu.yaml training.gradient_accumulation_steps=1 --node-rank "$NODE_RANK" --nodes "$CPT_NODES" --master "$MASTER_ADDR:$MASTER_PORT"
[ "$code" = 0 ] || exit "$code"
[ -z "$told_to_stop" ] || exit 75
export CPT_PREFLIGHT_SECONDS=0 # the run would do the same again

start torchrun \
    --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    cpt/train.py recipes/production_multi_gpu.yaml training.gradient_accumulation_steps=1
exit "$code"
