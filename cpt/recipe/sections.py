"""The schema as other files ask about it: which keys a section has, what stands at a location, where a key belongs."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cpt.recipe.schema import LORA_PRESETS, Model, Recipe
from cpt.recipe.tree import Location


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section as users write them (`import`, not `import_`)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def without_none(annotation: Any) -> Any:
    """`X` for `X | None` and for `Annotated[X, ...]`."""
    if get_origin(annotation) is Annotated:
        return without_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return without_none(next(part for part in get_args(annotation) if part is not NoneType))
    return annotation


def types_in(annotation: Any) -> list[Any]:
    """`[X, Y]` for `X | Y | None`."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [part for part in parts if part is not NoneType]


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class that an annotation names, if it names one."""
    inner = without_none(annotation)
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def is_free_mapping(annotation: Any) -> bool:
    """True for `dict[str, ...]`: a section whose keys are someone else's."""
    return get_origin(without_none(annotation)) is dict


def presets_of(annotation: Any) -> tuple[str, ...]:
    """The words that stand for whole sections there: `cpt` for `model.lora`."""
    return LORA_PRESETS if annotation == Model.model_fields["lora"].annotation else ()


def item_in(annotation: Any) -> Any:
    """The annotation of a list's items, None for what is not a list."""
    inner = without_none(annotation)
    return get_args(inner)[0] if get_origin(inner) is list else None


def child_annotation(annotation: Any, step: str | int) -> Any:
    """The annotation of what stands one step below, None where the schema does not say."""
    if isinstance(step, int):
        return item_in(annotation)
    if is_free_mapping(annotation):
        value = get_args(without_none(annotation))[1]
        return None if value is Any else value
    section = section_in(annotation)
    field = keys_of(section).get(step) if section else None
    return field.annotation if field else None


def annotation_at(location: Location) -> Any:
    annotation: Any = Recipe
    for step in location:
        annotation = child_annotation(annotation, step)
    return annotation


def all_keys(annotation: Any = Recipe, above: Location = ()) -> Iterator[Location]:
    """Every key of the schema with the way to it; of a list's items, those of item 0."""
    section = section_in(annotation) or section_in(item_in(annotation))
    if section is None:
        return
    here = above if section_in(annotation) else (*above, 0)
    for key, field in keys_of(section).items():
        yield (*here, key)
        yield from all_keys(field.annotation, (*here, key))
