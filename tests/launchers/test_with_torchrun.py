from tiny_launch import launch_of, write_all

from cpt.launchers.with_torchrun import torchrun_files, torchrun_line


def test_one_node_needs_no_hosts(tmp_path):
    launch = launch_of(tmp_path)
    files = torchrun_files(launch)
    write_all(launch, files)
    assert set(files) == {"environment.sh", "node.sh"} and "torchrun --standalone" in files["node.sh"]


def test_several_nodes_have_fixed_ranks(tmp_path):
    launch = launch_of(tmp_path, nodes=2)
    files = torchrun_files(launch)
    write_all(launch, files)
    assert set(files) == {"environment.sh", "node.sh", "hostfile", "start.sh"}
    assert '--node-rank "$NODE_RANK"' in files["node.sh"] and "NODES=2\nGPUS_PER_NODE=2\n" in files["node.sh"]


def test_torchrun_takes_its_words(tmp_path):
    from torch.distributed.run import get_args_parser

    numbers = {
        "$NODES": "2",
        "$NODE_RANK": "1",
        "$GPUS_PER_NODE": "2",
        "$MASTER_ADDR": "node-0",
        "$MASTER_PORT": "29500",
    }
    for nodes in (1, 2):
        line = (
            torchrun_line(launch_of(tmp_path, nodes=nodes, overrides=("seed=3",)))
            .replace("\\\n", " ")
            .replace('"', "")
        )
        words = [numbers.get(word, word) for word in line.split()]
        taken = get_args_parser().parse_args(words[1:])
        assert taken.nproc_per_node == "2" and taken.training_script_args == ["recipe.yaml", "seed=3"]
        assert (taken.standalone, taken.nnodes, taken.node_rank) == (
            (True, "1:1", 0) if nodes == 1 else (False, "2", 1)
        )
