import pytest

from cpt.errors import ResourceError
from cpt.hardware import GPU_TYPES
from cpt.planner.links import BETWEEN, WITHIN, by_name, links_of, simplified


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("NVLink 4", "NVLink 4"),
        ("nvlink-4", "NVLink 4"),
        ("pcie5", "PCIe 5"),
        ("InfiniBand 400 Gb/s", "InfiniBand 400"),
        ("ib400", "InfiniBand 400"),
        ("NDR", "InfiniBand 400"),
        ("RoCE 200Gbps", "RoCE 200"),
        ("10GbE", "Ethernet 10"),
        ("eth100", "Ethernet 100"),
        ("Ethernet 25G", "Ethernet 25"),
    ],
)
def test_a_link_is_known_by_the_names_that_people_give_it(written, meant):
    assert by_name(written).name == meant


def test_no_two_links_share_a_name():
    links = (*WITHIN, *BETWEEN)
    assert len({simplified(link.name) for link in links}) == len(links)


def test_an_unknown_link_gets_a_suggestion_and_the_list():
    with pytest.raises(
        ResourceError, match="no link called `nvlnk4` is known. Did you mean `NVLink 4`.*Known: NVLink 3.*Ethernet 100"
    ):
        by_name("nvlnk4")


def test_what_the_user_writes_counts_and_the_rest_is_what_such_machines_have():
    links = links_of("H100", 8, "2 x infiniband200")
    assert (links.within.name, links.between_in_words, links.is_given) == ("NVLink 4", "2 x InfiniBand 200", True)
    assert links.speed_of_node == 2 * 25e9 * 0.9
    assumed = links_of("H100", 4)
    assert (assumed.between_in_words, assumed.is_given) == ("4 x InfiniBand 400", False)


def test_geforce_cards_copy_through_the_host():
    links = links_of("RTX 4090", 8, "pcie4")
    assert links.within.name == "PCIe 4 through the host" and links.within.speed < 0.5 * by_name("pcie4").speed


@pytest.mark.parametrize("gpu", [kind.name for kind in GPU_TYPES] + ["mine"])
def test_every_gpu_has_links(gpu):
    links = links_of(gpu)
    assert not links.within.is_between and links.between.is_between and links.adapters >= 1


@pytest.mark.parametrize("written", ["ib400, eth10", "nvlink4 + pcie4", "8 x nvlink4", "0 x ib400"])
def test_what_contradicts_itself_is_refused(written):
    with pytest.raises(ResourceError, match="--links"):
        links_of("H100", 8, written)
