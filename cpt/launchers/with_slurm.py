"""Files for SLURM: a job that saves when it is told to make room, goes back into the queue, and goes on from there."""

from cpt.launchers.environment import environment_script
from cpt.launchers.launch import Launch
from cpt.launchers.node_script import node_script
from cpt.launchers.script_text import filled
from cpt.launchers.with_torchrun import torchrun_line

JOB = """
#!/usr/bin/env bash
# The run `@NAME@` as a SLURM job on @NODES@ node(s). Submit it from the folder that its paths are relative to:
#
#   sbatch @FOLDER@/job.sbatch
#
# To stop it so that it goes on later: scancel --signal=USR1 --batch JOB (it saves and goes back into the queue). To
# end it: scancel JOB.
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
# One task for each node: torchrun starts that node's processes.
@GPUS@#SBATCH --exclusive
# Nobody else's work on these nodes: a slow node holds up all others.
#SBATCH --requeue
#SBATCH --open-mode=append
# A job that comes back writes on in the same log.
#SBATCH --output=@FOLDER@/%x-%j.log
#SBATCH --signal=B:USR1@@SECONDS_BEFORE_THE_END@
# So many seconds before the time is up, this script is told. It has to be longer than a step and a save; SLURM may be
# 60 s early.
@MORE@set -uo pipefail
cd -- "${SLURM_SUBMIT_DIR:?submit it: sbatch @FOLDER@/job.sbatch}" || exit
[ -f @FOLDER@/node.sh ] || { echo "There is no @FOLDER@/node.sh in $PWD: submit the job from the folder above it."; exit 2; }

MOST_REQUEUES=1000
STATUS=@RUN@/status.json
CPT_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
MASTER_ADDR=${CPT_NODES%%,*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs that begin on one node get different ones
export CPT_NODES MASTER_ADDR MASTER_PORT

told() { # a value of the run's status
    sed -n "s/^ *\\"$1\\": \\"\\{0,1\\}\\([^\\",]*\\).*/\\1/p" "$STATUS" 2>/dev/null
}
before=$(told updated)
told_to_stop=
pass_on=
trap 'told_to_stop=1 pass_on=1' USR1 TERM
echo "$(date --iso-8601=seconds) start ${SLURM_RESTART_COUNT:-0} on $CPT_NODES"

# SLURM 22.05 and newer give a step one core unless it asks for more.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash @FOLDER@/node.sh &
step=$!
while kill -0 "$step" 2>/dev/null; do
    wait "$step" || true
    if [ -n "$pass_on" ]; then
        pass_on=
        scancel --signal=USR1 "$SLURM_JOB_ID" # to node.sh on all nodes
    fi
done
code=0
wait "$step" || code=$?

# The run says how it ended, where it got far enough to say anything: launchers change exit codes. 75: it was told to
# stop, and has saved.
if [ "$(told updated)" != "$before" ]; then
    own=$(told exit_code)
    # `finished`: told to stop or not, nothing is left to do.
    if [ "$(told state)" = finished ] || [ "${own:-0}" != 0 ]; then code=${own:-0}; fi
elif [ -n "$told_to_stop" ]; then
    code=75 # before it could say anything
fi
step=$(told step)
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
echo "$(date --iso-8601=seconds) ended with code $code ($(told state) after step ${step:-0}); the job is ${state:-gone}"
if { [ "$code" = 75 ] || [ "$code" = 76 ]; } && [ "$state" = RUNNING ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MOST_REQUEUES" ]; then
    scontrol requeue "$SLURM_JOB_ID" # the same job, at the end of the queue: it goes on from what was saved
fi
exit "$code"
"""  # noqa: E501
SECONDS_BEFORE_THE_END = 300
GPUS = "#SBATCH --gpus-per-node={gpus}\n"


def job_script(launch: Launch) -> str:
    """The content of `job.sbatch`."""
    return filled(
        JOB,
        name=launch.recipe.name,
        nodes=launch.nodes,
        folder=launch.shown(launch.folder),
        gpus="" if launch.on_cpu else GPUS.format(gpus=launch.gpus_per_node),
        seconds_before_the_end=SECONDS_BEFORE_THE_END,
        more="".join(f"#SBATCH {option}\n" for option in launch.sbatch),
        run=launch.run_folder,
    )


def slurm_files(launch: Launch) -> dict[str, str]:
    """Name -> content."""
    return {
        "environment.sh": environment_script(launch),
        "node.sh": node_script(launch, torchrun_line(launch)),
        "job.sbatch": job_script(launch),
    }
