from cpt.importing.axolotl_keys import HANDLED, IDLE, KNOWN, NOT, PASSED


def test_a_key_stands_in_one_table():
    tables = (HANDLED, PASSED, IDLE, NOT)
    assert sum(map(len, tables)) == len(KNOWN)
