"""What a part of a recipe is: keys that are checked and do not change, or something chosen by its name."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Part of a recipe: unknown keys are errors, values are not bent into shape, and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Component(BaseModel):
    """Something chosen by name, with its own options beside it: `{name: length, min_characters: 200}`, or `length`."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    name: str
    """A built-in's name, or your own `package.module:function`."""

    @model_validator(mode="before")
    @classmethod
    def by_its_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """What stands beside the name."""
        return dict(self.model_extra or {})
