#!/usr/bin/env bash
# Start the run `production-zero3` on the first 2 hosts of launch/deepspeed_two_nodes/hostfile, by ssh without a password:
#
#   bash launch/deepspeed_two_nodes/start.sh          on any machine that reaches the hosts and has this folder
#
# It stays until the run ends: use tmux. Ctrl-C, SIGTERM, SIGHUP or SIGUSR1: the run saves at the end of its step and ends; the same command
# resumes it. A second signal kills it. When a node fails, the others are stopped after a minute. Where there is no ssh between nodes, type
# `bash launch/deepspeed_two_nodes/node.sh NODE_RANK` on each of them.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit

FOLDER=launch/deepspeed_two_nodes
NODES=2
SECONDS_FOR_THE_OTHERS=60
SSH=(ssh -n -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=4)
mapfile -t -n "$NODES" hosts < <(awk 'NF && $1 !~ /^#/ { print $1 }' "$FOLDER/hostfile")
here=$(printf %q "$PWD")

stop() { # the first time the run saves and ends, the second time it is killed
    for node in "${!sessions[@]}"; do
        "${SSH[@]}" "${hosts[node]}" "kill -INT \$(cat $here/$FOLDER/node-$node.pid)" 2> /dev/null &
    done
}
trap 'echo "Stopping the run."; stop' INT TERM HUP USR1

declare -a sessions=()
for node in "${!hosts[@]}"; do
    "${SSH[@]}" "${hosts[node]}" "cd $here && exec bash $FOLDER/node.sh $node" > >(sed -u "s/^/${hosts[node]}: /") 2>&1 &
    sessions[node]=$!
done

code=0
deadline=
while [ "${#sessions[@]}" -gt 0 ]; do
    sleep 1 &
    wait "$!"
    for node in "${!sessions[@]}"; do
        if kill -0 "${sessions[node]}" 2> /dev/null; then continue; fi
        ended=0
        wait "${sessions[node]}" || ended=$?
        unset "sessions[node]"
        if [ "$ended" = 0 ]; then continue; fi
        echo "${hosts[node]} (node $node) ended with code $ended.$([ "$ended" != 255 ] || echo ' ssh lost it.')"
        if [ "$code" = 0 ]; then
            code=$ended
            deadline=$((SECONDS + SECONDS_FOR_THE_OTHERS))
        fi
    done
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] && [ "${#sessions[@]}" -gt 0 ]; then
        echo "Stopping the other nodes."
        stop
        deadline=$((SECONDS + SECONDS_FOR_THE_OTHERS))
    fi
done
exit "$code"
