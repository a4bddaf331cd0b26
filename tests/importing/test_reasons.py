from cpt.importing.reasons import as_they_are, by_key


def test_tables_are_written_by_their_reasons():
    assert by_key({"slow": "a b", "gone": "c"}) == {"a": "slow", "b": "slow", "c": "gone"}
    assert as_they_are("a  b") == {"a": "a", "b": "b"}
