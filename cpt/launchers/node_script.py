"""`node.sh`, what runs on each node: its environment, the check of the cluster, the launcher, and signals on their way
to the run."""

from cpt.launchers.launch import Launch
from cpt.launchers.script_text import filled

HEAD = """
#!/usr/bin/env bash
# One node of the run `@NAME@`: its environment, @CHECK@then @LAUNCHER@ with @GPUS@ process(es).
#
#   @USE@
#
# SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this script: the run saves at the end of its step and ends. SIGUSR2 ends it at
# once. How it ended is in @RUN@/status.json; the exit codes of launchers do not say it.
set -euo pipefail
cd -- "@BACK@"
@NUMBERS@"""
ALONE = """
NODE_RANK=0
"""
BY_HOSTFILE = """
NODE_RANK=${1:?which node of the hostfile is this? 0 for the first one}
CPT_NODES=$(awk 'NF && $1 !~ /^#/ { print $1 }' @FOLDER@/hostfile | head -n "$NODES" | paste -sd,)
MASTER_ADDR=${MASTER_ADDR:-${CPT_NODES%%,*}}
MASTER_PORT=${MASTER_PORT:-@PORT@}
export CPT_NODES MASTER_ADDR MASTER_PORT
"""
BY_SLURM = """
NODE_RANK=${SLURM_NODEID:?this is started by srun, from @FOLDER@/job.sbatch}
: "${CPT_NODES:?job.sbatch sets it}" "${MASTER_ADDR:?job.sbatch sets it}" "${MASTER_PORT:?job.sbatch sets it}"
"""
ENVIRONMENT = """
# shellcheck source=/dev/null
source @FOLDER@/environment.sh
"""
SIGNALS = """
# Launchers answer signals in ways of their own: some end the run after 30 s, some leave it behind. So they get none (a
# session of their own, SIGUSR1 ignored), and the run's processes are told directly. One that is still starting hears
# of it the next time.
SECONDS_BETWEEN_SIGNALS=10
launcher=
told_to_stop=
trap 'told_to_stop=1' INT TERM HUP USR1
trap 'tell KILL ""' USR2
pid_file=@FOLDER@/node-$NODE_RANK.pid # for start.sh, or whoever wants to send one of these signals
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
"""
CHECK = """
# Whether the nodes fit together: versions, recipe, data, ports, shared folders. It names what does not, and where.
start python -m cpt doctor @COMPARED@ --node-rank "$NODE_RANK" --nodes "$CPT_NODES" --master "$MASTER_ADDR:$MASTER_PORT"
[ "$code" = 0 ] || exit "$code"
[ -z "$told_to_stop" ] || exit 75
export CPT_PREFLIGHT_SECONDS=0 # the run would do the same again
"""  # noqa: E501
END = """
start @LINE@
exit "$code"
"""
END_UNDER_SLURM = """
start @LINE@
# srun ends the other nodes as soon as this one ends with an error: they may still be saving.
[ "$code" = 0 ] || sleep 5
exit "$code"
"""


def node_script(launch: Launch, line: str) -> str:
    """The content of `node.sh`.

    Args:
        line: starts the run's processes on this node; it may use NODES, GPUS_PER_NODE, NODE_RANK, MASTER_ADDR and
            MASTER_PORT.
    """
    alone, under_slurm = launch.nodes == 1 and launch.engine != "slurm", launch.engine == "slurm"
    folder = launch.shown(launch.folder)
    use = f"bash {folder}/node.sh"
    parts = [
        HEAD,
        BY_SLURM if under_slurm else ALONE if alone else BY_HOSTFILE,
        ENVIRONMENT,
        SIGNALS,
        *([CHECK] if launch.nodes > 1 else []),
        END_UNDER_SLURM if under_slurm else END,
    ]
    numbers = {"NODES": launch.nodes, "GPUS_PER_NODE": launch.gpus_per_node}
    used = [
        f"{name}={number}\n" for name, number in numbers.items() if any(f"${name}" in text for text in (line, *parts))
    ]
    return "\n".join(
        filled(
            part,
            name=launch.recipe.name,
            check="the check of the cluster, " if launch.nodes > 1 else "",
            launcher=line.split()[0],
            gpus=launch.gpus_per_node,
            numbers="".join(["\n", *used] if used else []),
            use=(
                f"srun {use}"
                if under_slurm
                else use
                if alone
                else f"{use} NODE_RANK      on every host; start.sh does that by ssh"
            ),
            run=launch.run_folder,
            back=launch.way_back(),
            folder=folder,
            port=launch.port,
            compared=launch.compared_words(),
            line=line,
        )
        for part in parts
    )
