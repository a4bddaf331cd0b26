#!/usr/bin/env bash
# One node of the run `multi-rtx4090`: its environment, then deepspeed with 4 process(es).
#
#   bash launch/four_rtx4090/node.sh
#
# SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this script: the run saves at the end of its step and ends. SIGUSR2 ends it at
# once. How it ended is in runs/multi-rtx4090/status.json; the exit codes of launchers do not say it.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

GPUS_PER_NODE=4

NODE_RANK=0

# shellcheck source=/dev/null
source launch/four_rtx4090/environment.sh

# Launchers answer signals in ways of their own: some end the run after 30 s, some leave it behind. So they get none (a
# session of their own, SIGUSR1 ignored), and the run's processes are told directly. One that is still starting hears
# of it the next time.
SECONDS_BETWEEN_SIGNALS=10
launcher=
told_to_stop=
trap 'told_to_stop=1' INT TERM HUP USR1
trap 'tell KILL ""' USR2
pid_file=launch/four_rtx4090/node-$NODE_RANK.pid # for start.sh, or whoever wants to send one of these signals
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

start deepspeed --num_gpus "$GPUS_PER_NODE" --master_port 29500 cpt/train.py recipes/multi_rtx4090.yaml
exit "$code"
