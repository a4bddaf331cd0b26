"""`start.sh`: starts node.sh on every host of the hostfile by ssh, and ends all of them when one fails."""

from cpt.launchers.launch import Launch
from cpt.launchers.script_text import filled

SCRIPT = """
#!/usr/bin/env bash
# Start the run `@NAME@` on the first @NODES@ host(s) of @FOLDER@/hostfile, by ssh without a password.
#
#   bash @FOLDER@/start.sh          on any machine that reaches them and has this folder
#
# It has to stay until the run ends: use tmux where you will not.
# Ctrl-C, SIGTERM, SIGHUP or SIGUSR1: the run saves at the end of its step and ends; the same command goes on from
# there. Twice: all of it ends at once. When a node fails the others get @OTHERS@ s to end by themselves. What each
# node says has its name in front. @HOSTS_BY_HAND@
set -uo pipefail
cd -- "@BACK@" || exit

NODES=@NODES@
SECONDS_FOR_THE_OTHERS=@OTHERS@
SSH=(ssh -n -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=4)
mapfile -t hosts < <(awk 'NF && $1 !~ /^#/ { print $1 }' @FOLDER@/hostfile | head -n "$NODES")
here=$(printf %q "$PWD")

tell() { # a signal to node.sh on all hosts that still run it
    for rank in "${!sessions[@]}"; do
        "${SSH[@]}" "${hosts[rank]}" "kill -$1 \\$(cat $here/@FOLDER@/node-$rank.pid)" 2>/dev/null &
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
    "${SSH[@]}" "${hosts[rank]}" "cd $here && exec bash @FOLDER@/node.sh $rank" > >(sed -u "s/^/${hosts[rank]}: /") 2>&1 &
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
grep -s '"state"\\|"message"' @RUN@/status.json
exit "$first_code"
"""  # noqa: E501
SECONDS_FOR_THE_OTHERS = 60
BY_HAND = "Where there is no ssh between nodes: bash {folder}/node.sh NODE_RANK on each of them."


def start_script(launch: Launch, beside: str = "") -> str:
    """The content of `start.sh`.

    Args:
        beside: another way to start the same, for the head.
    """
    folder = launch.shown(launch.folder)
    return filled(
        SCRIPT,
        name=launch.recipe.name,
        nodes=launch.nodes,
        folder=folder,
        others=SECONDS_FOR_THE_OTHERS,
        hosts_by_hand="\n# ".join([BY_HAND.format(folder=folder), *beside.splitlines()]),
        back=launch.way_back(),
        run=launch.run_folder,
    )
