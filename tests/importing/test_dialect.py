from cpt.importing.axolotl_keys import HANDLED as AXOLOTLS
from cpt.importing.dialect import AXOLOTL, LLAMAFACTORY
from cpt.importing.llamafactory_keys import HANDLED as LLAMAFACTORYS


def test_the_names_are_keys_of_the_tool():
    for dialect, keys in ((AXOLOTL, AXOLOTLS), (LLAMAFACTORY, LLAMAFACTORYS)):
        names = (
            dialect.sequence,
            dialect.rows,
            dialect.epochs,
            dialect.optimizer,
            dialect.scheduler,
            dialect.held_out,
        )
        assert set(names) <= keys.keys()
