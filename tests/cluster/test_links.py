"""What a link can carry is read where the system tells it."""

from cpt.cluster.links import interface_to, link_speeds


def test_the_interface_to_this_machine_is_the_loopback():
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no-such-host.invalid") is None


def test_the_speed_of_a_card_and_of_infiniband_ports_that_are_up(tmp_path):
    card = tmp_path / "net" / "eth0"
    (card / "device").mkdir(parents=True)
    (card / "speed").write_text("25000\n")
    for number, state in enumerate(("4: ACTIVE", "4: ACTIVE", "1: DOWN")):
        port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert link_speeds("eth0", tmp_path / "net", tmp_path / "infiniband") == {"ethernet": 3.125, "infiniband": 100.0}


def test_a_virtual_interface_has_no_speed_of_its_own(tmp_path):
    (tmp_path / "net" / "veth0").mkdir(parents=True)
    (tmp_path / "net" / "veth0" / "speed").write_text("10000\n")
    assert link_speeds("veth0", tmp_path / "net", tmp_path / "infiniband") == {}
    assert link_speeds(None, tmp_path / "net", tmp_path / "infiniband") == {}
