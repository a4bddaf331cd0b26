#!/usr/bin/env bash
# Start the run `production-multi-gpu` on the first 16 host(s) of launch/sixteen_nodes/hostfile, by ssh without a password.
#
#   bash launch/sixteen_nodes/start.sh          on any machine that reaches them and has this folder
#
# It has to stay until the run ends: use tmux where you will not.
# Ctrl-C, SIGTERM, SIGHUP or SIGUSR1: the run saves at the end of its step and ends; the same command goes on from
# there. Twice: all of it ends at once. When a node fails the others get 60 s to end by themselves. What each
# node says has its name in front. Where there is no ssh between nodes: bash launch/sixteen_nodes/node.sh NODE_RANK on each of them.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit

NODES=16
SECONDS_FOR_THE_OTHERS=60
SSH=(ssh -n -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=4)
mapfile -t hosts < <(awk 'NF && $1 !~ /^#/ { print $1 }' launch/sixteen_nodes/hostfile | head -n "$NODES")
here=$(printf %q "$PWD")

tell() { # a signal to node.sh on all hosts that still run it
    for rank in "${!sessions[@]}"; do
        "${SSH[@]}" "${hosts[rank]}" "kill -$1 \$(cat $here/launch/sixteen_nodes/node-$rank.pid)" 2>/dev/null &
    done
}
# shellcheck disable=SC2317 # a trap calls it
stop() {
    signals=$((signals + 1))
    if [ "$signals" = 1 ]; then
        echo "The run is told to save and end."
        tell USR1
    else
        tell USR2
    fi
}
signals=0
trap stop INT TERM HUP USR1

declare -a sessions=()
for rank in "${!hosts[@]}"; do
    "${SSH[@]}" "${hosts[rank]}" "cd $here && exec bash launch/sixteen_nodes/node.sh $rank" > >(sed -u "s/^/${hosts[rank]}: /") 2>&1 &
    sessions[rank]=$!
done

first_code=0
deadline=
while [ "${#sessions[@]}" -gt 0 ]; do
    sleep 1 &
    wait "$!"
    for rank in "${!sessions[@]}"; do
        if kill -0 "${sessions[rank]}" 2>/dev/null; then continue; fi
        code=0
        wait "${sessions[rank]}" || code=$?
        unset "sessions[rank]"
        [ "$code" = 0 ] || echo "${hosts[rank]} (node $rank) ended with code $code.$([ "$code" != 255 ] || echo ' ssh lost it.')"
        if [ "$code" != 0 ] && [ "$first_code" = 0 ]; then
            first_code=$code
            deadline=$((SECONDS + SECONDS_FOR_THE_OTHERS))
        fi
    done
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] && [ "${#sessions[@]}" -gt 0 ]; then
        echo "The other nodes are ended."
        tell USR2
        deadline=$((SECONDS + SECONDS_FOR_THE_OTHERS))
    fi
done
grep -s '"state"\|"message"' runs/production-multi-gpu/status.json
exit "$first_code"
