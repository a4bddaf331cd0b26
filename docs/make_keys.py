"""Write the table of the keys of Hugging Face's config classes: `python -m docs.make_keys`, after an upgrade."""

import json
from importlib.metadata import version
from pkgutil import resolve_name

from cpt.recipe.huggingface_keys import PEFT_METHODS, STAGE_CONFIGS, TABLE, keys_of_class

PACKAGES = ("transformers", "trl", "peft")


def table_of_keys() -> str:
    """Return the table as JSON, a line for each distinct key."""
    distinct: dict[str, int] = {}
    classes: list[str] = []
    for config in sorted({*STAGE_CONFIGS.values(), *PEFT_METHODS.values()}):
        numbers: dict[str, int] = {}
        for name, key in keys_of_class(resolve_name(config)).items():
            kinds = sorted(kind.__name__ for kind in key.kinds)
            written = json.dumps([kinds, key.choices])
            numbers[name] = distinct.setdefault(written, len(distinct))
        classes.append(f"{json.dumps(config)}: {json.dumps(numbers)}")
    versions = json.dumps({package: version(package) for package in PACKAGES})
    keys = ",\n".join(distinct)
    keys_of_classes = ",\n".join(classes)
    return f'{{"versions": {versions},\n"keys": [\n{keys}\n],\n"classes": {{\n{keys_of_classes}\n}}}}\n'


if __name__ == "__main__":
    TABLE.write_text(table_of_keys())
