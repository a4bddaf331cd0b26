"""Write YAML that `yaml_lines` reads back unchanged."""

from typing import Any

import yaml

from cpt.recipe.words import in_yaml
from cpt.recipe.yaml_lines import resolve_scalar

TAGS = {type(None): "null", bool: "bool", int: "int", float: "float"}


def write_yaml(values: Any) -> str:
    """The values as a YAML document, keys in their order."""
    return yaml.dump(values, Dumper=Writer, sort_keys=False, allow_unicode=True, width=120)


class Writer(yaml.SafeDumper):
    """Quotes text that other readers (YAML 1.1: `no`) or ours (`1e-4`) would take for something else; writes no
    anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write shared values out each time."""
        return True

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """What an unquoted word would be read as."""
        tag: str = super().resolve(kind, value, implicit)
        if kind is yaml.ScalarNode and implicit[0] and tag == self.DEFAULT_SCALAR_TAG:
            try:
                return f"tag:yaml.org,2002:{TAGS.get(type(resolve_scalar(value)), 'str')}"
            except ValueError:
                return "tag:yaml.org,2002:int"
        return tag


def write_number(writer: Writer, number: float) -> yaml.ScalarNode:
    """A float as people write it: 1e-5."""
    return writer.represent_scalar("tag:yaml.org,2002:float", in_yaml(number))


Writer.add_representer(float, write_number)
