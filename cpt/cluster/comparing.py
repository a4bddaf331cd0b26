"""What the facts of all nodes say when they lie beside each other: one complaint for each cause, with the node that
differs."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cpt.cluster.complaint import Complaint
from cpt.cluster.facts import Facts
from cpt.recipe.difference import differences, shown

Nodes = Mapping[str, Facts]
"""Host -> its facts, the master first."""
SMALL_DISK_GIB = 20
SMALL_SHARED_MEMORY_GIB = 1
CLOCK_SECONDS = 5.0
MOST_NAMED = 4
NEEDED = ("torch", "transformers", "accelerate", "deepspeed", "python")
"""A node without one of these cannot run what the others run; other packages may be installed on some nodes only."""


def compare(nodes: Nodes) -> list[Complaint]:
    """Everything that keeps these nodes from training together, then what only costs time."""
    looks: tuple[Callable[[Nodes], Iterator[Complaint]], ...] = (
        hanging,
        unequal_versions,
        unequal_code,
        unequal_hardware,
        unequal_recipes,
        missing_contents,
        unequal_contents,
        wrong_network,
        wrong_clocks,
        little_room,
    )
    return [complaint for look in looks for complaint in look(nodes)]


def common(values: Mapping[str, Any]) -> Any:
    """What most nodes have; of equally many, what comes first: the master's."""
    counts = Counter(json.dumps(value, sort_keys=True) for value in values.values())
    return json.loads(counts.most_common(1)[0][0]) if values else None


def told(nodes: Nodes, *path: str) -> dict[str, Any]:
    """One fact of all nodes that have it."""
    found = {}
    for host, facts in nodes.items():
        value: Any = facts
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[host] = value
    return found


def hanging(nodes: Nodes) -> Iterator[Complaint]:
    """A look that came to no end."""
    for host, at in told(nodes, "hangs").items():
        what = "its disks: the output folder, the store and /dev/shm" if at == "room" else at
        yield Complaint(
            host, f"hangs where it looks at {what}", "Its file system does not answer: `df` there names the one."
        )


def unequal_versions(nodes: Nodes) -> Iterator[Complaint]:
    """Python and the packages."""
    versions = told(nodes, "versions")
    for package in dict.fromkeys(name for found in versions.values() for name in found):
        has = {host: found.get(package) for host, found in versions.items()}
        usual = common(has)
        for host, version in has.items():
            if version != usual:
                fatal = package in NEEDED or (version is not None and usual is not None)
                here = f"is {version}" if version else "is not installed"
                elsewhere = usual or "not installed"
                remedy = "Install the same versions on all nodes, or start the same environment from a shared folder."
                yield Complaint(host, f"{package} {here}, elsewhere {elsewhere} ({others(has, usual)})", remedy, fatal)


def others(has: Mapping[str, Any], usual: Any) -> str:
    """Who has the usual value."""
    names = [host for host, value in has.items() if value == usual]
    return ", ".join(names[:MOST_NAMED]) + f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED)


def unequal_code(nodes: Nodes) -> Iterator[Complaint]:
    """cpt's own sources."""
    hashes = told(nodes, "code")
    usual = common(hashes)
    for host, code in hashes.items():
        if code != usual:
            cause = f"has other source files of cpt ({code[:8]}) than {others(hashes, usual)} ({usual[:8]})"
            yield Complaint(host, cause, "Bring it to the same commit, without changes of its own.")


def unequal_hardware(nodes: Nodes) -> Iterator[Complaint]:
    """GPUs and drivers; processes that have no GPU."""
    gpus, drivers = told(nodes, "hardware", "gpus"), told(nodes, "hardware", "driver")
    processes, counts = told(nodes, "hardware", "processes"), {host: len(found) for host, found in gpus.items()}
    usual = common(counts)
    for host, count in counts.items():
        asked = processes.get(host, 0)
        if count and asked > count:
            yield Complaint(
                host,
                f"has {count} GPUs for {asked} processes",
                f"Start {count} there, or look with nvidia-smi for the rest.",
            )
        elif count != usual:
            remedy = "Look there with nvidia-smi: a card or its driver is lost; or leave that node out."
            yield Complaint(
                host, f"has {count} GPUs, elsewhere {usual} ({others(counts, usual)})", remedy, not asked or not count
            )
    kinds = {host: sorted(set(found)) for host, found in gpus.items() if found}
    yield from differing(kinds, "has {} as GPUs", "The run takes the time of the slowest.", fatal=False)
    yield from differing(
        drivers, "has the GPU driver {}", "Install one driver everywhere, as NCCL expects.", fatal=False
    )


def differing(values: Mapping[str, Any], cause: str, remedy: str, *, fatal: bool) -> Iterator[Complaint]:
    """One complaint for each node that has another value than most."""
    usual = common(values)
    for host, value in values.items():
        if value != usual:
            yield Complaint(
                host,
                f"{cause.format(in_words(value))}, elsewhere {in_words(usual)} ({others(values, usual)})",
                remedy,
                fatal,
            )


def in_words(value: Any) -> str:
    """A list without its brackets."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def unequal_recipes(nodes: Nodes) -> Iterator[Complaint]:
    """The resolved recipes, key by key."""
    recipes = {host: recipe for host, recipe in told(nodes, "recipe").items() if "error" not in recipe}
    usual = common(recipes)
    for host, recipe in recipes.items():
        keys = [
            f"{key} is {shown(here)}, elsewhere {shown(there)}"
            for key, there, here in differences(usual, recipe, ())
            if here != there
        ]
        if keys:
            more = f"; {len(keys) - MOST_NAMED} keys more" if len(keys) > MOST_NAMED else ""
            cause = f"has another recipe: {'; '.join(keys[:MOST_NAMED])}{more} ({others(recipes, usual)})"
            yield Complaint(host, cause, "Start all nodes with the same file and the same key=value words.")


def keys_of_contents(nodes: Nodes) -> list[str]:
    """`data.sources[0].path`, `model.path` and the like."""
    return list(dict.fromkeys(key for facts in nodes.values() for key in facts if "." in key))


def missing_contents(nodes: Nodes) -> Iterator[Complaint]:
    """What a node could not look at: files that are not there, and anything else that raised an error.

    What no node has may still be made by another run before this one; the run's own check knows.
    """
    for host, facts in nodes.items():
        for key, found in facts.items():
            if isinstance(found, dict) and "error" in found:
                remedy = "Copy it there, mount the folder, or name one that all nodes have." if "." in key else ""
                is_nowhere = "." in key and all("error" in node.get(key, found) for node in nodes.values())
                yield Complaint(host, f"`{key}`: {found['error']}", remedy, fatal=not is_nowhere)


def unequal_contents(nodes: Nodes) -> Iterator[Complaint]:
    """Files with other names, sizes or ends than elsewhere."""
    for key in keys_of_contents(nodes):
        found = {
            host: facts[key]
            for host, facts in nodes.items()
            if isinstance(facts.get(key), dict) and "error" not in facts[key]
        }
        hashes = {host: contents["hash"] for host, contents in found.items()}
        usual = common(hashes)
        model = next((contents for host, contents in found.items() if hashes[host] == usual), None)
        for host, contents in found.items():
            if hashes[host] != usual and model is not None:
                cause = f"`{key}`: {contents['path']} has {what_differs(contents, model)} ({others(hashes, usual)})"
                yield Complaint(host, cause, "Copy the same files to all nodes, or read them from a shared folder.")


def what_differs(here: dict[str, Any], there: dict[str, Any]) -> str:
    """Files by name where they are few enough to have been told."""
    mine, theirs = here.get("files"), there.get("files")
    if mine is None or theirs is None:
        return (
            f"{here['count']:,} files of {here['bytes']:,} bytes, elsewhere {there['count']:,} of {there['bytes']:,},"
            " or other content"
        )
    kinds = {
        "not": sorted(theirs.keys() - mine.keys()),
        "only here": sorted(mine.keys() - theirs.keys()),
        "with other content": sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]),
    }
    return "; ".join(f"{kind} {shortened(names)}" for kind, names in kinds.items() if names)


def shortened(names: list[str]) -> str:
    """The first few."""
    return ", ".join(names[:MOST_NAMED]) + f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED)


def wrong_network(nodes: Nodes) -> Iterator[Complaint]:
    """Interfaces that do not exist, names that mean the machine itself only, a port that contradicts, unequal
    settings."""
    for host, network in told(nodes, "network").items():
        if "error" in network:
            continue
        yield from (unknown_interface(host, variable, asked, network) for variable, asked in no_interface(network))
        for name, addresses in network["own_name"].items():
            if not network["asked"].get("GLOO_SOCKET_IFNAME") and all(
                address.startswith("127.") or address == "::1" for address in addresses
            ):
                means = f"means {', '.join(addresses)}" if addresses else "does not resolve"
                interface = network["interface"] if network["interface"] not in (None, "lo") else "INTERFACE"
                remedy = f"Mend /etc/hosts there, or set GLOO_SOCKET_IFNAME={interface}."
                yield Complaint(
                    host,
                    f"its own name {name} {means} there: gloo tells the others an address that is none",
                    remedy,
                    fatal=False,
                )
        if network.get("meets_at") and network["port"] and str(network["meets_at"]) != network["port"]:
            cause = f"its own environment sets MASTER_PORT={network['port']}, the run meets at {network['meets_at']}"
            yield Complaint(
                host,
                cause,
                "Take it out of that node's start-up files: processes started there would wait at the wrong port.",
            )
    variables = told(nodes, "network", "variables")
    for name in dict.fromkeys(name for found in variables.values() for name in found if not name.endswith("IFNAME")):
        has = {host: found.get(name, "not set") for host, found in variables.items()}
        yield from differing(has, f"has {name}={{}}", "Set it alike on all nodes.", fatal=False)


def no_interface(network: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Variables that name an interface which the node does not have; NCCL takes beginnings, `=` before whole names,
    `^` for others."""
    for variable, asked in network["asked"].items():
        exact, names = asked.startswith("=") or variable.startswith("GLOO"), asked.lstrip("=").split(",")
        if asked.startswith("^"):
            continue
        matches = (lambda name, own: own == name) if exact else (lambda name, own: own.startswith(name))
        if not any(matches(name, own) for name in names for own in network["interfaces"]):
            yield variable, asked


def unknown_interface(host: str, variable: str, asked: str, network: Mapping[str, Any]) -> Complaint:
    """What to say of it."""
    has = ", ".join(name for name in network["interfaces"] if name != "lo")
    return Complaint(
        host,
        f"{variable}={asked}, and there is no such interface: it has {has or 'only lo'}",
        f"Set {variable} to one of them.",
    )


def wrong_clocks(nodes: Nodes) -> Iterator[Complaint]:
    """Against the master's."""
    for host, offset in told(nodes, "clock").items():
        if abs(offset) > CLOCK_SECONDS:
            direction = "behind" if offset > 0 else "ahead of"
            cause = f"its clock is {abs(offset):.0f} s {direction} the master's"
            yield Complaint(
                host,
                cause,
                "Set it (`timedatectl set-ntp true`): the times of files and events will not fit.",
                fatal=False,
            )


def little_room(nodes: Nodes) -> Iterator[Complaint]:
    """Disks and shared memory."""
    for host, room in told(nodes, "room").items():
        for what in ("output", "store") if "error" not in room else ():
            path, free = room[what]
            if free < SMALL_DISK_GIB:
                yield Complaint(
                    host,
                    f"{free:.1f} GiB are free at {path}",
                    "Free some: checkpoints and tokens take more.",
                    fatal=False,
                )
        shared = room.get("shared_memory")
        if "error" not in room and (shared is None or shared < SMALL_SHARED_MEMORY_GIB):
            here = "no /dev/shm" if shared is None else f"/dev/shm of {shared:.2f} GiB"
            remedy = "In a container: --shm-size=8g, or --ipc=host. NCCL and data workers need it."
            yield Complaint(host, here, remedy, fatal=False)
