"""What clients are asked to have a model fill in: small, and bounded, so that any model ends it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Paint(BaseModel):
    """A colour, as much of it as there is, and what it is good for."""

    colour: Literal["red", "green", "blue"]
    litres: int = Field(ge=0, le=99)
    glossy: bool
    uses: list[Literal["walls", "doors"]] = Field(max_length=2)


QUESTION = "Describe a paint as JSON."
